"""Matrices in int8, half the bytes of bfloat16: for decode steps, and for the frozen base of a LoRA run.

Each row, the weights of one output, has a scale of its own, symmetric around 0 (Jacob et al. 2018, arXiv:1712.05877,
section 2.1). Compilers convert the numbers on their way into a product, so no dequantised copy exists.

Numbers are rounded to nearest. A published model's weights lie on bfloat16's grid, so rounding to bfloat16 hides small
updates (compute_copy.py). Between int8's numbers they lie anywhere, so the share of the weights that change follows the
distance that they moved. Dithering would not improve this, and increase the rounding error (docs/log.md).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from lm_head.precision import precision_of

INT8_MAX = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Matrix:
    """The matrix `values * scales[..., None]`, stacked over layers or not; the fields may be shapes or shardings."""

    values: Any
    """int8, [*L, O, I]."""
    scales: Any
    """float32, [*L, O]."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dequantized(self) -> Float32[Array, "*L O I"]:
        return self.values.astype(jnp.float32) * self.scales[..., None]

    def product(self, x: Float[Array, "*B I"]) -> Float32[Array, "*B O"]:
        """x @ matrix.T, with operands in the dtype of x and float32 sums; only x has a gradient."""
        return multiply(x.dtype, x, self)

    def rows(self, indices: Int[Array, "*B"]) -> Float32[Array, "*B I"]:
        """Some rows of the matrix; NaN beyond its end."""
        scales = self.scales.at[indices].get(mode="fill", fill_value=jnp.nan)
        return self.values[indices].astype(jnp.float32) * scales[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(dtype: DTypeLike, x: Float[Array, "*B I"], matrix: Int8Matrix) -> Float32[Array, "*B O"]:
    """x @ matrix.T for x of this dtype."""
    narrow, precision = matrix.values.astype(dtype), precision_of(dtype)
    y = jnp.einsum("...i,oi->...o", x, narrow, precision=precision, preferred_element_type=jnp.float32)
    return y * matrix.scales


def differentiate(dtype: DTypeLike, matrix: Int8Matrix, dy: Float32[Array, "*B O"]) -> tuple[Array, None]:
    dy = (dy * matrix.scales).astype(dtype)  # as decoder.py's products round it
    return jnp.einsum("...o,oi->...i", dy, matrix.values.astype(dtype), precision=precision_of(dtype)), None


multiply.defvjp(lambda dtype, x, matrix: (multiply(dtype, x, matrix), matrix), differentiate)


def quantize(matrix: Float[Array, "*L O I"]) -> Int8Matrix:
    """The matrix rounded to int8; each row's largest absolute value is exact."""
    wide = matrix.astype(jnp.float32)
    scales = jnp.abs(wide).max(axis=-1) / INT8_MAX
    steps = jnp.round(wide / jnp.where(scales > 0, scales, 1)[..., None])
    return Int8Matrix(jnp.clip(steps, -INT8_MAX, INT8_MAX).astype(jnp.int8), scales)


def is_int8(x: Any) -> bool:
    return isinstance(x, Int8Matrix)
