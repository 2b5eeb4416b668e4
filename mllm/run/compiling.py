"""Programs that were compiled once are read from a folder at later starts, by JAX's own cache.

The folder is mllm/xla in $XDG_CACHE_HOME or ~/.cache. On GPUs it also has XLA's choices among kernels, which XLA times
for each product: a program that has changed a little is compiled with the same choices. Several processes have none,
unless JAX_COMPILATION_CACHE_DIR names one that they share: JAX lets only process 0 write, and where they tune a program
for GPUs together, one that has it already would be waited for.
"""

import functools
from contextlib import suppress

import jax

from mllm.stopwatch import COMPILING
from mllm.storage import cache_folder

LARGEST = 4 * 2**30
"""The most bytes of the folder; the programs that were read longest ago make room."""


@functools.cache
def keep_programs() -> None:
    """Let JAX keep the programs that it compiles, and count and say what is compiled.

    JAX must know the other processes by now. It warns of a folder that it can't use, and compiles all the same.
    """
    jax.monitoring.register_scalar_listener(COMPILING.begin)
    jax.monitoring.register_event_duration_secs_listener(COMPILING.end)
    if jax.config.values["jax_compilation_cache_dir"] or jax.process_count() > 1:
        return
    COMPILING.remember(cache_folder() / "compile_seconds.json")
    folder = cache_folder() / "xla"
    with suppress(OSError):
        for program in folder.glob("*-cache"):  # what a kill has cut off has no -atime yet; JAX would fail at it
            if not program.with_name(program.name.removesuffix("cache") + "atime").exists():
                program.unlink()
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # A file of a few bytes for each product. Elsewhere nothing is timed, and other caches' files nothing bounds.
    choices = "xla_gpu_per_fusion_autotune_cache_dir" if jax.default_backend() == "gpu" else "none"
    jax.config.update("jax_persistent_cache_enable_xla_caches", choices)
    jax.config.update("jax_compilation_cache_dir", str(folder))
