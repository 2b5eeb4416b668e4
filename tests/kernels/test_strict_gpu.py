"""The strict interpreter of GPU kernels catches what it is there for, in the smallest kernel that makes the mistake."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from strict_gpu import needs_interpreter, strict_interpreter

pytestmark = needs_interpreter

X, Y = (jax.random.normal(key, (2, 64, 64), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
SUM = np.einsum("bij,bjk->ik", *(np.asarray(x, np.float64) for x in (X, Y)))


def product(wait: Callable[[], Any], add: bool = False, store: bool = True) -> np.ndarray:
    """X[0] Y[0] + X[1] Y[1] through a slot of shared memory, which is filled again after `wait`."""

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
            for _ in range(1 + add):
                plgpu.copy_smem_to_gmem(staged, out, reduction_op="add" if add else None)
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
    with strict_interpreter():
        return np.asarray(jax.jit(run)(X, Y))


def test_a_faultless_kernel_gives_its_result() -> None:
    np.testing.assert_allclose(product(lambda: plgpu.wgmma_wait(0)), SUM, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("wait", [lambda: None, lambda: plgpu.wgmma_wait(1)], ids=["none", "for all but the last"])
def test_a_slot_that_is_filled_while_a_product_reads_it_is_a_race(wait: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError, match="RACE DETECTED"):
        product(wait)


def test_memory_that_no_kernel_wrote_is_nan() -> None:
    assert np.isnan(product(lambda: plgpu.wgmma_wait(0), store=False)).all()


def test_a_sum_is_added_to_what_is_there() -> None:
    assert np.isnan(product(lambda: plgpu.wgmma_wait(0), add=True)).all()
