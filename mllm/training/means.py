"""Means over the tokens of a batch, and over the tokens of each sequence."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int


def masked_mean(values: Float[jax.Array, "*S"], mask: Bool[jax.Array, "*S"]) -> Float[jax.Array, ""]:
    """The mean of the values in `mask`; 0 for an empty mask."""
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def sequence_means(
    values: Float[jax.Array, "B T"], mask: Bool[jax.Array, "B T"], segments: Int[jax.Array, "B T"]
) -> tuple[Float[jax.Array, "B T"], Float[jax.Array, "B T"]]:
    """For each token the mean of the masked values of its sequence (0 without any), and the number of these values.

    Each row's segments are numbered from 1 on.
    """

    def sum_segments(values: Float[jax.Array, "T"], segments: Int[jax.Array, "T"]) -> Float[jax.Array, "T"]:
        return jax.ops.segment_sum(values, segments, segments.size + 1)[segments]

    counts = jax.vmap(sum_segments)(mask.astype(jnp.float32), segments)
    return jax.vmap(sum_segments)(jnp.where(mask, values, 0.0), segments) / jnp.maximum(counts, 1), counts
