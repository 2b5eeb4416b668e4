"""The head's passes on Hopper GPUs: forward, and backward over blocks of rows and chunks of the vocabulary.

Left out: the kernels (`gpu_forward.py`, `gpu_backward.py`), what is passed over when (`mosaic_gpu.py`).

Suffixes: R rows in the kernels' order, V vocabulary, D features; C columns of a chunk, K those kept of each of P parts;
U tiles of columns, W warpgroups' rows, T columns of a tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt16

from kernels.lm_head.contract import (
    Gradients,
    Inputs,
    Options,
    TokenLogprobs,
    gradient_dtypes,
    local_labels,
    number_of_columns,
    zeros,
)
from kernels.lm_head.gpu import filter as gpu_filter
from kernels.lm_head.gpu import kept_logits as gpu_loan
from kernels.lm_head.gpu.backward import Block, RowSlopes, hidden_gradient, weight_gradient
from kernels.lm_head.gpu.backward import slopes as slopes_kernel
from kernels.lm_head.gpu.forward import Chunk, labelled
from kernels.lm_head.gpu.forward import forward as forward_kernel
from kernels.lm_head.gpu.kept_logits import Lent
from kernels.lm_head.gpu.plan import Plan
from kernels.lm_head.gpu.tiles import KEPT, Sizes, Tiles
from kernels.lm_head.live_rows import round_up
from kernels.lm_head.softmax import FLOOR, Running, Softmax, combine, combine_over_axis, finish, label_slope

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
    """Maxima of the tiles that the workspace has; of all, if some are to be left out."""
    logits: Float[Array, "P R K"] | None = None
    """Of P K columns, those that the workspace has."""
    lent: UInt16[Array, "V W"] | None = None
    """What dW's memory has."""


def gathered(inputs: Inputs, options: Options, sizes: Sizes, row: Int[Array, "R"], number: Int[Array, ""]) -> Rows:
    live = jnp.arange(len(row)) < number
    labels = jnp.where(live, local_labels(inputs)[row], -1)
    found = labelled(labels, len(inputs.weight), sizes.tiles)
    return Rows(inputs.hidden[row].astype(options.dtype), labels, found, live, number)


def forward(inputs: Inputs, options: Options, plan: Plan, rows: Rows) -> tuple[Running, Kept]:
    """Over the columns that dW's memory keeps, those that the workspace does, and the others."""
    lent = gpu_loan.lend(inputs, options, plan.loan)
    vocabulary = len(inputs.weight)
    edges = (0, plan.loan.columns, plan.loan.columns + plan.keep, vocabulary)
    chunks = (plan.loan.chunk, plan.kept_chunk, plan.chunk(vocabulary))
    over = functools.partial(_over, inputs, options, plan.sizes, rows)
    found = [
        over(first, last, chunk, keep=number == 1, lent=None if number else lent)
        for number, (first, last, chunk) in enumerate(zip(edges, edges[1:], chunks, strict=False))
        if first < last
    ]
    running = functools.reduce(combine, (part[0] for part in found))
    tops = [part[1] for part in found if part[1] is not None]
    memory = None if lent is None else gpu_loan.given_back(lent, tops[0])
    if lent is not None and options.filter_eps is None:
        tops = tops[1:]
    logits = next((part[2] for part in found if part[2] is not None), None)
    return running, Kept(jnp.concatenate(tops) if tops else None, logits, memory)


