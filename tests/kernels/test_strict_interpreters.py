"""The strict interpreters really raise, in the smallest kernel that makes each mistake: JAX's own hide some of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strict_tpu
from engines import needs_interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

BLOCK = (8, 128)
X = jnp.arange(32 * 128, dtype=jnp.float32).reshape(32, 128)
BY_ROWS = pl.BlockSpec(BLOCK, lambda i: (i, 0))
BY_ELEMENTS = pl.BlockSpec(BLOCK, lambda i: (8 * i, 0))
SCRATCH = [pltpu.VMEM(BLOCK, X.dtype)]


def on_tpu(kernel: Callable[..., None], **options: Any) -> np.ndarray:
    """`kernel(x_ref, o_ref, *scratch)` over the four blocks of X."""
    options = {"grid": (4,), "in_specs": [BY_ROWS], "out_specs": BY_ROWS, "out_shape": X, **options}
    with strict_tpu.strict_interpreter():
        return np.asarray(jax.jit(lambda x: pl.pallas_call(kernel, **options)(x))(X))


@pytest.mark.parametrize("options", [{"in_specs": [BY_ELEMENTS]}, {"out_specs": BY_ELEMENTS}], ids=["in", "out"])
def test_an_index_map_of_elements_instead_of_blocks_is_out_of_bounds(options: dict[str, Any]) -> None:
    def double(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    with pytest.raises(AssertionError, match=r"Out-of-bounds block index \(8, 0\)"):
        on_tpu(double, **options)


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


OPERANDS = np.random.default_rng(0).normal(size=(2, 2, 64, 64)).astype(jnp.bfloat16)


@needs_interpreter
@pytest.mark.parametrize("left", [0, 1, None], ids=["all", "all but the last", "none"])
def test_on_a_gpu_a_slot_that_is_filled_before_its_product_was_waited_for_gives_another_sum(left: int | None) -> None:
    """x[0] y[0] + x[1] y[1] through one slot of shared memory."""
    from strict_gpu import strict_interpreter

    def kernel(x: Any, y: Any, out: Any, slot: Any, staged: Any, full: Any) -> None:
        def summed(acc: Any) -> Any:
            for i in range(2):
                for j, operand in enumerate((x, y)):
                    plgpu.copy_gmem_to_smem(operand.at[i], slot.at[j], full)
                plgpu.barrier_wait(full)
                plgpu.wgmma(acc, slot.at[0], slot.at[1])
                if left is not None:
                    plgpu.wgmma_wait(left)
            return acc[...]

        staged[...] = pl.run_scoped(summed, plgpu.ACC((64, 64), jnp.float32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out)
        plgpu.wait_smem_to_gmem(0)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    memory = plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiled), plgpu.SMEM((64, 64), jnp.float32)
    sums = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    barrier = plgpu.Barrier(num_arrivals=2)
    run = plgpu.kernel(kernel, out_type=sums, scratch_types=(*memory, barrier), grid=(1,), grid_names=("i",))
    with strict_interpreter():
        got = np.asarray(jax.jit(run)(*OPERANDS))
    x, y = OPERANDS.astype(np.float64)
    assert np.allclose(got, x[0] @ y[0] + x[1] @ y[1], rtol=1e-5, atol=1e-4) == (left == 0)
