"""The head on Hopper GPUs: which kernel when.

Rows that count are gathered ahead of the others. With F = 2 N V D flops for a product:

- Statistics: the forward kernel, F.
- Backward goes over the vocabulary in chunks: dy of a chunk, [rows, chunk] in bfloat16, from logits computed again; dh
  += dy W; dW's rows, complete at once. 3 F, 2 F for one gradient alone. What it needs beside: the chunk, the gathered
  hidden states and the sum of dh in float32.
- With a workspace, forward keeps exponentials of the first columns, all of them if they fit, and for those XLA makes dy
  without a product: between 4 F and 3 F in all, on one line.
- Where dW is wanted in float32, or there is room for such a sum, the workspace can keep all columns of some rows
  instead: waves of 3 F, each of which adds to dW. So it does where that is less work, by arithmetic (`wave_cost`).
- With `filter_eps`, tiles in which every probability is below it, and no label is, are left out of backward: 1 F and
  three times the share of the others, and a gradient that lacks them.

dy has no form as an attention's backward would have, without a buffer: a sum of dh for 128 rows, 1 MiB at 2048
features, is more than a multiprocessor holds.

Left out: the kernels (`gpu_forward.py`, `gpu_backward.py`) and their tiles (`gpu_tiles.py`).

Suffixes: N rows, M those in the kernels' order, R of a wave; C columns of a chunk, K those kept; G blocks of rows, U
tiles of columns.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.lm_head import gpu_tiles, target
from kernels.lm_head.contract import Gradients, How, Inputs, Objective, Terms, TokenLogprobs, loss_slopes
from kernels.lm_head.gpu_backward import Block, RowSlopes, Wanted, hidden_gradient, weight_gradient
from kernels.lm_head.gpu_backward import slopes as slopes_kernel
from kernels.lm_head.gpu_forward import Chunk, labelled
from kernels.lm_head.gpu_forward import forward as forward_kernel
from kernels.lm_head.gpu_tiles import Sizes, Tiles
from kernels.lm_head.live_rows import live_rows, round_up
from kernels.lm_head.manual_axes import vary, varying_axes
from kernels.lm_head.online_softmax import FLOOR, Running, Softmax, at_label, finish, joined, merge

_SHARE_OF_CHUNK, _MOST_SPARE = 8, 96 * 2**20  # of a workspace, one part in so many, and bytes: for larger chunks
_NEVER = 1e30  # log of a total that makes every probability 0


class _Rows(NamedTuple):
    """Rows in the kernels' order, the first `number` of which count."""

    hidden: Float[Array, "R D"]
    labels: Int[Array, "R"]
    found: Int[Array, "W U"]
    """Of each warpgroup's rows, the tiles of the vocabulary with one of their labels."""
    live: Bool[Array, "R"]
    number: Int[Array, ""]


class _Kept(NamedTuple):
    """What forward keeps for backward; None, if nothing."""

    tops: Float[Array, "U R"] | None
    """Maxima of the first tiles; of all, if some are to be left out."""
    exponentials: Float[Array, "P R K"] | None
    """Of the first P K columns."""
    chunk: int = 0
    """Columns that backward takes of them at a time; K of them, if not all are together."""


def obstacle(inputs: Inputs, how: How) -> str | None:
    if how.dtype != jnp.bfloat16:
        return f"dtype is {how.dtype}, and the kernels multiply in bfloat16"
    for name, dtype in {"hidden": inputs.hidden.dtype, "weight": inputs.weight.dtype}.items():
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {dtype}, and the kernels know bfloat16 and float32"
    if inputs.weight.shape[1] % 8:
        return f"hidden has {inputs.weight.shape[1]} features, and TMA wants a multiple of 8"
    # Elsewhere they can be interpreted, with tiles for that.
    return None if gpu_tiles.overridden() else target.no_hopper()


def statistics(inputs: Inputs, how: How) -> Softmax:
    return forward(inputs, dataclasses.replace(how, filter_eps=None))[0]


def forward(inputs: Inputs, how: How) -> tuple[Softmax, Float[Array, "N U"] | None]:
    """With the maxima of tiles, if some are to be left out of backward."""
    sizes = gpu_tiles.choose(len(inputs.labels), *inputs.weight.shape)
    live = live_rows(inputs.live, sizes.tiles.cluster_rows)
    rows = _gathered(inputs, how, sizes, live.row, live.number)
    running, kept = _forward(inputs, how, sizes, rows, keep=0, kept_chunk=0)
    softmax = _softmax(how, jax.tree.map(lambda x: x[live.place], running), inputs.live)
    return softmax, None if kept.tops is None else kept.tops.T[live.place]


