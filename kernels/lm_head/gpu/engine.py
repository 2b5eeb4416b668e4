"""The head on Hopper GPUs: forward, and backward over blocks of rows and chunks of columns.

The passes and their number of products are in docs/head.md. In `token_loss` the forward pass keeps the logits of as
many columns as fit into the workspace. Or it keeps all columns of some rows, in waves that add to a float32 dW.
`make_plan` chooses the way with less work.

Suffixes: N rows, M rows in the kernels' order, R of a wave, B of a block of them; V vocabulary, D features; C columns
of a chunk, K columns kept of each of P parts; U tiles of columns, T columns of a tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import contract, target
from ..contract import Gradients, Inputs, Options, Terms
from ..live_rows import live_rows, over_waves, round_up, write
from ..precision import precision_of
from ..shapes import Array, Bool, Float, Int
from ..softmax import RowFactors, Running, Slopes, Softmax, cap_slope, combine, row_factors
from . import tiles
from .backward import Block, hidden_gradient, logit_gradient, weight_gradient
from .forward import Chunk, KeptLogits, KernelRows, labels_in_tiles
from .forward import forward as forward_kernel
from .tiles import KEPT_DTYPE, Sizes, WavePlan, make_plan


def obstacle(inputs: Inputs, options: Options) -> str | None:
    if inputs.teacher is not None:
        return "it has no kernels for a teacher"
    if options.dtype != jnp.bfloat16:
        return f"dtype is {options.dtype}, and the kernels multiply in bfloat16"
    vocabulary, features = inputs.weight.shape
    if features % 64 or vocabulary % 8:
        return f"weight is {vocabulary} x {features}, and the kernels need multiples of 8 x 64"
    # Tests set tiles, and interpret the kernels elsewhere.
    return None if tiles.overridden() else target.why_not_hopper()


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, None]:
    sizes = tiles.choose(len(inputs.labels), *inputs.weight.shape)
    live = live_rows(inputs.live, sizes.tiles.cluster_rows)
    rows = _gather_rows(inputs, options, sizes, live.row, live.number)
    running, _ = _forward_pass(inputs, options, WavePlan(sizes, len(rows.labels)), rows)
    return _finish(inputs, options, jax.tree.map(lambda x: x[live.place], running), inputs.live), None


def gradients(inputs: Inputs, softmax: Softmax, saved: None, slopes: Slopes, options: Options) -> Gradients:
    sizes = tiles.choose(len(inputs.labels), *inputs.weight.shape)
    live = live_rows(inputs.live, sizes.rows(len(inputs.labels)))
    rows = _gather_rows(inputs, options, sizes, live.row, live.number)
    softmax, slopes = jax.tree.map(lambda x: x[live.row], (softmax, slopes))
    plan = WavePlan(sizes, len(rows.labels))
    dh, dw = _backward_pass(inputs, options, plan, rows, softmax, slopes)
    return None if dh is None else jnp.where(inputs.live[:, None], dh[live.place], 0), dw


def loss_and_gradients(inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
    plan = make_plan(inputs, options)

    def wave(row_R: Array, live_R: Array, dw_VD: Array | None, _: None) -> Any:
        rows = _gather_rows(inputs, options, plan.sizes, row_R, live_R.sum(dtype=jnp.int32))
        running, kept = _forward_pass(inputs, options, plan, rows)
        softmax_R = _finish(inputs, options, running, live_R)
        wave_inputs = inputs._replace(live=live_R)
        slopes_R = contract.loss_slopes(softmax_R, terms.of_rows(row_R), wave_inputs, options)
        dh_RD, dw_VD = _backward_pass(inputs, options, plan, rows, softmax_R, slopes_R, kept, dw_VD)
        return softmax_R, dh_RD, dw_VD, None

    nothing = contract.no_statistics(inputs, options, round_up(len(inputs.labels), plan.rows))
    # Before each step of a loop with a length from the device, the host would have to wait.
    return over_waves(inputs, options, plan.rows, wave, nothing, one_always_runs=True)


def _gather_rows(
    inputs: Inputs, options: Options, sizes: Sizes, row: Int[Array, "R"], number: Int[Array, ""]
) -> KernelRows:
    live = jnp.arange(len(row)) < number
    labels = jnp.where(live, contract.local_labels(inputs)[row], -1)
    in_tile = labels_in_tiles(labels, len(inputs.weight), sizes.tiles)
    scale = contract.scale_of(inputs.temperature, options.softcap)
    return KernelRows(inputs.hidden[row].astype(options.dtype), labels, in_tile, live, number, scale)


# --- forward --------------------------------------------------------------------------------------------------------


def _forward_pass(
    inputs: Inputs, options: Options, plan: WavePlan, rows: KernelRows
) -> tuple[Running, KeptLogits | None]:
    """Running statistics over the whole vocabulary, and the logits that the plan says to keep."""
    vocabulary, kept_columns, left = len(inputs.weight), plan.kept_columns, plan.chunk(len(inputs.weight))

    def over(start: int, end: int, chunk: int, keep: int = 0) -> tuple[Running, KeptLogits | None]:
        """Columns [start, end), in P parts: a weight of another dtype is cast chunk by chunk."""

        def kernel(first: Array, size: int) -> tuple[Running, KeptLogits | None]:
            weight, columns = _chunk_of(inputs, options, first, size)
            return forward_kernel(rows, weight, columns, options, size=size, sizes=plan.sizes, keep=keep)

        if inputs.weight.dtype == options.dtype:
            running, kept = kernel(jnp.int32(start), end - start)
            return running, jax.tree.map(lambda x: x[None], kept)

        def part(running: Running, i: Array) -> tuple[Running, KeptLogits | None]:
            added, kept = kernel(start + i * chunk, chunk)
            return combine(running, added, rows.scale), kept

        nothing = contract.no_columns(contract.zeros(inputs, len(rows.labels)), options)
        return lax.scan(part, nothing, jnp.arange(-(-(end - start) // chunk)))

    if not kept_columns:
        return over(0, vocabulary, left)
    keep = vocabulary if plan.whole else kept_columns if inputs.weight.dtype == options.dtype else plan.kept_chunk
    running, kept = over(0, kept_columns, plan.kept_chunk, keep)
    if kept_columns < vocabulary:
        running = combine(running, over(kept_columns, vocabulary, left)[0], rows.scale)
    return running, kept


def _finish(inputs: Inputs, options: Options, running: Running, live: Bool[Array, "R"]) -> Softmax:
    """The softmax over the whole vocabulary; 0 at rows that don't count."""
    # Nothing was written there, and 0 times a number that isn't finite is not 0.
    running = jax.tree.map(lambda x: jnp.where(live, x, 0), running._replace(sum_e=jnp.where(live, running.sum_e, 1)))
    return contract.finish(running, inputs._replace(live=live), options)


