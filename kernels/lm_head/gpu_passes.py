"""The head's passes on Hopper GPUs: forward, and backward over blocks of rows and chunks of the vocabulary.

Left out: the kernels (`gpu_forward.py`, `gpu_backward.py`), what is passed over when (`mosaic_gpu.py`).

Suffixes: R rows in the kernels' order, V vocabulary, D features; C columns of a chunk, K those kept of each of P parts;
U tiles of columns, W warpgroups' rows, T columns of a tile.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.lm_head import gpu_filter
from kernels.lm_head.contract import (
    Gradients,
    How,
    Inputs,
    TokenLogprobs,
    columns_of,
    gradient_dtypes,
    labels_of,
    zeros,
)
from kernels.lm_head.gpu_backward import Block, RowSlopes, hidden_gradient, weight_gradient
from kernels.lm_head.gpu_backward import slopes as slopes_kernel
from kernels.lm_head.gpu_forward import Chunk, labelled
from kernels.lm_head.gpu_forward import forward as forward_kernel
from kernels.lm_head.gpu_tiles import Sizes, Tiles
from kernels.lm_head.live_rows import round_up
from kernels.lm_head.online_softmax import FLOOR, Running, Softmax, at_label, finish, joined, merge

_NEVER = 1e30  # log of a total that makes every probability 0


class Rows(NamedTuple):
    """Rows in the kernels' order, the first `number` of which count."""

    hidden: Float[Array, "R D"]
    labels: Int[Array, "R"]
    found: Int[Array, "W U"]
    """Of each warpgroup's rows, the tiles of the vocabulary with one of their labels."""
    live: Bool[Array, "R"]
    number: Int[Array, ""]


class Kept(NamedTuple):
    """What forward keeps for backward; None, if nothing."""

    tops: Float[Array, "U R"] | None
    """Maxima of the first tiles; of all, if some are to be left out."""
    exponentials: Float[Array, "P R K"] | None
    """Of the first P K columns."""
    chunk: int = 0
    """Columns that backward takes of them at a time; K of them, if not all are together."""


def gathered(inputs: Inputs, how: How, sizes: Sizes, row: Int[Array, "R"], number: Int[Array, ""]) -> Rows:
    live = jnp.arange(len(row)) < number
    labels = jnp.where(live, labels_of(inputs)[row], -1)
    found = labelled(labels, len(inputs.weight), sizes.tiles)
    return Rows(inputs.hidden[row].astype(how.dtype), labels, found, live, number)


def forward(inputs: Inputs, how: How, sizes: Sizes, rows: Rows, keep: int, kept_chunk: int) -> tuple[Running, Kept]:
    """Over the first `keep` columns, which are kept, and over the others."""
    found = [
        _over(inputs, how, sizes, rows, first, last, chunk, first < keep)
        for first, last, chunk in ((0, keep, kept_chunk), (keep, len(inputs.weight), sizes.chunk))
        if first < last
    ]
    running = functools.reduce(joined, (part[0] for part in found))
    tops = [part[1] for part in found if part[1] is not None]
    return running, Kept(jnp.concatenate(tops) if tops else None, found[0][2], kept_chunk)