def _over(
    inputs: Inputs,
    options: Options,
    sizes: Sizes,
    rows: Rows,
    first: int,
    last: int,
    chunk: int,
    keep: bool = False,
    lent: Lent | None = None,
) -> tuple[Running, Float[Array, "U R"] | None, Float[Array, "P R K"] | None]:
    def kernel(first: Array, size: int) -> Any:
        weight, of_weight = _chunk(inputs, options, first, size)
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
            softcap=options.softcap,
            keep=keep,
            lent=lent,
            tops=options.filter_eps is not None,
        )

    if inputs.weight.dtype == options.dtype:
        running, tops, logits = kernel(jnp.int32(first), last - first)
        return running, tops, None if logits is None else logits[None]

    def part(running: Running, i: Array) -> Any:
        found, *kept = kernel(first + i * chunk, chunk)
        return combine(running, found), kept

    none = zeros(inputs, len(rows.labels))
    nothing = Running(none + FLOOR, none, none, none)
    running, (tops, logits) = lax.scan(part, nothing, jnp.arange(-(-(last - first) // chunk)))
    return running, None if tops is None else tops.reshape(-1, len(rows.labels)), logits


def softmax_of(options: Options, running: Running, live: Bool[Array, "R"]) -> Softmax:
    """Over the whole vocabulary; 0 at rows that don't count."""
    # Nothing was written there, and a product of 0 with what isn't finite is not 0.
    running = Running(*(jnp.where(live, x, fill) for x, fill in zip(running, (0, 1, 0, 0), strict=True)))
    if options.vocabulary_axis is not None:
        running = combine_over_axis(running, options.vocabulary_axis)
    return jax.tree.map(lambda x: jnp.where(live, x, 0), finish(running))


def backward(
    inputs: Inputs,
    options: Options,
    plan: Plan,
    rows: Rows,
    softmax: Softmax,
    slopes: TokenLogprobs,
    kept: Kept,
    dw: Float[Array, "V D"] | None,
    add: bool,
) -> Gradients:
    """dh, and dW written or added to `dw`, a chunk of the vocabulary at a time. What is kept in dW's memory takes the
    place of `dw`."""
    sizes, loan = plan.sizes, plan.loan
    by_row = _by_row(inputs, options, rows, softmax, slopes)
    counted = None
    if options.filter_eps is not None:
        assert kept.tops is not None
        counted = gpu_filter.counted(
            options.filter_eps,
            sizes.tiles,
            kept.tops,
            softmax,
            rows.labels,
            rows.live,
            columns=number_of_columns(inputs),
            chunk=sizes.chunk,
        )
    tiles, size = sizes.tiles, sizes.block(len(rows.labels))
    blocks = len(rows.labels) // size
    dh_sum = jax.new_ref(zeros(inputs, *rows.hidden.shape)) if options.wants_hidden else None
    if kept.lent is not None:
        assert dw is not None
        dw = gpu_loan.as_gradient(kept.lent, dw.dtype)
    dw_sum = None if dw is None else jax.new_ref(dw)

    def chunk(first: Array, columns: int, found: Callable[[Block], tuple[Array, Array]] | None = None) -> None:
        weight, chunk = _chunk(inputs, options, first, columns)

        def block(i: Array, out: Any, chunk_of_out: Chunk, **how_to_add: Any) -> None:
            block = Block(i * size, jnp.clip(rows.number - i * size, 0, size))
            wanted = None if counted is None else gpu_filter.wanted(tiles, counted, block, chunk, (size, columns))
            if found is None:
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
                    softcap=options.softcap,
                    entropy=options.entropy_slopes,
                    tiles=tiles,
                    wanted=wanted,
                )
            else:
                dy = _kept_slopes(inputs, options, tiles, rows, by_row, *found(block), block, chunk)
            if dh_sum is not None:
                hidden_gradient(dh_sum, dy, weight, block, chunk, tiles=tiles, wanted=wanted)
            if out is not None:
                weight_gradient(out, dy, rows.hidden, block, chunk_of_out, tiles=tiles, wanted=wanted, **how_to_add)

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

    def of_lent(i: Array, _: None) -> None:
        def found(block: Block) -> tuple[Array, Array]:
            logits = gpu_loan.logits_of(dw_sum, loan, i * loan.chunk, block.first, size)
            return logits, gpu_loan.tops_of(dw_sum, loan, i * loan.chunk, tiles.columns)

        chunk(i * loan.chunk, loan.chunk, found)

    def of_kept(i: Array, _: None) -> None:
        first = loan.columns + i * plan.kept_chunk
        tile = (0 if counted is None else loan.columns // tiles.columns) + i * (plan.kept_chunk // tiles.columns)
        chunk(first, plan.kept_chunk, lambda block: _kept(kept, plan, i, tile, block.first, size))

    kept_columns, other_chunk = loan.columns + plan.keep, plan.chunk(len(inputs.weight))
    others = max(0, -(-(len(inputs.weight) - kept_columns) // other_chunk))
    for number, body in (
        (loan.columns // max(1, loan.chunk), of_lent),
        (plan.keep // max(1, plan.kept_chunk), of_kept),
        (others, lambda i, _: chunk(kept_columns + i * other_chunk, other_chunk)),
    ):
        if number:
            lax.fori_loop(0, number, body, None)
    dh = None if dh_sum is None else jax.freeze(dh_sum).astype(gradient_dtypes(inputs, options)[0])
    return dh, None if dw_sum is None else jax.freeze(dw_sum)


def _chunk(inputs: Inputs, options: Options, first: Array, size: int) -> tuple[Float[Array, "_ D"], Chunk]:
    """A chunk, and an array that has its rows of the weight in the products' dtype."""
    columns = jnp.clip(number_of_columns(inputs) - first, 0, size)
    if inputs.weight.dtype == options.dtype:
        return inputs.weight, Chunk(first, first, columns)
    row = jnp.minimum(first + jnp.arange(size), len(inputs.weight) - 1)
    return inputs.weight[row].astype(options.dtype), Chunk(first, jnp.int32(0), columns)


def _by_row(inputs: Inputs, options: Options, rows: Rows, softmax: Softmax, slopes: TokenLogprobs) -> RowSlopes:
    scale = 1 / inputs.temperature
    by_p = slopes.lse - slopes.logprob - slopes.entropy * softmax.entropy
    label = label_slope(softmax, slopes, inputs.temperature, options.softcap)
    found = RowSlopes(softmax.top, softmax.log_sum_e, by_p * scale, slopes.entropy * scale, label)
    found = jax.tree.map(lambda x: jnp.where(rows.live, x, 0), found)
    return found._replace(log_sum_e=jnp.where(rows.live, found.log_sum_e, _NEVER))


def _kept(
    kept: Kept, plan: Plan, number: Array, tile: Array, row: Array, rows: int
) -> tuple[Float[Array, "R C"], Float[Array, "U M"]]:
    """What the workspace has of `rows` from `row` on and a chunk: logits less their tile's maximum, and maxima.

    Args:
        number: of the chunk, among those that the workspace has.
        tile: its first one's place in `kept.tops`.
    """
    assert kept.logits is not None
    assert kept.tops is not None
    part, column = (number, 0) if len(kept.logits) > 1 else (0, number * plan.kept_chunk)
    tops = lax.dynamic_slice_in_dim(kept.tops, tile, plan.kept_chunk // plan.sizes.tiles.columns)
    return lax.dynamic_slice(kept.logits, (part, row, column), (1, rows, plan.kept_chunk))[0], tops


def _kept_slopes(
    inputs: Inputs,
    options: Options,
    tiles: Tiles,
    rows: Rows,
    by_row: RowSlopes,
    below_RC: Float[Array, "R C"],
    top_UM: Float[Array, "U M"],
    block: Block,
    chunk: Chunk,
) -> Float[Array, "R C"]:
    """dy of a block and a chunk by what was kept of them, without a product."""
    size = below_RC.shape
    across = size[1] // tiles.columns
    top_UR = lax.dynamic_slice_in_dim(top_UM, block.first, size[0], axis=1)
    labels, live, by_row = jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, block.first, size[0]), (rows.labels, rows.live, by_row)
    )
    below_RUT = below_RC.reshape(size[0], across, tiles.columns).astype(jnp.float32)
    # Where no float16 is so low, and where there is no column: a probability of 0, and finite.
    below_RUT = jnp.maximum(below_RUT, -float(jnp.finfo(KEPT).max)) / inputs.temperature
    log_p_RUT = below_RUT + (top_UR - by_row.top - by_row.log_sum_e).T[:, :, None]
    by_p_RUT = by_row.by_p[:, None, None]
    if options.entropy_slopes:
        by_p_RUT -= by_row.entropy[:, None, None] * log_p_RUT
    if options.softcap is not None:
        z_RUT = below_RUT + top_UR.T[:, :, None]
        by_p_RUT *= 1 - (z_RUT * inputs.temperature / options.softcap) ** 2
    column_C = jnp.arange(size[1])
    hit_RC = column_C == (labels - chunk.first)[:, None]
    dy_RC = jnp.where(hit_RC, by_row.label[:, None], (jnp.exp(log_p_RUT) * by_p_RUT).reshape(size))
    return jnp.where(live[:, None] & (column_C < chunk.columns), dy_RC, 0).astype(options.dtype)