# --- backward -------------------------------------------------------------------------------------------------------


def _backward_pass(
    inputs: Inputs,
    options: Options,
    plan: WavePlan,
    rows: KernelRows,
    softmax: Softmax,
    slopes: Slopes,
    kept: KeptLogits | None = None,
    dw: Float[Array, "V D"] | None = None,
) -> Gradients:
    """dh and dW, which is added to `dw` if given; dy is made from kept or from recomputed logits."""
    if kept is not None and plan.whole:
        return _whole_wave(inputs, options, plan, rows, softmax, slopes, kept, dw)
    sizes, tiles, vocabulary = plan.sizes, plan.sizes.tiles, len(inputs.weight)
    size, left = sizes.block(len(rows.labels)), plan.chunk(vocabulary)
    blocks, (dh_dtype, dw_dtype) = len(rows.labels) // size, contract.gradient_dtypes(inputs, options)
    factors = row_factors(softmax, slopes, inputs.temperature, options.softcap).where(rows.live)
    add = dw is not None
    if not add and options.wants_weight:
        dw = contract.zeros(inputs, *inputs.weight.shape, dtype=dw_dtype)
    dh_sum = jax.new_ref(contract.zeros(inputs, *rows.hidden.shape)) if options.wants_hidden else None
    dw_sum = None if dw is None else jax.new_ref(dw)

    def of_chunk(number: Array, start: int, columns: int, kept: KeptLogits | None) -> None:
        """Adds the part of the gradients of a chunk, which has that number from column `start` on."""
        weight, chunk = _chunk_of(inputs, options, start + number * columns, columns)

        def of_block(i: Array, out: Any, chunk_of_out: Chunk, **how_to_add: Any) -> None:
            block = Block(i * size, jnp.clip(rows.number - i * size, 0, size))
            if kept is None:
                dy = logit_gradient(rows, weight, factors, block, chunk, options, size=(size, columns), sizes=sizes)
            else:
                kept_block = _read_kept(kept, number, block.first, (size, columns), columns // tiles.columns)
                dy = _kept_logit_gradient(options, rows, factors, kept_block, tiles.columns, block, chunk)
            if dh_sum is not None:
                hidden_gradient(dh_sum, dy, weight, block, chunk, tiles=tiles)
            if out is not None:
                weight_gradient(out, dy, rows.hidden, block, chunk_of_out, tiles=tiles, **how_to_add)

        last = jnp.int32(blocks - 1)
        if blocks == 1:
            of_block(last, dw_sum, chunk, add=add)
        elif dw_sum is None:
            lax.fori_loop(0, blocks, lambda i, _: of_block(i, None, chunk), None)
        else:
            sums = jax.new_ref(contract.zeros(inputs, columns, round_up(rows.hidden.shape[1], tiles.columns)))
            at_start = chunk._replace(first=jnp.int32(0))
            lax.fori_loop(0, blocks - 1, lambda i, _: of_block(i, sums, at_start, add=True), None)
            of_block(last, dw_sum, chunk, before=jax.freeze(sums))

    if kept is not None:
        chunks = plan.kept_columns // plan.kept_chunk
        lax.fori_loop(0, chunks, lambda i, _: of_chunk(i, 0, plan.kept_chunk, kept), None)
    if plan.kept_columns < vocabulary:
        chunks = -(-(vocabulary - plan.kept_columns) // left)
        lax.fori_loop(0, chunks, lambda i, _: of_chunk(i, plan.kept_columns, left, None), None)
    dh = None if dh_sum is None else jax.freeze(dh_sum).astype(dh_dtype)
    return dh, None if dw_sum is None else jax.freeze(dw_sum)


def _whole_wave(
    inputs: Inputs,
    options: Options,
    plan: WavePlan,
    rows: KernelRows,
    softmax: Softmax,
    slopes: Slopes,
    kept: KeptLogits,
    dw: Float[Array, "V D"] | None,
) -> Gradients:
    """dh and dW of a wave with every logit kept: dy overwrites the logits, and dh and dW are one cuBLAS product each.

    Rows that don't count cost as much as rows that count; only a small wave, or the last wave, has many of them.
    """
    factors = row_factors(softmax, slopes, inputs.temperature, options.softcap).where(rows.live)
    number, (dh_dtype, dw_dtype) = len(rows.labels), contract.gradient_dtypes(inputs, options)
    tiles, chunk = plan.sizes.tiles, Chunk(0, 0, contract.number_of_columns(inputs))

    def replace(i: Array, bits_MV: Array) -> Array:
        """Puts dy of a cluster's rows in the place of their logits. Other ways XLA makes an array of its own."""
        block = Block(i * tiles.cluster_rows, jnp.int32(tiles.cluster_rows))
        top_UB, bits_BV = (
            lax.dynamic_slice_in_dim(x, block.first, tiles.cluster_rows, axis)
            for x, axis in ((kept.tops[0], 1), (bits_MV, 0))
        )
        kept_block = KeptLogits(top_UB, lax.bitcast_convert_type(bits_BV, KEPT_DTYPE))
        dy_BV = _kept_logit_gradient(options, rows, factors, kept_block, tiles.columns, block, chunk)
        return write(bits_MV, lax.bitcast_convert_type(dy_BV, jnp.uint16), block.first)

    bits_MV = lax.bitcast_convert_type(kept.below[0], jnp.uint16)
    bits_MV = lax.fori_loop(0, number // tiles.cluster_rows, replace, bits_MV)
    dy_MV = lax.bitcast_convert_type(bits_MV, options.dtype)
    # 0 times a number that isn't finite is not 0.
    hidden_MD = jnp.where(rows.live[:, None], rows.hidden, 0)

    multiply, dh = functools.partial(lax.dot_general, precision=precision_of(options.dtype)), None
    if options.wants_hidden:
        dh = multiply(dy_MV, inputs.weight, (((1,), (0,)), ((), ())), preferred_element_type=dh_dtype)
    if options.wants_weight:
        dtype = dw_dtype if dw is None else dw.dtype
        added = multiply(dy_MV, hidden_MD, (((0,), (0,)), ((), ())), preferred_element_type=dtype)
        dw = added if dw is None else dw + added
    return dh, dw


def _chunk_of(inputs: Inputs, options: Options, first: Array, size: int) -> tuple[Float[Array, "_ D"], Chunk]:
    """A chunk, and an array that has its rows of the weight in the products' dtype."""
    columns = jnp.clip(contract.number_of_columns(inputs) - first, 0, size)
    if inputs.weight.dtype == options.dtype:
        return inputs.weight, Chunk(first, first, columns)
    row = jnp.minimum(first + jnp.arange(size), len(inputs.weight) - 1)
    return inputs.weight[row].astype(options.dtype), Chunk(first, jnp.int32(0), columns)


def _read_kept(kept: KeptLogits, number: Array, row: Array, size: tuple[int, int], tiles: int) -> KeptLogits:
    """The kept logits of chunk `number` and a block of rows from `row` on; `size` is the product's shape."""
    part, index = (number, 0) if len(kept.below) > 1 else (0, number)
    below_BC = lax.dynamic_slice(kept.below, (part, row, index * size[1]), (1, *size))[0]
    return KeptLogits(lax.dynamic_slice(kept.tops, (part, index * tiles, row), (1, tiles, size[0]))[0], below_BC)


def _kept_logit_gradient(
    options: Options, rows: KernelRows, factors: RowFactors, kept: KeptLogits, width: int, block: Block, chunk: Chunk
) -> Float[Array, "B C"]:
    """dy of a block and a chunk from their kept logits, in tiles of `width` columns, without a product."""
    top_UB, below_BC = kept
    size = below_BC.shape
    labels, live, factors = jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, block.first, size[0]), (rows.labels, rows.live, factors)
    )
    # Elementwise, so that dy can take the logits' place. The last tile may have fewer columns.
    top_BC = jnp.repeat(top_UB.T, width, axis=1)[:, : size[1]]
    # Where no float16 is so low, and where there is no column: a probability of 0, and finite.
    below_BC = jnp.maximum(below_BC.astype(jnp.float32), -float(jnp.finfo(KEPT_DTYPE).max))
    log_p_BC = rows.scale * (below_BC + (top_BC - factors.top[:, None])) - factors.log_sum_e[:, None]
    by_p_BC = factors.at_p[:, None]
    if options.entropy_slopes:
        by_p_BC += factors.at_p_log_p[:, None] * log_p_BC
    by_z_BC = jnp.exp(log_p_BC) * by_p_BC
    if options.mean_over is not None:
        by_z_BC += factors.at_all[:, None]
    if options.softcap is not None:
        by_z_BC *= cap_slope(below_BC + top_BC)
    column_C = jnp.arange(size[1])
    hit_BC = column_C == (labels - chunk.first)[:, None]
    dy_BC = jnp.where(hit_BC, factors.at_label[:, None], by_z_BC)
    return jnp.where(live[:, None] & (column_C < chunk.columns), dy_BC, 0).astype(options.dtype)
