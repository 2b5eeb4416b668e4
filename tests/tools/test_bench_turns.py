"""tools/bench rollout and train on a model of no size: the table has the method's figures."""

import pytest

from mllm.errors import UserError
from tools.bench import frame, rollout, train


def row(capsys):
    """The figures of the only method in the table that was printed, by column."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    columns, _, figures = lines
    return dict(zip(columns[2:], map(float, figures[2:]), strict=True))


def test_a_rollout_s_table_has_speed_and_useful_share(monkeypatch, capsys):
    monkeypatch.setattr(rollout, "METHODS", {"engine": rollout.engine})
    small = ["--hidden", "64", "--layers", "1", "--repeats", "1", "--limit", "48"]
    assert rollout.main([*small, "--rows", "16", "--slots", "4"]) == 0
    found = row(capsys)
    assert min(found["tokens/s"], found["seconds"]) > 0
    assert 0.4 < found["useful"] <= 1
    assert 16 <= found["tokens"] <= 16 * 48


def test_padded_rows_have_a_sequence_each(monkeypatch, capsys):
    monkeypatch.setattr(train, "WAYS", ("padded",))
    assert train.main(["--hidden", "64", "--layers", "1", "--vocabulary", "260", "--repeats", "1"]) == 0
    found = row(capsys)
    assert found["seconds"] > 0
    assert found["places"] == 16 * 128
    assert 0 < found["padding"] < 1


def test_ratios_are_those_of_the_same_turn_and_a_method_that_fails_is_named(monkeypatch):
    found = {"a": [{"seconds": 1.0, "n": 7}, {"seconds": 200.0, "n": 7}], "b": [{"seconds": 3.0}, {"seconds": 200.0}]}
    *_, a, b = frame.compared(found).splitlines()
    assert [cell.strip() for cell in a.split("|")[1:-1]] == ["a", "1.00 (1.00 to 1.00)", "100", "7.000"]
    assert [cell.strip() for cell in b.split("|")[1:-1]] == ["b", "2.00 (1.00 to 3.00)", "102", "-"]
    monkeypatch.setattr(frame, "start", lambda *_, **__: ([], "MemoryError"))
    with pytest.raises(UserError, match=r"^a: MemoryError$"):
        frame.compare("name", "", [], ["a"], repeats=(1, "turns"))
