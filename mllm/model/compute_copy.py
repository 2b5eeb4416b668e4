"""Compute copies: the parameters in the compute dtype, as matrix products read them, rounded to nearest or dithered.

Rounding to nearest maps a float32 master back to its old bfloat16 number until it has moved by half the distance of two
bfloat16 numbers. Forward pass and sampler then don't see the updates of tens of steps of reinforcement learning. A
dithered copy is rounded up if the weight's fraction between its two neighbours exceeds the weight's fixed threshold in
[0, 1). So the share of the weights that change is the distance that they have moved. A number that bfloat16 can
represent is not changed, so a run begins with exactly the published model.

A threshold is a hash of the parameter's name and of the weight's layer, row and column. Every process, mesh, resumed
run and tool thus makes the same copy. Vectors (norms, biases) are read in float32.
"""

import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, BFloat16, Float32, Int, Shaped, UInt32

from mllm.config.model import ModelConfig


@dataclass(frozen=True)
class Rounding:
    """How compute copies are made."""

    dtype: jnp.dtype
    dithered: bool = False
    """Whether float32 is dithered when it becomes bfloat16; else it is rounded to nearest."""

    @classmethod
    def of(cls, model: ModelConfig) -> "Rounding":
        return cls(jnp.dtype(model.dtype), model.compute_rounding == "dithered")


def compute_copy(
    values: Shaped[Array, "*S"],
    rounding: Rounding,
    name: str,
    layer: Int[ArrayLike, "..."] = 0,
    rows: Int[Array, "..."] | None = None,
    columns: Int[Array, "..."] | None = None,
) -> Shaped[Array, "*S"]:
    """A parameter in the compute dtype; gradients ignore the rounding (straight-through).

    `name` is the parameter's name in `layout.PARAMETERS`, `layer` the index of its layer, unless layers are stacked. If
    `values` are only a part of the parameter, `rows` and `columns` are their indices, broadcast to the shape.
    """
    if not (rounding.dithered and values.dtype == jnp.float32 and rounding.dtype == jnp.bfloat16):
        return values.astype(rounding.dtype)
    if "." in name and values.ndim == 3:
        layer = jnp.arange(len(values))[:, None, None]
    if rows is None:
        rows = jnp.arange(values.shape[-2])[:, None] if values.ndim > 1 else jnp.asarray(0)
    return dither(values, thresholds(name, layer, rows, jnp.arange(values.shape[-1]) if columns is None else columns))


@jax.custom_vjp
def dither(values: Float32[Array, "*S"], bits: UInt32[Array, "..."]) -> BFloat16[Array, "*S"]:
    """Each number in bfloat16: rounded away from 0 if its last 16 bits and `bits` carry, else towards 0."""
    pattern = jax.lax.bitcast_convert_type(values, jnp.uint32)
    carried = pattern + bits
    # Only a NaN can carry into the sign. (What isn't finite, XLA for TPUs would keep as an array.)
    carried |= ((carried ^ pattern) >> 31) * jnp.uint32(0x7FC00000)
    return jax.lax.bitcast_convert_type(carried & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


dither.defvjp(lambda values, bits: (dither(values, bits), None), lambda _, slope: (slope.astype(jnp.float32), None))


def thresholds(name: str, *index: Int[ArrayLike, "..."]) -> UInt32[Array, "..."]:
    """16 bits for each weight, from the parameter's name and the weight's layer, row and column, which broadcast."""
    layer, row, column = (jnp.asarray(number).astype(jnp.uint32) for number in index)
    row = jnp.uint32(zlib.crc32(name.encode())) + layer * jnp.uint32(0xC2B2AE3D) + row * jnp.uint32(0x9E3779B1)
    # Row and column both depend on the layer, or XLA for GPUs would keep arrays of them from one layer to the next.
    number = row + (layer + column) * jnp.uint32(0x85EBCA77)
    # One round of the integer hash of C. Wellons's `prospector` (public domain): more rounds gave no better figures.
    return ((number ^ (number >> 15)) * jnp.uint32(0x2C1B3C6D)) >> 16
