"""What Hopper kernels are told: of how many columns logits are kept, and which tiles have a label."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.gpu.forward import Labels, is_hit, labels_in_tiles
from kernels.lm_head.gpu.plan import make_plan
from kernels.lm_head.gpu.products import Place
from kernels.lm_head.gpu.tiles import Tiles

BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(autouse=True)
def an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.lm_head.target.multiprocessors", lambda: 132)


def problem(n: int, v: int, d: int, dw: Any, workspace: int = 0, **options: Any) -> tuple[Inputs, Options]:
    shapes = ((n, d), BF16), ((v, d), dw), ((n,), jnp.int32), ((n,), bool), ((), F32)
    inputs = Inputs(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    dtypes = jnp.dtype(BF16), jnp.dtype(dw)
    return inputs, Options(None, jnp.dtype(BF16), workspace, gradient_dtypes=dtypes, **options)


@pytest.mark.parametrize(
    ("n", "d", "dw", "workspace", "products"),
    [
        (8192, 2048, BF16, 0, 4),
        (8192, 2048, BF16, 640, 3.77),
        (8192, 2048, BF16, 1850, 3.28),
        (8192, 2048, BF16, 2560, 3),
    ],
)
def test_a_loss_takes_as_few_products_as_documented(n: int, d: int, dw: Any, workspace: int, products: float) -> None:
    """4, less the share of columns whose logits are kept; and no more columns than the memory can hold."""
    v, mib = 151936, workspace * 2**20
    plan = make_plan(*problem(n, v, d, dw, mib))
    found = 4 - min(plan.kept_columns, v) / v
    assert found == pytest.approx(products, abs=0.006)
    assert found >= 4 - mib / (2 * n * v)


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
