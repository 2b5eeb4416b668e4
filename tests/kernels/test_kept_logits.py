"""What Hopper kernels are told: where in the memory of dW logits are kept, and which tiles have a label.

Whatever is written to dW's memory can be read until its chunk is done. No kernel runs here: pieces are written as a
kernel would. Kernels that do are in test_head_losses.py.
"""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.gpu import kept_logits
from kernels.lm_head.gpu.forward import Labels, is_hit, labels_in_tiles
from kernels.lm_head.gpu.kept_logits import KeptColumns
from kernels.lm_head.gpu.plan import make_plan
from kernels.lm_head.gpu.products import PIECE, Place
from kernels.lm_head.gpu.tiles import KEPT_DTYPE, Sizes, Tiles

BF16, F32 = jnp.bfloat16, jnp.float32
TILES = Tiles(columns=128, cluster=1)

EXACTLY = {"xla_backend_optimization_level": 3}
"""For a CPU: at level 0 halves of numbers that look like denormal bfloat16 become 0."""


@pytest.fixture(autouse=True)
def an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.lm_head.target.multiprocessors", lambda: 132)


def problem(n: int, v: int, d: int, dw: Any, workspace: int = 0, **options: Any) -> tuple[Inputs, Options]:
    shapes = ((n, d), BF16), ((v, d), dw), ((n,), jnp.int32), ((n,), bool), ((), F32)
    inputs = Inputs(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    dtypes = jnp.dtype(BF16), jnp.dtype(dw)
    return inputs, Options(None, jnp.dtype(BF16), workspace, gradient_dtypes=dtypes, **options)


@pytest.mark.parametrize(
    ("n", "v", "d", "chunk", "dw"),
    [
        pytest.param(128, 2000, 128, 256, BF16, id="fewer rows than a group has columns"),
        pytest.param(256, 2000, 128, 256, F32, id="more rows"),
        pytest.param(256, 2000, 512, 256, BF16, id="several chunks to a group"),
        pytest.param(128, 2440, 192, 768, F32, id="tiles across groups"),
        pytest.param(384, 1032, 64, 128, BF16, id="maxima of many rows"),
    ],
)
def test_logits_can_be_read_until_their_chunk_is_written(n: int, v: int, d: int, chunk: int, dw: Any) -> None:
    shapes, options = problem(n, v, d, dw)
    inputs = Inputs(*(jnp.zeros(x.shape, x.dtype) for x in shapes[:5]))
    layout = kept_logits.keep_in_dw(inputs, options, Sizes(TILES, chunk), n)
    assert layout.columns > 0
    random = np.random.default_rng(0)
    logits = random.standard_normal((n, layout.columns)).astype(KEPT_DTYPE)
    tops = random.standard_normal((layout.columns // TILES.columns, n)).astype(np.float32)

    @jax.jit(compiler_options=EXACTLY)
    def memory() -> jax.Array:
        buffer = kept_logits.allocate(inputs, options, layout)
        assert buffer is not None
        for row, column in product(range(0, n, 64), range(0, layout.columns, PIECE)):
            piece = logits[row : row + 64, column : column + PIECE]
            buffer.piece(jnp.int32(row), jnp.int32(column))[...] = piece
        return kept_logits.with_tops(buffer, jnp.asarray(tops))

    @jax.jit(compiler_options=EXACTLY)
    def read_and_write(dw: jax.Array, first: jax.Array) -> Any:
        ref, half = jax.new_ref(dw), n // 2
        halves = [kept_logits.read_logits(ref, layout, first, jnp.int32(row), half) for row in (0, half)]
        found = jnp.concatenate(halves), kept_logits.read_tops(ref, layout, first, TILES.columns)
        bits = jax.lax.bitcast_convert_type(dw, f"uint{8 * dw.dtype.itemsize}")  # XLA on a CPU changes bfloat16 NaNs
        written = jax.lax.dynamic_update_slice_in_dim(bits, jnp.full((layout.chunk, d), 1, bits.dtype), first, 0)
        return found, jax.lax.bitcast_convert_type(written, dw.dtype)

    written = kept_logits.as_dw(memory(), jnp.dtype(dw))
    assert (written.shape, written.dtype) == ((v, d), dw)
    for first in range(0, layout.columns, layout.chunk):
        (found, tops_found), written = read_and_write(written, jnp.int32(first))
        np.testing.assert_array_equal(found, logits[:, first : first + layout.chunk])
        across = slice(first // TILES.columns, (first + layout.chunk) // TILES.columns)
        np.testing.assert_array_equal(tops_found, tops[across])


@pytest.mark.parametrize(
    ("n", "d", "dw", "workspace", "products"),
    [
        (8192, 2048, BF16, 0, 3.76),
        (8192, 2048, BF16, 640, 3.52),
        (8192, 2048, BF16, 1850, 3),
        (8192, 2048, F32, 0, 3.51),
        (8192, 576, BF16, 0, 3.94),
    ],
)
def test_a_loss_takes_as_few_products_as_documented(n: int, d: int, dw: Any, workspace: int, products: float) -> None:
    """4, less the share of columns whose logits are kept; and no more columns than the memory can hold."""
    v, mib = 151936, workspace * 2**20
    plan = make_plan(*problem(n, v, d, dw, mib))
    found = 4 - min(plan.in_dw.columns + plan.workspace_columns, v) / v
    assert found == pytest.approx(products, abs=0.006)
    assert found >= 4 - (mib + v * d * jnp.dtype(dw).itemsize) / (2 * n * v)


def test_no_logits_are_kept_in_a_dw_that_is_not_computed_or_has_padding_or_is_too_small() -> None:
    inputs, options = problem(128, 2000, 128, BF16)
    padded = inputs._replace(columns=jnp.int32(1990)), options
    without, small = problem(128, 2000, 128, BF16, wants_weight=False), problem(2048, 2000, 128, BF16)
    for inputs, options in (without, padded, small):
        assert kept_logits.keep_in_dw(inputs, options, Sizes(TILES, 256), inputs.hidden.shape[0]) == KeptColumns()


def test_a_strip_s_bits_say_which_of_its_tiles_have_a_label() -> None:
    """A strip begins in any of the 32 places of an integer, and has 32 tiles at most."""
    sizes, vocabulary = Tiles(), 100 * 256 - 8
    labels = np.random.default_rng(0).integers(0, vocabulary, 192)
    labels[:64] = -1
    in_tile = labels_in_tiles(jnp.asarray(labels), vocabulary, sizes)
    for group, chunk, first in ((0, 0, 0), (1, 7, 25), (2, 0, 64), (2, 3, 65)):
        place = Place(jnp.int32(64 * group), jnp.int32(first), jnp.int32(32), jnp.int32(0))
        bits = Labels(in_tile, jnp.int32(chunk * 256), jnp.int32(0)).in_strip(place, sizes)
        own = np.isin(chunk + first + np.arange(32), labels[64 * group : 64 * (group + 1)] // 256)
        np.testing.assert_array_equal([is_hit(bits, jnp.int32(i)) for i in range(32)], own)
