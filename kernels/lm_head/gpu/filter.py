"""Tiles that backward leaves out on Hopper GPUs, by `filter_eps`: those in which nothing is likely, and no label is.

Cut cross-entropy's filter (arXiv:2411.09009, section 4.3), before the logits are computed again: forward has stored the
tiles' maxima.

Suffixes: R rows; G blocks of a cluster's rows; P tiles of columns, U with those of a chunk beyond.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.lm_head.gpu.backward import Block, Wanted
from kernels.lm_head.gpu.forward import Chunk
from kernels.lm_head.gpu.tiles import Tiles
from kernels.lm_head.softmax import Softmax


def counted(
    eps: float,
    tiles: Tiles,
    tops: Float[Array, "P R"],
    softmax: Softmax,
    labels: Int[Array, "R"],
    live: Bool[Array, "R"],
    columns: Int[Array, ""],
    chunk: int,
) -> Bool[Array, "G U"]:
    """Blocks and tiles of the whole vocabulary, and of one chunk beyond, in which a probability reaches `eps`, or a
    label is.

    Args:
        tops: the tiles' maxima.
    """
    width = tiles.columns
    tile = jnp.arange(len(tops))
    likely_PR = tops - softmax.top - softmax.log_sum_e >= jnp.log(eps)
    here_PR = likely_PR & (tile * width < columns)[:, None] | (labels // width == tile[:, None])
    found_GU = (here_PR & live).reshape(len(tile), -1, tiles.cluster_rows).any(axis=2).T
    return jnp.pad(found_GU, ((0, 0), (0, chunk // width)))  # the last chunk may reach beyond


def wanted(tiles: Tiles, counted: Bool[Array, "G U"], block: Block, chunk: Chunk, size: tuple[int, int]) -> Wanted:
    lengths = size[0] // tiles.cluster_rows, size[1] // tiles.columns
    found_GU = lax.dynamic_slice(counted, (block.first // tiles.cluster_rows, chunk.first // tiles.columns), lengths)

    def first(found: Bool[Array, "_ _"]) -> tuple[Int[Array, "_ _"], Array]:
        return jnp.argsort(~found, axis=1).astype(jnp.int32), found.sum(axis=1, dtype=jnp.int32)

    (flat,), (number,) = first(found_GU.reshape(1, -1))
    return Wanted(flat, number, *first(found_GU), *first(found_GU.T))
