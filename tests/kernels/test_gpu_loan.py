"""dW's memory as a place for logits, on Hopper: all that is put there is there when its turn comes to be read.

Without a kernel: what one would write is written piece by piece. Kernels that do are in test_mosaic_gpu_loss.py.
"""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.gpu import kept_logits as gpu_loan
from kernels.lm_head.gpu import plan as gpu_plan
from kernels.lm_head.gpu.kept_logits import Loan
from kernels.lm_head.gpu.products import PIECE
from kernels.lm_head.gpu.tiles import KEPT, Sizes, Tiles

BF16, F32 = jnp.bfloat16, jnp.float32
TILES = Tiles(columns=128, cluster=1)


@pytest.fixture(autouse=True)
def an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.lm_head.target.multiprocessors", lambda: 132)


def problem(n: int, v: int, d: int, dw: Any, **options: Any) -> tuple[Inputs, Options]:
    shapes = ((n, d), BF16), ((v, d), BF16), ((n,), jnp.int32), ((n,), bool), ((), F32)
    inputs = Inputs(*(jnp.zeros(*x) for x in shapes))
    return inputs, Options(None, jnp.dtype(BF16), weight_gradient_dtype=jnp.dtype(dw), **options)


def largest(n: int, v: int, d: int, dw: Any = BF16, chunk: int = 256, tiles: Tiles = TILES) -> Loan:
    rows = -(-n // tiles.cluster_rows) * tiles.cluster_rows
    return gpu_loan.largest(*problem(n, v, d, dw), Sizes(tiles, chunk), rows)


@pytest.mark.parametrize("dw", [BF16, F32])
@pytest.mark.parametrize(
    ("n", "v", "d", "chunk"),
    [
        pytest.param(128, 2000, 128, 256, id="fewer rows than a group has columns"),
        pytest.param(256, 2000, 128, 256, id="more rows"),
        pytest.param(256, 2000, 512, 256, id="several chunks to a group"),
        pytest.param(128, 2440, 192, 768, id="tiles across groups"),
        pytest.param(384, 1032, 64, 128, id="maxima of many rows"),
    ],
)
def test_logits_and_maxima_are_there_until_their_chunk_is_written(n: int, v: int, d: int, chunk: int, dw: Any) -> None:
    inputs, options = problem(n, v, d, dw)
    loan = largest(n, v, d, dw, chunk)
    assert loan.columns > 0
    random = np.random.default_rng(0)
    logits = random.standard_normal((n, loan.columns)).astype(KEPT)
    tops = random.standard_normal((loan.columns // TILES.columns, n)).astype(np.float32)

    @jax.jit
    def memory() -> jax.Array:
        lent = gpu_loan.lend(inputs, options, loan)
        assert lent is not None
        for row, column in product(range(0, n, 64), range(0, loan.columns, PIECE)):
            lent.place(jnp.int32(column), jnp.int32(row))[...] = logits[row : row + 64, column : column + PIECE]
        return gpu_loan.given_back(lent, jnp.asarray(tops))

    @jax.jit
    def read_and_write(dw: jax.Array, first: jax.Array) -> Any:
        ref, half = jax.new_ref(dw), n // 2
        halves = [gpu_loan.logits_of(ref, loan, first, jnp.int32(row), half) for row in (0, half)]
        found = jnp.concatenate(halves), gpu_loan.tops_of(ref, loan, first, TILES.columns)
        bits = jax.lax.bitcast_convert_type(dw, f"uint{8 * dw.dtype.itemsize}")  # XLA's bfloat16 on a CPU mends NaNs
        written = jax.lax.dynamic_update_slice_in_dim(bits, jnp.full((loan.chunk, d), 1, bits.dtype), first, 0)
        return found, jax.lax.bitcast_convert_type(written, dw.dtype)

    written = gpu_loan.as_gradient(memory(), jnp.dtype(dw))
    assert (written.shape, written.dtype) == ((v, d), dw)
    for first in range(0, loan.columns, loan.chunk):
        (found, tops_found), written = read_and_write(written, jnp.int32(first))
        np.testing.assert_array_equal(found, logits[:, first : first + loan.chunk])
        across = slice(first // TILES.columns, (first + loan.chunk) // TILES.columns)
        np.testing.assert_array_equal(tops_found, tops[across])


@pytest.mark.parametrize(
    ("n", "d", "dw", "workspace", "products"),
    [
        (8192, 2048, BF16, 0, 3.76),
        (8192, 2048, BF16, 640, 3.52),
        (8192, 2048, BF16, 1850, 3),
        (8192, 2048, F32, 0, 3.51),
        (8192, 2048, F32, 640, 3.28),
        (8192, 2048, F32, 1850, 3),
        (4096, 2048, BF16, 0, 3.51),
        (4096, 2048, F32, 0, 3.03),
        (2048, 2048, BF16, 0, 3.03),
        (2048, 2048, F32, 0, 3.03),
        (8192, 3584, BF16, 0, 3.58),
        (8192, 896, BF16, 0, 3.89),
    ],
)
def test_products_are_as_few_as_the_readme_says(n: int, d: int, dw: Any, workspace: int, products: float) -> None:
    """And no fewer than the memory allows: V D / N columns of a bfloat16 dW, and the workspace's."""
    shapes = ((n, d), BF16), ((151936, d), dw), ((n,), jnp.int32), ((n,), bool), ((), F32)
    inputs, mib = Inputs(*(jax.ShapeDtypeStruct(*x) for x in shapes)), workspace * 2**20
    found = gpu_plan.plan(inputs, Options(None, jnp.dtype(BF16), mib)).products(151936)
    assert found == pytest.approx(products, abs=0.006)
    assert found >= 4 - (mib + 151936 * d * jnp.dtype(dw).itemsize) / (2 * n * 151936)


def test_nothing_is_lent_of_a_gradient_that_nobody_wants_or_whose_padding_is_not_written() -> None:
    sizes = Sizes(TILES, 256)
    inputs, options = problem(128, 2000, 128, BF16, wants_weight=False)
    assert gpu_loan.largest(inputs, options, sizes, 128) == Loan()
    inputs, options = problem(128, 2000, 128, BF16)
    assert gpu_loan.largest(inputs._replace(columns=jnp.int32(1990)), options, sizes, 128) == Loan()


def test_nothing_is_lent_where_the_rows_of_one_group_are_more_than_dw_has() -> None:
    assert largest(2048, 2000, 128) == Loan()