def _over(
    inputs: Inputs, how: How, sizes: Sizes, rows: Rows, first: int, last: int, chunk: int, keep: bool
) -> tuple[Running, Float[Array, "U R"] | None, Float[Array, "P R K"] | None]:
    def kernel(first: Array, size: int) -> Any:
        weight, of_weight = _chunk(inputs, how, first, size)
        return forward_kernel(
            rows.hidden,
            weight,
            rows.labels,
            rows.found,
            rows.number,
            of_weight,
            inputs.temperature,
            size=size,
            tiles=sizes.tiles,
            strip=sizes.strip(len(rows.labels), size),
            softcap=how.softcap,
            keep=keep,
            tops=how.filter_eps is not None,
        )

    if inputs.weight.dtype == how.dtype:
        running, tops, exponentials = kernel(jnp.int32(first), last - first)
        return running, tops, None if exponentials is None else exponentials[None]

    def part(running: Running, i: Array) -> Any:
        found, *kept = kernel(first + i * chunk, chunk)
        return joined(running, found), kept

    none = zeros(inputs, len(rows.labels))
    nothing = Running(none + FLOOR, none, none, none)
    running, (tops, exponentials) = lax.scan(part, nothing, jnp.arange(-(-(last - first) // chunk)))
    return running, None if tops is None else tops.reshape(-1, len(rows.labels)), exponentials


def softmax_of(how: How, running: Running, live: Bool[Array, "R"]) -> Softmax:
    """Over the whole vocabulary; 0 at rows that don't count."""
    # Nothing was written there, and a product of 0 with what isn't finite is not 0.
    running = Running(*(jnp.where(live, x, fill) for x, fill in zip(running, (0, 1, 0, 0), strict=True)))
    if how.vocabulary_axis is not None:
        running = merge(running, how.vocabulary_axis)
    return jax.tree.map(lambda x: jnp.where(live, x, 0), finish(running))


def backward(
    inputs: Inputs,
    how: How,
    sizes: Sizes,
    rows: Rows,
    softmax: Softmax,
    slopes: TokenLogprobs,
    kept: Kept,
    dw: Float[Array, "V D"] | None,
    add: bool,
) -> Gradients:
    """dh, and dW written or added to `dw`, a chunk of the vocabulary at a time."""
    by_row = _by_row(inputs, how, rows, softmax, slopes)
    counted = None
    if how.filter_eps is not None:
        assert kept.tops is not None
        counted = gpu_filter.counted(
            how.filter_eps,
            sizes.tiles,
            kept.tops,
            softmax,
            rows.labels,
            rows.live,
            columns=columns_of(inputs),
            chunk=sizes.chunk,
        )
    tiles, size = sizes.tiles, sizes.block(len(rows.labels))
    blocks = len(rows.labels) // size
    dh_sum = jax.new_ref(zeros(inputs, *rows.hidden.shape)) if how.wants_hidden else None
    dw_sum = None if dw is None else jax.new_ref(dw)

    def chunk(first: Array, columns: int, kept_chunk: Array | None) -> None:
        weight, chunk = _chunk(inputs, how, first, columns)

        def block(i: Array, out: Any, chunk_of_out: Chunk, **options: Any) -> None:
            block = Block(i * size, jnp.clip(rows.number - i * size, 0, size))
            wanted = None if counted is None else gpu_filter.wanted(tiles, counted, block, chunk, (size, columns))
            if kept_chunk is None:
                dy = slopes_kernel(
                    rows.hidden,
                    weight,
                    rows.labels,
                    rows.found,
                    by_row,
                    block,
                    chunk,
                    inputs.temperature,
                    size=(size, columns),
                    strip=sizes.strip(size, columns),
                    softcap=how.softcap,
                    entropy=how.entropy_slopes,
                    tiles=tiles,
                    wanted=wanted,
                )
            else:
                dy = _kept_slopes(inputs, how, tiles, rows, by_row, kept, kept_chunk, block, chunk, (size, columns))
            if dh_sum is not None:
                hidden_gradient(dh_sum, dy, weight, block, chunk, tiles=tiles, wanted=wanted)
            if out is not None:
                weight_gradient(out, dy, rows.hidden, block, chunk_of_out, tiles=tiles, wanted=wanted, **options)

        last = jnp.int32(blocks - 1)
        if blocks == 1:
            block(last, dw_sum, chunk, add=add)
        elif dw_sum is None:
            lax.fori_loop(0, blocks, lambda i, _: block(i, None, chunk), None)
        else:
            sums = jax.new_ref(zeros(inputs, columns, round_up(rows.hidden.shape[1], tiles.columns)))
            at_start = chunk._replace(first=jnp.int32(0))
            lax.fori_loop(0, blocks - 1, lambda i, _: block(i, sums, at_start, add=True), None)
            block(last, dw_sum, chunk, before=jax.freeze(sums))

    keep = 0
    if kept.exponentials is not None:
        keep = math.prod(kept.exponentials.shape[::2])
        lax.fori_loop(0, keep // kept.chunk, lambda i, _: chunk(i * kept.chunk, kept.chunk, i), None)
    others = max(0, -(-(len(inputs.weight) - keep) // sizes.chunk))
    lax.fori_loop(0, others, lambda i, _: chunk(keep + i * sizes.chunk, sizes.chunk, None), None)
    dh = None if dh_sum is None else jax.freeze(dh_sum).astype(gradient_dtypes(inputs, how)[0])
    return dh, None if dw_sum is None else jax.freeze(dw_sum)


def _chunk(inputs: Inputs, how: How, first: Array, size: int) -> tuple[Float[Array, "_ D"], Chunk]:
    """A chunk, and an array that has its rows of the weight in the products' dtype."""
    columns = jnp.clip(columns_of(inputs) - first, 0, size)
    if inputs.weight.dtype == how.dtype:
        return inputs.weight, Chunk(first, first, columns)
    row = jnp.minimum(first + jnp.arange(size), len(inputs.weight) - 1)
    return inputs.weight[row].astype(how.dtype), Chunk(first, jnp.int32(0), columns)


def _by_row(inputs: Inputs, how: How, rows: Rows, softmax: Softmax, slopes: TokenLogprobs) -> RowSlopes:
    scale = 1 / inputs.temperature
    by_p = slopes.lse - slopes.logprob - slopes.entropy * softmax.entropy
    label = at_label(softmax, slopes, inputs.temperature, how.softcap)
    found = RowSlopes(softmax.top, softmax.log_total, by_p * scale, slopes.entropy * scale, label)
    found = jax.tree.map(lambda x: jnp.where(rows.live, x, 0), found)
    return found._replace(log_total=jnp.where(rows.live, found.log_total, _NEVER))


def _kept_slopes(
    inputs: Inputs,
    how: How,
    tiles: Tiles,
    rows: Rows,
    by_row: RowSlopes,
    kept: Kept,
    number: Array,
    block: Block,
    chunk: Chunk,
    size: tuple[int, int],
) -> Float[Array, "R C"]:
    """dy of a block and a chunk by what was kept of them, without a product."""
    assert kept.exponentials is not None
    assert kept.tops is not None
    part, column = (number, 0) if len(kept.exponentials) > 1 else (0, chunk.first)
    e_RC = lax.dynamic_slice(kept.exponentials, (part, block.first, column), (1, *size))[0]
    across = size[1] // tiles.columns
    top_UR = lax.dynamic_slice(kept.tops, (chunk.first // tiles.columns, block.first), (across, size[0]))
    labels, live, by_row = jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, block.first, size[0]), (rows.labels, rows.live, by_row)
    )
    e_RUT = e_RC.reshape(size[0], across, tiles.columns).astype(jnp.float32)
    below_UR = top_UR - by_row.top - by_row.log_total
    p_RUT = e_RUT * jnp.exp(below_UR).T[:, :, None]
    by_p_RUT = by_row.by_p[:, None, None]
    if how.entropy_slopes or how.softcap is not None:
        log_e_RUT = jnp.log(jnp.maximum(e_RUT, jnp.finfo(jnp.float16).smallest_subnormal))
        if how.entropy_slopes:
            by_p_RUT -= by_row.entropy[:, None, None] * (log_e_RUT + below_UR.T[:, :, None])
        if how.softcap is not None:
            z_RUT = log_e_RUT + top_UR.T[:, :, None]
            by_p_RUT *= 1 - (z_RUT * inputs.temperature / how.softcap) ** 2
    column_C = jnp.arange(size[1])
    hit_RC = column_C == (labels - chunk.first)[:, None]
    dy_RC = jnp.where(hit_RC, by_row.label[:, None], (p_RUT * by_p_RUT).reshape(size))
    return jnp.where(live[:, None] & (column_C < chunk.columns), dy_RC, 0).astype(how.dtype)
