"""tools/bench rollout: the figures of a model of no size, the table's medians and ratios, and a method that fails."""

import pytest

from tools.bench import __main__ as bench
from tools.bench import rollout


def rows(capsys):
    """The table that was printed: its cells, without the rule."""
    columns, _, *methods = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in (columns, *methods)]


@pytest.mark.nightly
def test_conversations_have_speed_useful_share_bytes_and_programs_with_answers_prefilled_or_all_anew(
    monkeypatch, capsys
):
    methods = {name: rollout.METHODS[name] for name in ("engine", "prefilled anew")}
    monkeypatch.setattr(rollout, "METHODS", methods)
    small = ["--hidden", "64", "--layers", "1", "--repeats", "1", "--limit", "16", "--turns", "2"]
    assert bench.main(["rollout", *small, "--rows", "8", "--slots", "4"]) == 0
    columns, *found = rows(capsys)
    assert [name for name, *_ in found] == [*methods]
    engine, anew = (dict(zip(columns[2:], map(float, cells[2:]), strict=True)) for cells in found)
    for one in engine, anew:
        assert min(one["tokens/s"], one["seconds"], one["compiling"]) > 0
        assert 0.4 < one["useful"] <= 1 < one["bytes"]
        assert 16 <= one["tokens"] <= 2 * 8 * 16
        assert 1 <= one["programs"] <= 6
    assert engine["prefilled"] < anew["prefilled"]


def test_ratios_are_those_of_the_same_turn_and_a_method_that_fails_is_named(monkeypatch, capsys):
    seconds, tokens = {"engine": [1.0, 200.0, 1.0], "other": [3.0, 200.0, 1.0]}, {"engine": 60, "other": 30}

    def start(module, task, cache):
        method, took = task["method"], seconds[task["method"]][task["seed"]]
        own = {"n": 7} if method == "engine" else {}
        return [{"seconds": took, "tokens/s": tokens[method] / took, **own}], "MemoryError" * (task["seed"] > 1)

    monkeypatch.setattr(rollout, "METHODS", dict.fromkeys(["engine", "prefilled anew", "other"]))
    monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(rollout, "start", start)
    assert rollout.main(["--repeats", "2"]) == 0
    _, engine, other = rows(capsys)
    assert engine == ["engine", "1.00 (1.00 to 1.00)", "100", "30.150", "7.000"]
    assert other == ["other", "4.00 (2.00 to 6.00)", "102", "5.075", "-"]
    assert rollout.main(["--repeats", "3"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: engine: MemoryError"
