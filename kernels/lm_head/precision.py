"""The precision of matrix products, shared by the head, the decoder, its attention and the sampler."""

from typing import Any

import jax.numpy as jnp
from jax import lax


def precision_of(dtype: Any) -> lax.Precision:
    """The precision of a product of operands of this dtype; `jax_default_matmul_precision` is ignored.

    float32 operands have the highest precision, since a TPU would round them to bfloat16. Narrower operands have the
    default precision, one pass of the matrix units: Mosaic refuses any other.
    """
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT
