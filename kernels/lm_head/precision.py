"""The precision of matrix products: the head, the decoder, its attention and its sampler all take it from here."""

from typing import Any

import jax.numpy as jnp
from jax import lax


def precision_of(dtype: Any) -> lax.Precision:
    """The precision of a product of operands of this dtype, whatever `jax_default_matmul_precision` says.

    float32 operands have the highest, since a TPU rounds them to bfloat16 otherwise. Narrower ones have the default,
    one pass of the matrix units: Mosaic refuses them at any other.
    """
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT
