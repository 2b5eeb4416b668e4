"""The strict interpreters really raise, in the smallest kernel that makes each mistake: JAX's own hide some of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strict_gpu
import strict_tpu
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

BLOCK = (8, 128)
X = jnp.arange(32 * 128, dtype=jnp.float32).reshape(32, 128)
BY_ROWS = pl.BlockSpec(BLOCK, lambda i: (i, 0))
COPIES: dict[str, Any] = {
    "grid": (1,),
    "in_specs": [pl.BlockSpec(memory_space=pl.ANY)],
    "out_specs": pl.BlockSpec(BLOCK, lambda i: (0, 0)),
    "out_shape": jax.ShapeDtypeStruct(BLOCK, X.dtype),
    "scratch_shapes": [pltpu.VMEM(BLOCK, X.dtype), pltpu.SemaphoreType.DMA((1,))],
}


def on_tpu(kernel: Callable[..., None], **options: Any) -> np.ndarray:
    """`kernel(x_ref, o_ref, *scratch)` over the four blocks of X."""
    options = {
        "grid": (4,),
        "in_specs": [BY_ROWS],
        "out_specs": BY_ROWS,
        "out_shape": jax.ShapeDtypeStruct(X.shape, X.dtype),
        **options,
    }
    with strict_tpu.strict_interpreter():
        return np.asarray(jax.jit(lambda x: pl.pallas_call(kernel, **options)(x))(X))


def double(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = 2 * x_ref[...]


def running_sum(x_ref: Any, o_ref: Any, sum_ref: Any) -> None:
    pl.when(pl.program_id(0) == 0)(lambda: sum_ref.__setitem__(..., jnp.zeros_like(sum_ref)))
    sum_ref[...] += x_ref[...]
    o_ref[...] = sum_ref[...]


def first_rows(x_hbm: Any, buffer: Any, semaphores: Any) -> Any:
    return pltpu.make_async_copy(x_hbm.at[pl.ds(0, 8)], buffer, semaphores.at[0])


def test_a_correct_tpu_kernel_passes() -> None:
    got = on_tpu(running_sum, scratch_shapes=[pltpu.VMEM(BLOCK, X.dtype)])
    np.testing.assert_array_equal(got.reshape(4, 8, 128), np.cumsum(X.reshape(4, 8, 128), axis=0))


@pytest.mark.parametrize("side", ["in_specs", "out_specs"])
def test_an_index_map_of_elements_instead_of_blocks_is_out_of_bounds(side: str) -> None:
    spec = pl.BlockSpec(BLOCK, lambda i: (8 * i, 0))
    with pytest.raises(AssertionError, match=r"Out-of-bounds block index \(8, 0\)"):
        on_tpu(double, **{side: [spec] if side == "in_specs" else spec})


def test_what_was_never_written_is_nan() -> None:
    """Scratch, a block that a step leaves out, and an output's window after its block."""

    def all_but_the_third(x_ref: Any, o_ref: Any, sum_ref: Any) -> None:
        @pl.when(pl.program_id(0) != 2)
        def _() -> None:
            o_ref[...] = x_ref[...] + (pl.program_id(0) == 1) * sum_ref[...]

    got = on_tpu(all_but_the_third, scratch_shapes=[pltpu.VMEM(BLOCK, X.dtype)])
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), np.arange(32) // 8 > -1)
    window = on_tpu(lambda x_ref, o_ref: running_sum(x_ref, o_ref, o_ref))
    np.testing.assert_array_equal(np.isnan(window).any(axis=1), np.arange(32) // 8 > 0)


def test_a_read_before_the_wait_races_with_the_copy() -> None:
    def hasty(x_hbm: Any, o_ref: Any, buffer: Any, semaphores: Any) -> None:
        copy = first_rows(x_hbm, buffer, semaphores)
        copy.start()
        o_ref[...] = buffer[...]
        copy.wait()

    with pytest.raises(AssertionError, match="RACE DETECTED"):
        on_tpu(hasty, **COPIES)


def test_a_copy_that_nobody_waits_for_is_found_even_if_nobody_reads_it() -> None:
    def careless(x_hbm: Any, o_ref: Any, buffer: Any, semaphores: Any) -> None:
        first_rows(x_hbm, buffer, semaphores).start()
        o_ref[...] = jnp.zeros_like(o_ref)

    with pytest.raises(AssertionError, match="non-zero count"):
        on_tpu(careless, **COPIES)


PRODUCT_OPERANDS = np.random.default_rng(0).normal(size=(2, 2, 64, 64)).astype(jnp.bfloat16)


def on_gpu(wait: Callable[[], Any], store: bool = True) -> np.ndarray:
    """x[0] y[0] + x[1] y[1] through a slot of shared memory, which is filled again after `wait`."""

    def kernel(x: Any, y: Any, out: Any, slot: Any, staged: Any, full: Any) -> None:
        def fill(i: int) -> None:
            for j, operand in enumerate((x, y)):
                plgpu.copy_gmem_to_smem(operand.at[i], slot.at[j], full)
            plgpu.barrier_wait(full)

        def summed(acc: Any) -> Any:
            fill(0)
            plgpu.wgmma(acc, slot.at[0], slot.at[1])
            wait()
            fill(1)
            plgpu.wgmma(acc, slot.at[0], slot.at[1])
            return acc[...]

        staged[...] = pl.run_scoped(summed, plgpu.ACC((64, 64), jnp.float32))
        plgpu.commit_smem()
        if store:
            plgpu.copy_smem_to_gmem(staged, out)
            plgpu.wait_smem_to_gmem(0)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=(
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(1,),
        grid_names=("i",),
    )
    with strict_gpu.strict_interpreter():
        return np.asarray(jax.jit(run)(*PRODUCT_OPERANDS))


@strict_gpu.needs_interpreter
def test_a_correct_gpu_kernel_passes_and_memory_that_none_wrote_is_nan() -> None:
    x, y = PRODUCT_OPERANDS.astype(np.float64)
    np.testing.assert_allclose(on_gpu(lambda: plgpu.wgmma_wait(0)), x[0] @ y[0] + x[1] @ y[1], rtol=1e-5, atol=1e-4)
    assert np.isnan(on_gpu(lambda: plgpu.wgmma_wait(0), store=False)).all()


@strict_gpu.needs_interpreter
@pytest.mark.parametrize("wait", [lambda: None, lambda: plgpu.wgmma_wait(1)], ids=["none", "for all but the last"])
def test_a_slot_that_is_filled_while_a_product_reads_it_is_a_race(wait: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError, match="RACE DETECTED"):
        on_gpu(wait)
