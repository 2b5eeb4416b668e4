"""Runs Pallas Mosaic GPU kernels on the CPU under JAX's interpreter and makes a failure of all that it finds wrong.

What fails is a read outside of an array (but by TMA, which fills with zeros), two accesses of the same memory that
nothing orders (a race: reads of slots before their slabs, slots filled before they are free), a product that nobody
waited for, and a barrier that is never completed. What was never written is NaN; integers have their largest value.

JAX's interpreter has transposed operands, clusters and TMA's bounds since jax 0.12; what it lacks is lent to it by
strict_gpu_callbacks.py.

Left out: layouts of registers and shared memory, fences, and what the hardware reorders; multicast, of which each block
makes its own copy; clusters that run at the same time, here they run one after the other. Those only a GPU can test.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.lm_head import target

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax before 0.12 has no interpreter for these kernels"
)


@contextlib.contextmanager
def strict_interpreter(multiprocessors: int = 4) -> Iterator[None]:
    """Kernels that are traced and run in this context are interpreted; AssertionError tells what they did wrong."""
    import strict_gpu_callbacks as lent

    params = plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    unoptimised = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    try:
        with (
            lent.lent(),
            mock.patch.object(target, "multiprocessors", return_value=multiprocessors),
            plgpu.force_gpu_interpret_mode(params),
        ):
            yield
            jax.effects_barrier()
        lent.check_all()
    except jax.errors.JaxRuntimeError as error:
        raise AssertionError(str(error)) from error
    finally:
        lent.forget_all()
        jax.config.update("jax_disable_most_optimizations", unoptimised)
