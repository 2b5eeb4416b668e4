"""Compiled programs are kept in a folder a process; whatever happens to it, a run computes the same bits."""

import subprocess

import pytest
from runs import arguments, assert_same_end, free_address, killed_after, outputs, records, spawn
from tiny import config

from mllm.stopwatch import CompileClock

OWN = {"JAX_COMPILATION_CACHE_DIR": ""}  # none of JAX's
PROCESS = """
import jax
from mllm.parallel.group import join
from mllm.run.compiling import keep_programs
{}
keep_programs()
jax.jit(lambda x: x * {})(1.0)
print(jax.config.jax_compilation_cache_dir)
"""
KILLED = """
import os
from types import SimpleNamespace
from jax._src import lru_cache
lru_cache.time = SimpleNamespace(time_ns=lambda: os._exit(9))  # which JAX calls between a program and its -atime
"""


def test_what_a_kill_in_the_middle_of_writing_has_left_is_removed_and_the_oldest_programs_make_room(tmp_path):
    folder = tmp_path / "mllm" / "xla" / "0_of_1"

    def start(line="", factor=2, exit_code=0):
        script = PROCESS.format(line, factor)
        (said,) = outputs([spawn(["-c", script], subprocess.STDOUT, **OWN, XDG_CACHE_HOME=str(tmp_path))], exit_code)
        assert said == f"{folder}\n" * (exit_code == 0)
        return [path.stat().st_size for path in folder.glob("*-cache")]

    assert len(start(KILLED, exit_code=9)) == 1
    for path in folder.glob("*-cache"):
        path.write_bytes(path.read_bytes()[:99])
    sizes = start()
    assert min(sizes) > 99
    few = start(f"from mllm.run import compiling; compiling.LARGEST = {max(sizes) + 99}", factor=3)
    assert 0 < len(few) < len(sizes) + 1
    assert sum(few) <= max(sizes) + 99


def test_each_process_writes_a_folder_of_its_own_unless_the_user_names_one(tmp_path):
    address = free_address()
    group = [f"join(({address!r}, 2, {index}), {{}})" for index in (0, 1)]
    own, cache = {**OWN, "XDG_CACHE_HOME": str(tmp_path)}, tmp_path / "mllm" / "xla"
    starts = [(line, own) for line in group] + [("", {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "mine")})]
    said = outputs([spawn(["-c", PROCESS.format(line, 2)], subprocess.STDOUT, **given) for line, given in starts])
    folders = [cache / "0_of_2", cache / "1_of_2", tmp_path / "mine"]
    assert [text.split("\n")[-2] for text in said] == [str(folder) for folder in folders]
    for folder in folders[:2]:
        assert [path for path in folder.iterdir() if "lambda" in path.name]
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("why", ["Not a directory", "others can write it"])
def test_where_the_folder_can_not_be_had_a_line_says_why_and_programs_are_compiled_all_the_same(tmp_path, why):
    folder = tmp_path / "mllm" / "xla" / "0_of_1"
    if why == "Not a directory":
        (tmp_path / "mllm").write_bytes(b"")
    else:  # and their programs must not run
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    start = spawn(["-c", PROCESS.format("", 2)], subprocess.STDOUT, **OWN, XDG_CACHE_HOME=str(tmp_path))
    *_, line, kept = outputs([start])[0].splitlines()
    assert line.startswith(f"{folder}: {why}; so programs are compiled at each start")
    assert not kept


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
    trace, backend = (f"/jax/core/compile/{name}_duration" for name in ("jaxpr_trace", "backend_compile"))
    for second, (event, begins) in enumerate(
        [(trace, True), (trace, True), (trace, False), (trace, False), (backend, True), (backend, False), ("/x", True)]
    ):
        now[0] = float(second)
        (clock.begin if begins else clock.end)(event, 1.0, fun_name="jit(decode)")
    assert clock.seconds == 3.0 + 1.0
    assert started == [(1, "compiling decode ..."), "cancelled"]


@pytest.mark.slow
def test_a_run_that_resumes_ends_the_same_with_its_programs_kept_or_damaged(tmp_path):
    settings = config(
        "sft", run_dir=str(tmp_path / "whole"), checkpoint={"every": 2, "keep": 3}, eval=None, rollout=None
    )
    cache = {**OWN, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(settings, **variables):
        (said,) = outputs([spawn(["train.py", *arguments(settings)], subprocess.STDOUT, **variables)])
        return said

    assert "WARNING" not in start(settings, **cache)
    assert records(settings, "timings.jsonl")[0]["time/compile"] > 0
    folder = tmp_path / "cache" / "mllm" / "xla" / "0_of_1"
    programs = list(folder.glob("*-cache"))
    assert any("train_step" in path.name for path in programs)
    for path in programs[::2]:
        path.write_bytes(path.read_bytes()[:100])
        path.with_name(path.name.removesuffix("cache") + "atime").unlink()
    again = killed_after(settings, 2, tmp_path / "again")
    start(again, **cache)
    assert_same_end(settings, again)
    assert any("train_step" in path.name for path in folder.glob("*-cache"))
