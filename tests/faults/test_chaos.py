"""Whatever happens to a run, it ends as if nothing had: the harness in short, and what it judges by."""

import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import chaos
import chaos_lane
import jax
import numpy as np
import pytest
from chaos_damage import DAMAGES, Unavailable, checkpoints, small_disk
from chaos_lane import difference
from chaos_process import Server
from runs import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the harness needs Linux's /proc")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """A short campaign that keeps its runs: what it printed, and their folder."""
    folder = tmp_path_factory.mktemp("campaign")
    done = subprocess.run(
        [sys.executable, "tests/faults/chaos.py", "--short", "--keep"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (kept,) = folder.glob("chaos_*")
    return done.stdout, kept


@pytest.fixture(scope="module")
def server():
    with closing(Server({})) as server:
        yield server


@pytest.mark.slow
def test_a_short_campaign_loses_nothing(campaign):
    said, _ = campaign
    assert said.endswith("\nnothing lost\n")
    rows = {tuple(words[:2]): words[2:] for words in (re.split(r"\s{2,}", line) for line in said.splitlines())}
    killed = [words for (fault, *_), words in rows.items() if fault == "kill -9"]
    assert sum(int(sft) + int(grpo) for sft, grpo, *_ in killed) == chaos.SHORT
    assert {"newest checkpoint", "second process"} <= {fault for fault, *_ in rows}


@pytest.mark.slow
@pytest.mark.parametrize("log", ["metrics.jsonl", "samples.jsonl"])
def test_a_log_that_differs_in_a_byte_is_a_loss(campaign, tmp_path, log):
    run = copied(campaign, tmp_path)
    content = bytearray((run / log).read_bytes())
    content[len(content) // 2] ^= 1
    (run / log).write_bytes(content)
    assert difference("grpo", run, campaign[1]) == f"{log} differs"


@pytest.mark.slow
def test_a_run_that_ends_at_another_step_is_a_loss(campaign, tmp_path):
    run = copied(campaign, tmp_path)
    last = checkpoints(run)[-1]
    shutil.rmtree(run / "checkpoints" / str(last))
    assert f"not at {last}" in difference("grpo", run, campaign[1])


@pytest.mark.slow
def test_one_bit_of_a_parameter_is_a_loss(campaign, tmp_path, monkeypatch):
    run, sound = copied(campaign, tmp_path), chaos_lane.newest

    def newest(config):
        restored = sound(config)
        if config.run_dir != str(run):
            return restored
        leaves, tree = jax.tree.flatten(restored.state)
        first = np.asarray(leaves[0])
        content = bytearray(first.tobytes())
        content[len(content) // 2] ^= 1
        spoilt = np.frombuffer(bytes(content), first.dtype).reshape(first.shape)
        return restored._replace(state=jax.tree.unflatten(tree, [spoilt, *leaves[1:]]))

    assert difference("grpo", run, campaign[1]) is None
    monkeypatch.setattr(chaos_lane, "newest", newest)
    assert difference("grpo", run, campaign[1]).endswith("differs")


def copied(campaign, tmp_path):
    """A copy of the run that nothing disturbed, to be spoilt."""
    shutil.copytree(campaign[1] / "grpo_0", tmp_path / "run")
    return tmp_path / "run"


def test_a_plan_holds_so_many_kills_and_every_other_fault():
    planned = Counter(name for _, name, _ in chaos.plan(60, random.Random(0)))
    assert planned["kill -9"] >= 60
    assert {"a signal", "two signals", "damage", "a torn log", "a second process", "a full disk"} <= planned.keys()


def test_the_seed_decides_the_plan():
    first, again, other = (
        [(lane, name) for lane, name, _ in chaos.plan(60, random.Random(seed))] for seed in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damage_changes_a_checkpoint(tmp_path, kind):
    files = {"a": b"1" * 100, "b/c": b"2" * 1000, "b/d": b"3" * 10}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    said = DAMAGES[kind](tmp_path, random.Random(0))
    assert said
    left = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert left != files


def test_a_small_disk_fills_up(tmp_path):
    try:
        with small_disk(tmp_path, 2) as disk:
            disk.fill(0)
            with pytest.raises(OSError, match="No space left"):
                (disk.outside / "more").write_bytes(bytes(65536))
            disk.empty()
            (disk.outside / "more").write_bytes(bytes(65536))
    except Unavailable as error:
        pytest.skip(f"no small file system can be had here ({error})")
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_leaves_behind_is_found_and_killed(server, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.chaos_process.ORPHANS", 0.2)
    process = server.start(["--help"], tmp_path / "said.txt")
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "CHAOS": process.token})
    process.kill(everything=False)
    seconds, commands = process.orphans()
    assert seconds >= 0.2
    assert commands == ["sleep 60 "]
    assert child.wait() == -9


def test_a_process_tells_its_phases_and_its_exit_code(server, tmp_path):
    process = server.start(["--config", "nowhere.yaml"], tmp_path / "said.txt")
    assert process.follow() is None
    assert process.end() == 2
    assert [mark.name for mark in process.marks] == ["start", "end"]
    assert "nowhere.yaml" in (tmp_path / "said.txt").read_text()


def test_a_killed_process_has_the_exit_code_that_a_shell_gives_it(server, tmp_path):
    process = server.start(["--help"], tmp_path / "said.txt")
    process.kill(everything=True)
    assert process.end() in (137, 0)  # it may have ended before
