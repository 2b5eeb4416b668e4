"""Compiled programs are kept in a folder; whatever happens to it, a run computes the same bits."""

import subprocess
from types import SimpleNamespace

import pytest
from runs import outputs, spawn

from mllm.stopwatch import CompileClock

PROCESS = """
import jax
from mllm.run.compiling import keep_programs
{}
keep_programs()
jax.jit(lambda x: x * 2)(1.0)
print(jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_enable_xla_caches)
"""
SEVERAL, GPU = "jax.process_count = lambda: 2", "jax.default_backend = lambda: 'gpu'"


@pytest.mark.nightly
def test_programs_are_kept_and_on_gpus_choices_and_torn_files_removed(tmp_path):
    """A kill in the middle of a write leaves a torn file."""
    (folder := tmp_path / "mllm" / "xla").mkdir(parents=True)
    (cut_off := folder / "program-cache").write_bytes(b"half")  # without its -atime, at which JAX would fail

    def start(line="", own=""):
        variables = {"JAX_COMPILATION_CACHE_DIR": own, "XDG_CACHE_HOME": str(tmp_path)}
        (output,) = outputs([spawn(["-c", PROCESS.format(line)], subprocess.STDOUT, **variables)])
        return output.rstrip("\n").rpartition(" ")

    assert start(SEVERAL)[0] == ""
    assert start(own=str(tmp_path / "mine"))[0] == str(tmp_path / "mine")
    assert [*folder.iterdir()] == [cut_off]  # several processes keep none, and a folder that the user names is JAX's
    assert start() == (str(folder), " ", "none")
    assert not cut_off.exists()
    assert [*folder.glob("*-cache")]
    assert start(GPU) == (str(folder), " ", "xla_gpu_per_fusion_autotune_cache_dir")


def test_nested_compile_seconds_count_once(monkeypatch):
    clock, now = CompileClock(), [0.0]
    monkeypatch.setattr("mllm.stopwatch.time.perf_counter", lambda: now[0])
    trace, backend = (f"/jax/core/compile/{name}_duration" for name in ("jaxpr_trace", "backend_compile"))
    events = [(clock.begin, trace), (clock.begin, trace), (clock.end, trace), (clock.end, trace)]
    for second, (note, event) in enumerate([*events, (clock.begin, backend), (clock.end, backend)]):
        now[0] = float(second)
        note(event, 1.0, fun_name="jit(decode)")
    assert clock.seconds == 3.0 + 1.0


def test_a_slow_compile_prints_its_last_duration(tmp_path, capsys, monkeypatch):
    def at_once(seconds, print, words=(), to=None):
        return SimpleNamespace(start=lambda: print(*words, **to), cancel=lambda: None)

    monkeypatch.setattr("mllm.stopwatch.threading.Timer", at_once)
    event = "/jax/core/compile/backend_compile_duration"
    for seconds in (42.4, 0.5, 7.0):
        (clock := CompileClock()).remember(tmp_path / "seconds.json")
        clock.begin(event, 0, fun_name="jit(train_step)")
        clock.end(event, seconds, fun_name="jit(train_step)")
    (tmp_path / "seconds.json").write_text("{")  # a kill cut it off
    clock.remember(tmp_path / "seconds.json")
    lines = "compiling train_step ...\n" + 2 * "compiling train_step ... (42 s last time)\n"
    assert capsys.readouterr().err == lines
