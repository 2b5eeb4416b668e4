"""Compiled programs are kept in a folder a process; whatever happens to it, a run computes the same bits."""

import os
import subprocess

import pytest
from runs import arguments, assert_same_end, free_address, killed_after, outputs, records, spawn
from tiny import config

from mllm.run import compiling
from mllm.run.compiling import ProgramCache
from mllm.stopwatch import CompileClock

EVEN = "user_rewards:even_characters"
OWN = {"JAX_COMPILATION_CACHE_DIR": ""}  # none of JAX's


def test_a_damaged_program_counts_as_missing_and_is_replaced(tmp_path):
    cache = ProgramCache(tmp_path)
    assert cache.get("key") is None
    cache.put("key", b"program")
    assert cache.get("key") == b"program"
    for damage in (lambda content: content[:-3], lambda content: content[:-1] + b"M", lambda content: b""):
        (tmp_path / "key").write_bytes(damage((tmp_path / "key").read_bytes()))
        assert cache.get("key") is None
        cache.put("key", b"program")
        assert cache.get("key") == b"program"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_the_programs_that_were_read_longest_ago_make_room(tmp_path, monkeypatch):
    cache = ProgramCache(tmp_path)
    monkeypatch.setattr(compiling, "LARGEST", 400)
    (tmp_path / "1.part").write_bytes(b"what a killed process has left")
    os.utime(tmp_path / "1.part", (0, 0))
    for number, key in enumerate("abc", 1):
        cache.put(key, bytes(100))
        os.utime(tmp_path / key, (number, number))
    assert cache.get("a") == bytes(100)
    cache.put("d", bytes(100))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_a_folder_that_can_not_be_used_holds_no_program(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    cache = ProgramCache(tmp_path / "file")
    cache.put("key", b"program")
    assert cache.get("key") is None


PROCESS = """
import jax
from mllm.parallel.processes import ProcessGroup
from mllm.run.compiling import keep_programs
from mllm.run.heartbeat import watched
{}
with watched():
    keep_programs()
    jax.jit(lambda x: x * 2)(1.0)
    print(jax.config.jax_compilation_cache_dir)
"""


def test_each_process_writes_a_folder_of_its_own_unless_the_user_names_one(tmp_path):
    address = free_address()
    group = [f"ProcessGroup.find({address!r}, 2, {index}).join(60)" for index in (0, 1)]
    own, cache = {**OWN, "XDG_CACHE_HOME": str(tmp_path)}, tmp_path / "mllm" / "xla"
    starts = [(line, own) for line in group] + [("", {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "mine")})]
    said = outputs([spawn(["-c", PROCESS.format(line)], subprocess.STDOUT, **given) for line, given in starts])
    folders = [cache / "0_of_2", cache / "1_of_2", tmp_path / "mine"]
    assert [text.split("\n")[-2] for text in said] == [str(folder) for folder in folders]
    for folder in folders[:2]:
        assert [path for path in folder.iterdir() if "lambda" in path.name]
        assert folder.stat().st_mode & 0o777 == 0o700


def test_seconds_of_compiling_count_once_and_a_long_one_is_said(monkeypatch, capsys):
    clock, now, started = CompileClock(), [0.0], []

    class Timer:
        def __init__(self, seconds, function, arguments, options):
            self.begun = seconds, *arguments

        def start(self):
            started.append(self.begun)

        def cancel(self):
            started.append("cancelled")

    monkeypatch.setattr("mllm.stopwatch.threading.Timer", Timer)
    monkeypatch.setattr("mllm.stopwatch.time.perf_counter", lambda: now[0])
    trace, _, backend = clock.EVENTS
    for second, (event, begins) in enumerate(
        [(trace, True), (trace, True), (trace, False), (trace, False), (backend, True), (backend, False), ("/x", True)]
    ):
        now[0] = float(second)
        (clock.begin if begins else clock.end)(event, 1.0, fun_name="jit(decode)")
    assert (clock.take(), clock.take()) == (3.0 + 1.0, 0.0)
    assert started == [(1, "compiling decode ..."), "cancelled"]


@pytest.mark.slow
def test_a_run_that_resumes_ends_the_same_with_its_programs_kept_damaged_or_compiled_again(tmp_path):
    """Its last start finds a file in the place of the folder."""
    settings = config(
        run_dir=str(tmp_path / "whole"), steps=4, checkpoint={"every": 2, "keep": 3}, task={"rewards": [{"name": EVEN}]}
    )
    cache = {**OWN, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(settings, **variables):
        (said,) = outputs([spawn(["train.py", *arguments(settings)], subprocess.STDOUT, **variables)])
        return said

    assert "WARNING" not in start(settings, **cache)
    assert records(settings, "timings.jsonl")[0]["time/compile"] > 1
    folder = tmp_path / "cache" / "mllm" / "xla" / "0_of_1"
    programs = {path.name: path.read_bytes()[:32] for path in folder.iterdir()}
    assert any("train_step" in name for name in programs)
    for path in list(folder.iterdir())[::2]:
        path.write_bytes(path.read_bytes()[:100])
    again = killed_after(settings, 2, tmp_path / "again")
    start(again, **cache)
    assert_same_end(settings, again)
    assert {path.name for path in folder.iterdir()} >= programs.keys()
    (tmp_path / "file").write_bytes(b"")
    without = killed_after(settings, 2, tmp_path / "without")
    assert (
        f"WARNING: {tmp_path}/file/mllm/xla/0_of_1: Not a directory; so programs are compiled at each start"
        in start(without, **OWN, XDG_CACHE_HOME=str(tmp_path / "file"))
    )
    assert_same_end(settings, without)
