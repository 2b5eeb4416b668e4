"""Runs Pallas Mosaic GPU kernels on the CPU under JAX's interpreter, and raises for every mistake that it can find.

Mistakes are a read outside of an array (but by TMA, which fills with zeros), two accesses of the same memory that
nothing orders (a race: a slot that is read before its slab arrives, or filled before it is free), a product that nobody
waits for, and a barrier that is never completed. Memory that was never written is NaN; integers have their largest
value.

JAX's interpreter knows transposed operands, clusters and TMA's bounds since jax 0.12; strict_gpu_callbacks.py adds what
it lacks.

Left out, as only a GPU can test it: layouts of registers and shared memory, fences, and reordering by the hardware;
multicast (each block makes its own copy); clusters that run at the same time (they run one after the other).
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.lm_head import target

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax before 0.12 has no interpreter for these kernels"
)


@contextlib.contextmanager
def strict_interpreter(multiprocessors: int = 4) -> Iterator[None]:
    """Interprets kernels that are traced and run in this context; a mistake raises AssertionError."""
    import strict_gpu_callbacks  # which needs jax 0.12

    params = plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    unoptimised = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    try:
        with (
            strict_gpu_callbacks.patched(),
            mock.patch.object(target, "multiprocessors", return_value=multiprocessors),
            mock.patch.object(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)),
            plgpu.force_gpu_interpret_mode(params),
        ):
            yield
            jax.effects_barrier()
        strict_gpu_callbacks.check_all()
    except jax.errors.JaxRuntimeError as error:
        raise AssertionError(str(error)) from error
    finally:
        strict_gpu_callbacks.reset()
        jax.config.update("jax_disable_most_optimizations", unoptimised)