def gradients(
    inputs: Inputs, softmax: Softmax, saved: Float[Array, "N U"] | None, slopes: TokenLogprobs, how: How
) -> Gradients:
    sizes = gpu_tiles.choose(len(inputs.labels), *inputs.weight.shape)
    live = live_rows(inputs.live, sizes.rows(len(inputs.labels)))
    rows = _gathered(inputs, how, sizes, live.row, live.number)
    softmax, slopes = jax.tree.map(lambda x: x[live.row], (softmax, slopes))
    dw = _zeros(inputs, *inputs.weight.shape, dtype=_gradient_dtypes(inputs, how)[1]) if how.wants_weight else None
    kept = _Kept(None if saved is None else saved[live.row].T, None)
    dh, dw = _backward(inputs, how, sizes, rows, softmax, slopes, kept, dw, add=False)
    return None if dh is None else jnp.where(inputs.live[:, None], dh[live.place], 0), dw


def loss_and_gradients(inputs: Inputs, objective: Objective, terms: Terms, how: How) -> tuple[Softmax, Gradients]:
    plan = _plan(inputs, how)
    sizes = plan.sizes
    live = live_rows(inputs.live, plan.rows)
    dh_dtype, dw_dtype = _gradient_dtypes(inputs, how)
    count, features = len(live.row), inputs.hidden.shape[1]
    one_wave = count == plan.rows
    sum_dtype = dw_dtype if one_wave else jnp.dtype(jnp.float32)

    def wave(i: Array, carry: Any) -> Any:
        softmax_M, dh_MD, dw_VD = carry
        row_R, live_R = live.block(i, plan.rows)
        rows = _gathered(inputs, how, sizes, row_R, jnp.clip(live.number - i * plan.rows, 0, plan.rows))
        running, kept = _forward(inputs, how, sizes, rows, plan.keep, plan.kept_chunk)
        softmax_R = _softmax(how, running, live_R)
        terms_R = Terms(terms.weights[row_R], tuple(x[row_R] for x in terms.operands), terms.shared)
        slopes_R = loss_slopes(objective, live_R, softmax_R.outputs(), terms_R)
        dh_RD, dw_VD = _backward(inputs, how, sizes, rows, softmax_R, slopes_R, kept, dw_VD, add=not one_wave)
        if dh_RD is not None:
            dh_MD = lax.dynamic_update_slice_in_dim(dh_MD, dh_RD, i * plan.rows, 0)
        softmax_M = jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, i * plan.rows, 0), softmax_M, softmax_R
        )
        return softmax_M, dh_MD, dw_VD

    carry = (
        Softmax(*(_zeros(inputs, count) for _ in Softmax._fields)),
        _zeros(inputs, count, features, dtype=dh_dtype) if how.wants_hidden else None,
        _zeros(inputs, *inputs.weight.shape, dtype=sum_dtype) if how.wants_weight else None,
    )
    in_step = how.token_axes if how.vocabulary_axis else ()
    # A loop as long as the device finds would have to wait for it to tell.
    one = wave(jnp.int32(0), carry) if one_wave else None
    softmax_M, dh_MD, dw = one or live.over_blocks(plan.rows, wave, carry, in_step)
    dh = None if dh_MD is None else jnp.where(inputs.live[:, None], dh_MD[live.place], 0)
    softmax = jax.tree.map(lambda x: x[live.place], softmax_M)
    return softmax, (dh, None if dw is None else dw.astype(dw_dtype))


# --- passes -------------------------------------------------------------------------------------------------------


def _gathered(inputs: Inputs, how: How, sizes: Sizes, row: Int[Array, "R"], number: Int[Array, ""]) -> _Rows:
    live = jnp.arange(len(row)) < number
    labels = inputs.labels[row]
    labels = jnp.where(live & (labels >= 0) & (labels < _columns(inputs)), labels, -1).astype(jnp.int32)
    found = labelled(labels, len(inputs.weight), sizes.tiles)
    return _Rows(inputs.hidden[row].astype(how.dtype), labels, found, live, number)


def _forward(inputs: Inputs, how: How, sizes: Sizes, rows: _Rows, keep: int, kept_chunk: int) -> tuple[Running, _Kept]:
    """Over the first `keep` columns, which are kept, and over the others."""
    found = [
        _over(inputs, how, sizes, rows, first, last, chunk, first < keep)
        for first, last, chunk in ((0, keep, kept_chunk), (keep, len(inputs.weight), sizes.chunk))
        if first < last
    ]
    running = functools.reduce(joined, (part[0] for part in found))
    tops = [part[1] for part in found if part[1] is not None]
    return running, _Kept(jnp.concatenate(tops) if tops else None, found[0][2], kept_chunk)


