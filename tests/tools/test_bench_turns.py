"""tools/bench rollout and train on a model of no size: every method answers, and the table has its figures."""

import re

import pytest

from mllm.errors import UserError
from tools.bench import rollout, train, turns


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_rollout_s_table_has_speed_useful_share_and_bytes(capsys):
    small = ["--hidden", "64", "--layers", "1", "--repeats", "1", "--limit", "48"]
    assert rollout.main([*small, "--rows", "16", "--slots", "4"]) == 0
    header, _, engine, *_ = map(cells, capsys.readouterr().out.splitlines())
    figures = dict(zip(header[1:], map(float, engine[1:]), strict=True))
    assert engine[0] == "engine"
    assert figures["time"] == 1
    assert 0.4 < figures["useful"] <= 1 <= figures["bytes"] < 20
    assert 16 <= figures["tokens"] <= 16 * 48


def test_a_table_of_updates_has_seconds_peaks_and_places_of_every_way(capsys):
    assert train.main(["--hidden", "128", "--layers", "1", "--repeats", "1", "--rank", "4"]) == 0
    header, _, *lines = map(cells, capsys.readouterr().out.splitlines())
    assert header == ["", "full", "padded", "LoRA"]
    rows = {line[0]: [float(re.match("[0-9.]+", cell)[0]) for cell in line[1:]] for line in lines}
    assert min(rows["seconds"]) > 0
    assert 0 < rows["peak, MiB"][2] < rows["peak, MiB"][0]  # 4 M embeddings with gradient and moments, or alone
    assert rows["places"][1] == 16 * 128 > rows["places"][0] == rows["places"][2]
    assert 0 <= rows["padding"][0] < rows["padding"][1]


def test_a_method_whose_process_ends_is_named_in_a_line():
    with pytest.raises(UserError, match=r"^absent: its process ended with exit code 1"):
        turns.compare("tools.bench.rollout", {"absent": ["absent", "{}"]}, 1)
