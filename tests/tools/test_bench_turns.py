"""tools/bench rollout and train on a model of no size: every method answers, and the table has its figures."""

import pytest

from mllm.errors import UserError
from tools.bench import frame, rollout, train


def rows(capsys):
    """The table that was printed: the first number of each cell, by row and column."""
    columns, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()
    )
    numbers = ([name, *(float(cell.split(",")[0]) for cell in cells)] for name, *cells in lines)
    return {name: dict(zip(columns[1:], cells, strict=True)) for name, *cells in numbers}


def test_a_rollout_s_table_has_speed_useful_share_and_bytes(monkeypatch, capsys):
    monkeypatch.setattr(rollout, "METHODS", {"engine": rollout.METHODS["engine"]})
    small = ["--hidden", "64", "--layers", "1", "--repeats", "1", "--limit", "48"]
    assert rollout.main([*small, "--rows", "16", "--slots", "4"]) == 0
    [(name, figures)] = rows(capsys).items()
    assert name == "engine"
    assert min(figures["tokens/s"], figures["seconds"]) > 0
    assert 0.4 < figures["useful"] <= 1 <= figures["bytes"] < 20
    assert 16 <= figures["tokens"] <= 16 * 48


def test_a_table_of_updates_has_seconds_peaks_and_places(monkeypatch, capsys):
    monkeypatch.setattr(train, "WAYS", ("padded", "LoRA"))  # "full" is LoRA's rows and padded's parameters
    small = ["--hidden", "64", "--layers", "1", "--vocabulary", "16384"]
    assert train.main([*small, "--repeats", "1", "--rank", "4"]) == 0
    found = rows(capsys)
    padded, lora = found["padded"], found["LoRA"]
    assert min(way["seconds"] for way in found.values()) > 0
    assert 0 < lora["peak MiB"] < padded["peak MiB"]  # 1 M embeddings with gradient and moments, or alone
    assert padded["places"] == 16 * 128 > lora["places"]
    assert 0 <= lora["padding"] < padded["padding"]


def test_ratios_are_those_of_the_same_turn():
    found = {"a": [{"s": 1.0}, {"s": 2.0}, {"s": 4.0}], "b": [{"s": 3.0, "n": 7}, {"s": 3.0}, {"s": 4.0}]}
    *_, a, b = frame.compared(found, {"s": ("seconds", 1, ".1fx"), "m": ("more", 1, ".0f")}).splitlines()
    assert [cell.strip() for cell in a.split("|")[1:-1]] == ["a", "2.0", "-"]
    assert [cell.strip() for cell in b.split("|")[1:-1]] == ["b", "3.0, 1.50 (1.00 to 3.00)", "-"]


def test_a_method_whose_process_ends_is_named_in_a_line():
    with pytest.raises(UserError, match=r"^absent: failed: KeyError: 'absent'"):
        frame.compare("tools.bench.rollout", ["absent"], {}, 1)