def _over(
    inputs: Inputs, how: How, sizes: Sizes, rows: _Rows, first: int, last: int, chunk: int, keep: bool
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

    zeros = _zeros(inputs, len(rows.labels))
    nothing = Running(zeros + FLOOR, zeros, zeros, zeros)
    running, (tops, exponentials) = lax.scan(part, nothing, jnp.arange(-(-(last - first) // chunk)))
    return running, None if tops is None else tops.reshape(-1, len(rows.labels)), exponentials


def _softmax(how: How, running: Running, live: Bool[Array, "R"]) -> Softmax:
    """Over the whole vocabulary; 0 at rows that don't count."""
    # Nothing was written there, and a product of 0 with what isn't finite is not 0.
    running = Running(*(jnp.where(live, x, fill) for x, fill in zip(running, (0, 1, 0, 0), strict=True)))
    if how.vocabulary_axis is not None:
        running = merge(running, how.vocabulary_axis)
    return jax.tree.map(lambda x: jnp.where(live, x, 0), finish(running))


def _backward(
    inputs: Inputs,
    how: How,
    sizes: Sizes,
    rows: _Rows,
    softmax: Softmax,
    slopes: TokenLogprobs,
    kept: _Kept,
    dw: Float[Array, "V D"] | None,
    add: bool,
) -> Gradients:
    """dh, and dW written or added to `dw`, a chunk of the vocabulary at a time."""
    by_row = _by_row(inputs, how, rows, softmax, slopes)
    counted = None if how.filter_eps is None else _counted(inputs, how, sizes, rows, softmax, kept)
    tiles, size = sizes.tiles, sizes.block(len(rows.labels))
    blocks = len(rows.labels) // size
    dh_sum = jax.new_ref(_zeros(inputs, *rows.hidden.shape)) if how.wants_hidden else None
    dw_sum = None if dw is None else jax.new_ref(dw)

    def chunk(first: Array, columns: int, kept_chunk: Array | None) -> None:
        weight, chunk = _chunk(inputs, how, first, columns)

        def block(i: Array, out: Any, chunk_of_out: Chunk, **options: Any) -> None:
            block = Block(i * size, jnp.clip(rows.number - i * size, 0, size))
            wanted = None if counted is None else _wanted(tiles, counted, block, chunk, (size, columns))
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
            sums = jax.new_ref(_zeros(inputs, columns, round_up(rows.hidden.shape[1], tiles.columns)))
            at_start = chunk._replace(first=jnp.int32(0))
            lax.fori_loop(0, blocks - 1, lambda i, _: block(i, sums, at_start, add=True), None)
            block(last, dw_sum, chunk, before=jax.freeze(sums))

    keep = 0
    if kept.exponentials is not None:
        keep, columns = math.prod(kept.exponentials.shape[::2]), kept.chunk
        lax.fori_loop(0, keep // columns, lambda i, _: chunk(i * columns, columns, i), None)
    others = max(0, -(-(len(inputs.weight) - keep) // sizes.chunk))
    lax.fori_loop(0, others, lambda i, _: chunk(keep + i * sizes.chunk, sizes.chunk, None), None)
    dh = None if dh_sum is None else jax.freeze(dh_sum).astype(_gradient_dtypes(inputs, how)[0])
    return dh, None if dw_sum is None else jax.freeze(dw_sum)


def _chunk(inputs: Inputs, how: How, first: Array, size: int) -> tuple[Float[Array, "_ D"], Chunk]:
    """A chunk, and an array that has its rows of the weight in the products' dtype."""
    columns = jnp.clip(_columns(inputs) - first, 0, size)
    if inputs.weight.dtype == how.dtype:
        return inputs.weight, Chunk(first, first, columns)
    row = jnp.minimum(first + jnp.arange(size), len(inputs.weight) - 1)
    return inputs.weight[row].astype(how.dtype), Chunk(first, jnp.int32(0), columns)


def _by_row(inputs: Inputs, how: How, rows: _Rows, softmax: Softmax, slopes: TokenLogprobs) -> RowSlopes:
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
    rows: _Rows,
    by_row: RowSlopes,
    kept: _Kept,
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


# --- tiles that are left out --------------------------------------------------------------------------------------


def _counted(inputs: Inputs, how: How, sizes: Sizes, rows: _Rows, softmax: Softmax, kept: _Kept) -> Bool[Array, "G U"]:
    """Blocks and tiles of the whole vocabulary in which a probability reaches `filter_eps`, or a label is."""
    assert kept.tops is not None
    assert how.filter_eps is not None
    width, block = sizes.tiles.columns, sizes.tiles.cluster_rows
    tile = jnp.arange(len(kept.tops))
    likely_UR = kept.tops - softmax.top - softmax.log_total >= jnp.log(how.filter_eps)
    here_UR = likely_UR & (tile * width < _columns(inputs))[:, None] | (rows.labels // width == tile[:, None])
    found = (here_UR & rows.live).reshape(len(tile), -1, block).any(axis=2).T
    return jnp.pad(found, ((0, 0), (0, sizes.chunk // width)))  # the last chunk may reach beyond


def _wanted(tiles: Tiles, counted: Bool[Array, "G U"], block: Block, chunk: Chunk, size: tuple[int, int]) -> Wanted:
    lengths = size[0] // tiles.cluster_rows, size[1] // tiles.columns
    found_GU = lax.dynamic_slice(counted, (block.first // tiles.cluster_rows, chunk.first // tiles.columns), lengths)

    def first(found: Bool[Array, "_ _"]) -> tuple[Int[Array, "_ _"], Array]:
        return jnp.argsort(~found, axis=1).astype(jnp.int32), found.sum(axis=1, dtype=jnp.int32)

    (flat,), (number,) = first(found_GU.reshape(1, -1))
    return Wanted(flat, number, *first(found_GU), *first(found_GU.T))


# --- sizes --------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    sizes: Sizes
    rows: int
    """Of a wave."""
    keep: int
    """Columns whose exponentials are kept."""
    kept_chunk: int
    """Columns that are taken of them at a time."""


def _plan(inputs: Inputs, how: How) -> _Plan:
    """What to spend the workspace on."""
    vocabulary, features = inputs.weight.shape
    sizes = gpu_tiles.choose(len(inputs.labels), vocabulary, features)
    tiles = sizes.tiles
    bytes_a_row = gpu_tiles.kept_bytes(vocabulary, tiles)
    room = sizes.default_rows * bytes_a_row if how.workspace is None else how.workspace
    rows, most_columns = sizes.rows(len(inputs.labels)), round_up(vocabulary, tiles.columns)
    if rows * bytes_a_row <= room:
        return _cut(inputs, rows, most_columns, room - rows * bytes_a_row)
    spare = min(room // _SHARE_OF_CHUNK, _MOST_SPARE)
    columns = (room - spare) // (rows * gpu_tiles.kept_bytes(tiles.columns, tiles)) * tiles.columns
    if how.wants_weight:
        # Several waves are summed in float32, which is no gradient then but one more array.
        no_array = _gradient_dtypes(inputs, how)[1] == jnp.float32
        left = room if no_array else 0 if how.workspace is None else room - 4 * inputs.weight.size
        most = min(max(left, 0) // bytes_a_row, sizes.most_rows) // tiles.cluster_rows * tiles.cluster_rows
        cost = sizes.wave_cost + (0 if inputs.weight.dtype == how.dtype else sizes.cast_cost)
        if most and -(-rows // most) * cost < rows * (1 - columns / vocabulary):
            wave = round_up(-(-rows // -(-rows // most)), tiles.cluster_rows)
            return _cut(inputs, wave, most_columns, left - wave * bytes_a_row)
    return _cut(inputs, rows, columns, spare)


def _cut(inputs: Inputs, rows: int, keep: int, spare: int) -> _Plan:
    """With chunks as large as `spare` bytes allow, those that are kept all of one size."""
    vocabulary, features = inputs.weight.shape
    sizes = gpu_tiles.choose(rows, vocabulary, features, min(spare, _MOST_SPARE))
    if not keep:
        return _Plan(sizes, rows, 0, 0)
    tiles = keep // sizes.tiles.columns
    chunks = -(-keep // sizes.chunk)
    whole = keep >= vocabulary
    kept_chunk = (-(-tiles // chunks) if whole else tiles // chunks) * sizes.tiles.columns
    return _Plan(sizes, rows, chunks * kept_chunk, kept_chunk)


def _columns(inputs: Inputs) -> Int[Array, ""]:
    return jnp.int32(len(inputs.weight)) if inputs.columns is None else inputs.columns.astype(jnp.int32)


def _gradient_dtypes(inputs: Inputs, how: How) -> tuple[jnp.dtype, jnp.dtype]:
    """Of dh and of dW."""
    dh, dw = how.hidden_gradient, how.weight_gradient
    return jnp.dtype(dh or inputs.hidden.dtype), jnp.dtype(dw or inputs.weight.dtype)


def _zeros(inputs: Inputs, *shape: int, dtype: Any = jnp.float32) -> Array:
    """Zeros that vary, under `shard_map`, over the axes that the inputs vary over, as a loop's carry must."""
    return vary(jnp.zeros(shape, dtype), varying_axes(inputs.hidden))
