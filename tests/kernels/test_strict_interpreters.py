"""The strict interpreter of TPU kernels finds what JAX's own hides, in the smallest kernel with each mistake."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strict_tpu
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

pytestmark = pytest.mark.nightly
BLOCK = (8, 128)
X = jnp.arange(32 * 128, dtype=jnp.float32).reshape(32, 128)
BY_ROWS = pl.BlockSpec(BLOCK, lambda i: (i, 0))
SCRATCH = [pltpu.VMEM(BLOCK, X.dtype)]


def on_tpu(kernel: Callable[..., None], **options: Any) -> np.ndarray:
    """`kernel(x_ref, o_ref, *scratch)` over the four blocks of X."""
    options = {"grid": (4,), "in_specs": [BY_ROWS], "out_specs": BY_ROWS, "out_shape": X, **options}
    with strict_tpu.strict_interpreter():
        return np.asarray(jax.jit(lambda x: pl.pallas_call(kernel, **options)(x))(X))


def test_what_was_never_written_is_nan() -> None:
    """Scratch, a block that a step leaves out, and an output's window after its block."""

    def all_but_the_third(x_ref: Any, o_ref: Any, scratch: Any) -> None:
        @pl.when(pl.program_id(0) != 2)
        def _() -> None:
            o_ref[...] = x_ref[...] + (pl.program_id(0) == 1) * scratch[...]

    got = on_tpu(all_but_the_third, scratch_shapes=SCRATCH)
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), np.arange(32) // 8 > -1)

    def running_sum(x_ref: Any, o_ref: Any) -> None:
        pl.when(pl.program_id(0) == 0)(lambda: o_ref.__setitem__(..., jnp.zeros_like(o_ref)))
        o_ref[...] += x_ref[...]

    np.testing.assert_array_equal(np.isnan(on_tpu(running_sum)).any(axis=1), np.arange(32) // 8 > 0)


@pytest.mark.parametrize(
    ("reads", "waits", "complaint"),
    [
        pytest.param(True, True, "RACE DETECTED", id="a read before the wait"),
        pytest.param(False, False, "non-zero count", id="nobody waits, though nobody reads"),
    ],
)
def test_a_copy_has_to_be_waited_for(reads: bool, waits: bool, complaint: str) -> None:
    def kernel(x_hbm: Any, o_ref: Any, buffer: Any, semaphores: Any) -> None:
        copy = pltpu.make_async_copy(x_hbm.at[pl.ds(0, 8)], buffer, semaphores.at[0])
        copy.start()
        o_ref[...] = buffer[...] if reads else jnp.zeros_like(o_ref)
        if waits:
            copy.wait()

    options = {"grid": (1,), "in_specs": [pl.BlockSpec(memory_space=pl.ANY)]}
    with pytest.raises(AssertionError, match=complaint):
        on_tpu(kernel, scratch_shapes=[*SCRATCH, pltpu.SemaphoreType.DMA((1,))], **options)
