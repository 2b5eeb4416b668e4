"""tools/bench rollout, update and train on a model of no size: every method answers, and the table has its figures."""

from pathlib import Path

import pytest

from tools.bench import rollout, train, update

ROOT = Path(__file__).parent.parent.parent
SMALL = ["--hidden", "64", "--layers", "1", "--repeats", "1", "--limit", "48"]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_rollout_s_table_has_speed_useful_share_and_bytes(capsys):
    assert rollout.main([*SMALL, "--rows", "16", "--slots", "4"]) == 0
    header, _, engine, *_ = map(cells, capsys.readouterr().out.splitlines())
    figures = dict(zip(header[1:], map(float, engine[1:]), strict=True))
    assert engine[0] == "engine"
    assert figures["time"] == 1
    assert 0.4 < figures["useful"] <= 1 <= figures["bytes"] < 20
    assert 16 <= figures["tokens"] <= 16 * 48


def test_an_update_s_table_has_both_checkouts_and_their_ratio(capsys):
    """The other checkout is this one, so both have as many places."""
    assert update.main([*SMALL, "--sequences", "16", "--old", str(ROOT)]) == 0
    header, _, *lines = map(cells, capsys.readouterr().out.splitlines())
    assert header == ["seconds", "new", "old", "new / old"]
    rows = {line[0]: line[1:] for line in lines}
    assert rows["places"][0] == rows["places"][1]
    assert 0 <= float(rows["padding"][0]) < 0.6
    assert all(float(rows[phase][0]) > 0 for phase in update.PHASES)


def test_a_table_of_training_has_seconds_and_peaks_of_both_ways(capsys):
    assert train.main(["--hidden", "128", "--layers", "1", "--repeats", "1", "--limit", "64", "--rank", "4"]) == 0
    header, _, seconds, peak = map(cells, capsys.readouterr().out.splitlines())
    assert header == ["", "full", "LoRA", "LoRA / full"]
    assert float(seconds[1]) > 0
    assert 0 < float(peak[2]) < float(peak[1])  # 4 M embeddings with gradient and moments, or alone


@pytest.mark.parametrize("command", [rollout, update])
def test_a_folder_without_the_project_is_refused_in_a_line(command, tmp_path, capsys):
    assert command.main(["--old", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --old: {tmp_path} holds no checkout of this project\n"
