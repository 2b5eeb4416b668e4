"""Sets up JAX's cache of compiled programs.

The cache is mllm/xla in $XDG_CACHE_HOME or ~/.cache. On GPUs it also has XLA's autotuning results for each product, so
a slightly changed program gets the same kernels. Several processes use no cache unless JAX_COMPILATION_CACHE_DIR names
a shared folder. Only process 0 writes to it. If the processes tune a program together, a process that reads the program
from its own cache would keep the other processes waiting.
"""

import functools
from contextlib import suppress

import jax

from mllm.stopwatch import COMPILING
from mllm.storage import cache_folder

LARGEST = 4 * 2**30
"""The largest size of the folder in bytes; the least recently read programs are removed."""


@functools.cache
def keep_programs() -> None:
    """Turn on JAX's cache, and count and print compilations.

    Call this after the processes have joined. JAX warns about a folder that it can't use, and compiles all the same.
    """
    jax.monitoring.register_scalar_listener(COMPILING.begin)
    jax.monitoring.register_event_duration_secs_listener(COMPILING.end)
    if jax.config.values["jax_compilation_cache_dir"] or jax.process_count() > 1:
        return
    COMPILING.remember(cache_folder() / "compile_seconds.json")
    folder = cache_folder() / "xla"
    with suppress(OSError):
        for program in folder.glob("*-cache"):  # after a kill a file may lack its -atime, at which JAX would fail
            if not program.with_name(program.name.removesuffix("cache") + "atime").exists():
                program.unlink()
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # A file of a few bytes per product. Other backends time nothing, and the size of XLA's other caches is not limited.
    choices = "xla_gpu_per_fusion_autotune_cache_dir" if jax.default_backend() == "gpu" else "none"
    jax.config.update("jax_persistent_cache_enable_xla_caches", choices)
    jax.config.update("jax_compilation_cache_dir", str(folder))
