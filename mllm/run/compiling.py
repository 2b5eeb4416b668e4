"""Programs that were compiled once are read from a folder at later starts: mllm/xla in $XDG_CACHE_HOME or ~/.cache.

Each process has one: programs differ, and JAX lets only process 0 write. JAX_COMPILATION_CACHE_DIR turns on JAX's.
"""

import functools
import logging
import os
from types import SimpleNamespace

import jax
from filelock import FileLock
from jax._src import compiler

from mllm.stopwatch import COMPILING
from mllm.store.bucket import cache_folder

LARGEST = 4 * 2**30
"""The most bytes of a process's folder; the programs that were read longest ago make room."""


@functools.cache
def keep_programs() -> None:
    """Read programs from this process's folder and write them there, and count and say what is compiled.

    JAX must know the other processes by now. A folder that can't be used is a warning.
    """
    jax.monitoring.register_scalar_listener(COMPILING.begin)
    jax.monitoring.register_event_duration_secs_listener(COMPILING.end)
    index, count = jax.process_index(), jax.process_count()
    # Processes tune a program for GPUs together: one that had it already would be waited for.
    if jax.config.values["jax_compilation_cache_dir"] or (count > 1 and jax.default_backend() == "gpu"):
        return
    folder = cache_folder() / "xla" / f"{index}_of_{count}"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o022:
            raise PermissionError("others can write it")  # and their programs must not run
        with FileLock(folder / ".lockfile", timeout=10):  # as JAX does
            for program in folder.glob("*-cache"):  # without its -atime, which is written next, a kill has cut it off
                if not program.with_name(program.name.removesuffix("cache") + "atime").exists():
                    program.unlink()
    except OSError as error:
        text = "%s: %s; so programs are compiled at each start (JAX_COMPILATION_CACHE_DIR)"
        logging.getLogger(__name__).warning(text, folder, getattr(error, "strerror", None) or error)
        return
    if index:  # else JAX would not write
        vars(compiler)["distributed"] = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # files that nothing checks or bounds
    jax.config.update("jax_compilation_cache_dir", str(folder))
