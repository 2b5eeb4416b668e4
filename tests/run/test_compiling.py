"""Compiled programs are kept in a folder; whatever happens to it, a run computes the same bits."""

import subprocess

import pytest
from runs import outputs, spawn

from mllm.stopwatch import CompileClock

OWN = {"JAX_COMPILATION_CACHE_DIR": ""}  # none of JAX's
PROCESS = """
import jax
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


@pytest.mark.nightly
def test_what_a_kill_in_the_middle_of_writing_has_left_is_removed_and_the_oldest_programs_make_room(tmp_path):
    folder = tmp_path / "mllm" / "xla"

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
    for line, own in (("jax.process_count = lambda: 2", ""), ("", str(tmp_path / "mine"))):
        other = {"JAX_COMPILATION_CACHE_DIR": own, "XDG_CACHE_HOME": str(tmp_path / "other")}
        (said,) = outputs([spawn(["-c", PROCESS.format(line, 2)], subprocess.STDOUT, **other)])
        assert said == f"{own}\n"  # several processes keep none, and a folder that the user names is JAX's
        assert not (tmp_path / "other").exists()
    few = start(f"from mllm.run import compiling; compiling.LARGEST = {max(sizes) + 99}", factor=3)
    assert 0 < len(few) < len(sizes) + 1
    assert sum(few) <= max(sizes) + 99


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
