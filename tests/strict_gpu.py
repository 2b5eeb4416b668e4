"""Runs Pallas Mosaic GPU kernels on the CPU under JAX's interpreter and makes a failure of all that it finds wrong.

What fails is a read outside of an array (but by TMA, which fills with zeros), two accesses of the same memory that
nothing orders (a race: reads of slots before their slabs, slots filled before they are free), and a barrier that is
never completed. What was never written is NaN; integers have their largest value.

JAX's interpreter (`jax._src.pallas.mosaic_gpu.interpret`) has transposed operands, clusters and TMA's bounds since jax
0.12. It has no adding TMA store: there the sum is written, here, to where the copy starts, ahead of the copy.

Left out: layouts of registers and shared memory, fences, and what the hardware reorders; multicast, of which each block
makes its own copy. Those only a GPU can test.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.lm_head import target

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax before 0.12 has no interpreter for these kernels"
)
_ADDING = threading.Lock()


@contextlib.contextmanager
def strict_interpreter(multiprocessors: int = 4) -> Iterator[None]:
    """Kernels that are traced and run in this context are interpreted; AssertionError tells what they did wrong."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    params = plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    copy = gpu_callbacks.copy_smem_to_gmem

    def adding(*, reduction_op: Any, **arguments: Any) -> Any:
        if reduction_op is None:
            return copy(reduction_op=None, **arguments)
        with _ADDING:
            assert reduction_op == "add"
            _add_ahead(gpu_callbacks, **arguments)
            return copy(reduction_op=None, **arguments)

    try:
        with (
            mock.patch.object(gpu_callbacks, "copy_smem_to_gmem", adding),
            mock.patch.object(target, "multiprocessors", lambda: multiprocessors),
            plgpu.force_gpu_interpret_mode(params),
        ):
            yield
            jax.effects_barrier()
        assert not gpu_callbacks.get_races().races_found
    except jax.errors.JaxRuntimeError as error:
        raise AssertionError(str(error)) from error
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def _add_ahead(callbacks: Any, **arguments: Any) -> None:
    """Adds what is at a copy's destination to its source."""
    memory, thread = callbacks._get_shared_memory(), arguments["thread"]
    found = []
    for end in ("src", "dst"):
        key = callbacks.HostAllocationKey.from_array(arguments[f"{end}_allocation_key_as_array"])
        transforms = callbacks._remove_noop_transforms(arguments[f"{end}_transforms"])
        access = memory.access(key, jax.tree.map(int, transforms))
        content, (_, dtype), _ = memory.get_buffer_content(key, access, thread)
        found.append((key, access, callbacks._pad_to_requested(content, access.shape, dtype, 0)))
    (key, access, new), (_, _, old) = found
    memory.store_buffer_content(key, access, np.asarray(old + new, new.dtype), thread)
