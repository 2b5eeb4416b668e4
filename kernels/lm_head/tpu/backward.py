"""The backward kernels for TPUs: dW and dh from logits that are computed again, dW from exponentials that were kept.

dW's kernel sums a tile in float32 on the chip while the blocks of hidden states pass by. It works on y transposed,
W hᵀ, so that dW = dyᵀ h needs no transpose. dh's kernel mirrors the forward kernel. With kept exponentials dW is the
third product of the single pass.

Suffixes as in `forward.py`. All kernels compute dy, the derivatives by products, by the formula of `RowFactors`. There
p = exp(log p) and log p = scale (y - top) - log_sum_e; `top` is the maximum of y over the whole vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import target
from ..contract import Inputs, Options, as_operand, capped, dot, number_of_columns
from ..shapes import Array, Float
from ..softmax import RowFactors, Slopes, Softmax, cap_slope, label_slope
from . import forward
from .forward import LOG2E, SUBLANES, KeptExponentials, Output
from .tiles import LANES, KernelName, Tiles, case_of


def _number_of_factors(options: Options) -> int:
    return len(RowFactors._fields) - (options.mean_over is None)


def _weight_kernel(*refs: Any, tile: Tiles, options: Options, from_kept: bool = False) -> None:
    """dW of a tile, from logits that are computed again, or `from_kept` exponentials and their maxima."""
    ints, scale, hidden, *streamed = refs[: 4 + from_kept]
    labels, factors, *so_far, out, scratch = refs[4 + from_kept :]
    j, i = pl.program_id(0), pl.program_id(1)
    step, steps, dtype = tile.step, tile.columns // tile.step, options.dtype

    @pl.when(i == 0)
    def _() -> None:
        if so_far:
            forward.load_tile(scratch["sum"], so_far[0])
        else:
            scratch["sum"][...] = jnp.zeros(scratch["sum"].shape, jnp.float32)
        if "weight" in scratch:
            forward.load_tile(scratch["weight"], *streamed)

    @pl.when(i * tile.rows < ints[0])
    def _() -> None:
        h_RD = scratch.get("hidden", hidden)
        if "hidden" in scratch:
            h_RD[...] = hidden[...].astype(dtype)
        row_1R = RowFactors(*(factors[pl.ds(n, 1), :] for n in range(_number_of_factors(options))))

        def products(s: int) -> Float[Array, "S R"]:
            w_TD = scratch.get("weight", streamed[0])
            return dot(w_TD[pl.ds(s * step, step), :], h_RD[...], (1, 1), dtype)

        def slopes_of_kept(s: int) -> Float[Array, "S R"]:
            kept, kept_top = streamed
            below_1R = (kept_top[pl.ds(s, 1), :] - row_1R.top) * scale[0] - row_1R.log_sum_e
            dy_SR = kept[pl.ds(s * step, step), :].astype(jnp.float32) * (row_1R.at_p * jnp.exp2(below_1R * LOG2E))
            return dy_SR if options.mean_over is None else dy_SR + row_1R.at_all

        def slopes() -> Iterator[tuple[int, Float[Array, "S R"]]]:
            if from_kept:
                yield from ((s, slopes_of_kept(s)) for s in range(steps))
            else:
                for s, product_SR in one_ahead(products, steps):
                    yield s, _dy(capped(product_SR, options.softcap), scale[0], row_1R, options)

        for s, dy_SR in slopes():
            column_SR = lax.broadcasted_iota(jnp.int32, dy_SR.shape, 0)
            hit_SR = column_SR == labels[...] - (j * tile.columns + s * step)
            dy_SR = jnp.where(hit_SR, row_1R.at_label, dy_SR)
            scratch["sum"][pl.ds(s * step, step), :] += dot(dy_SR.astype(dtype), h_RD[...], (1, 0), dtype)

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        # Rows of W that are no tokens get 0, whatever their dy was.
        forward.zero_tail(scratch["sum"], ints[1] - j * tile.columns, (j + 1) * tile.columns > ints[1])
        forward.store_tile(out["gradient"], scratch["sum"])


def _hidden_kernel(*refs: Any, tile: Tiles, options: Options) -> None:
    ints, scale, hidden, weight, labels, factors, out, scratch = refs
    i, j = pl.program_id(0), pl.program_id(1)
    last = pl.num_programs(1) - 1
    step, dtype = tile.step, options.dtype

    @pl.when(i * tile.rows < ints[0])
    def _() -> None:
        @pl.when(j == 0)
        def _() -> None:
            scratch["sum"][...] = jnp.zeros(scratch["sum"].shape, jnp.float32)
            scratch["label"][...] = forward.to_lanes(labels[...])
            for n in range(_number_of_factors(options)):
                scratch["factors"][n] = forward.to_lanes(factors[pl.ds(n, 1), :])
            if "hidden" in scratch:
                scratch["hidden"][...] = hidden[...].astype(dtype)

        h_RD, w_TD = scratch.get("hidden", hidden), scratch.get("weight", weight)
        if "weight" in scratch:
            forward.load_tile(w_TD, weight)
        forward.zero_tail(w_TD, ints[1] - j * tile.columns, j == last)

        def products(s: int) -> Float[Array, "R S"]:
            return dot(h_RD[...], w_TD[pl.ds(s * step, step), :], (1, 1), dtype)

        for s, product_RS in one_ahead(products, tile.columns // step):
            y_RS = capped(product_RS, options.softcap)
            first = j * tile.columns + s * step
            column_RS = lax.broadcasted_iota(jnp.int32, y_RS.shape, 1)
            hit_RS = column_RS == forward.lanes(scratch["label"][...] - first, step)
            numbers = range(_number_of_factors(options))
            factors_RS = RowFactors(*(forward.lanes(scratch["factors"][n], step) for n in numbers))
            dy_RS = jnp.where(hit_RS, factors_RS.at_label, _dy(y_RS, scale[0], factors_RS, options))
            # A mask of y would not do: its log p, times the entropy's slope, can overflow, and 0 times inf is not 0.
            dy_RS = jnp.where(column_RS < ints[1] - first, dy_RS, 0)
            scratch["sum"][...] += dot(dy_RS.astype(dtype), w_TD[pl.ds(s * step, step), :], (1, 0), dtype)

        @pl.when(j == last)
        def _() -> None:
            out["gradient"][...] = scratch["sum"][...].astype(out["gradient"].dtype)


def _dy(y: Array, scale: Array, factors: RowFactors, options: Options) -> Array:
    """dy in columns that are not the label's."""
    if options.entropy_slopes:
        log_p = (y - factors.top) * scale - factors.log_sum_e
        dy = jnp.exp2(log_p * LOG2E) * (factors.at_p + factors.at_p_log_p * log_p)
    else:
        dy = jnp.exp2((y - factors.top) * (scale * LOG2E)) * (factors.at_p * jnp.exp2(-factors.log_sum_e * LOG2E))
    if options.mean_over is not None:
        dy += factors.at_all
    if options.softcap is not None:
        dy *= cap_slope(y)
    return dy


def one_ahead(products: Callable[[int], Any], steps: int) -> Iterator[tuple[int, Any]]:
    """The number of each step and its products; the products of the next step are begun before."""
    following = products(0)
    for s in range(steps):
        current = following
        if s + 1 < steps:
            following = products(s + 1)
        yield s, current


_KERNELS: dict[str, Callable[..., None]] = {
    "hidden": _hidden_kernel,
    "weight": _weight_kernel,
    "kept": functools.partial(_weight_kernel, from_kept=True),
}


def gradient(
    name: KernelName,
    inputs: Inputs,
    factors: RowFactors,
    options: Options,
    tile: Tiles,
    kept: KeptExponentials | None = None,
    so_far: Float[Array, "V D"] | None = None,
) -> Float[Array, "_ D"]:
    """dh ("hidden"); dW ("weight"); or dW ("kept") of `kept`, in its tiles, plus `so_far` (float32), in its memory.

    It is summed on the chip. Rows that count are the first; in others dh is undefined, and for dW factors must make
    every probability 0 there.
    """
    case = case_of(inputs, options, name)
    side = inputs.hidden if case.by_rows else inputs.weight
    shape = tile.rows if case.by_rows else tile.columns, side.shape[1]
    to, to_spec = forward.tile_of_rows(side, shape[0], lambda *step: step[0])
    if case.by_rows:
        to, to_spec = side, pl.BlockSpec(shape, lambda i, *_: (i, 0))
    # The factors as rows of one array, padded to whole sublanes.
    vectors = jax.tree.leaves(factors)
    factors_8M = jnp.stack(vectors + [jnp.zeros_like(factors.top)] * (SUBLANES - len(vectors)))
    others = [(factors_8M, forward.block_spec(case, tile, (SUBLANES, tile.rows), lambda i, j: (0, i), live=True))]
    streamed, scratch = [], {"sum": pltpu.VMEM(shape, jnp.float32)}
    if name == "hidden":
        scratch["label"] = pltpu.VMEM((tile.rows, LANES), jnp.int32)
        scratch["factors"] = pltpu.VMEM((len(vectors), tile.rows, LANES), jnp.float32)
    if kept is not None:
        for array, height in ((kept.exponential, tile.columns), (kept.top, SUBLANES)):
            spec = forward.block_spec(case, tile, (height, tile.rows), lambda i, j: (j, i), live=True)
            streamed.append((array, spec))
    if so_far is not None:
        case = dataclasses.replace(case, gradient=so_far.dtype)
        others.append(forward.tile_of_rows(so_far, tile.columns, lambda *step: step[0]))
    title, outputs = "kept_weight" if name == "kept" else name, {"gradient": Output(to.shape, case.gradient, to_spec)}
    # The interpreter, off the TPU, returns an aliased output with the last tile's padding.
    aliases = {7: 0} if so_far is not None and target.platform() == "tpu" else {}
    blocks: Any = {"streamed": streamed, "others": others, "outputs": outputs, "scratch": scratch, "aliases": aliases}
    call = forward.kernel_call(_KERNELS[name], case, tile, f"head_{title}_gradient", inputs, options, **blocks)
    result = call["gradient"]
    return result if result.shape == side.shape or case.by_rows else result.T


def hidden_gradient_from_mean(
    inputs: Inputs,
    options: Options,
    softmax: Softmax,
    slopes: Slopes,
    share: Float[Array, "N"],
    mean: Float[Array, "N D"],
) -> Float[Array, "N D"]:
    """dh, float32, where the loss doesn't depend on the entropy, from E_q[W] and the probability of its columns.

    The labels of `inputs` are negative where they are another shard's. The mean logit's part is a multiple of the sum
    of W's rows that are tokens, which is read once for it.
    """
    alone = slopes._replace(mean_logit=None)
    at_label = jnp.where(inputs.labels >= 0, label_slope(softmax, alone, inputs.temperature, options.softcap), 0)
    at_mean = share * (slopes.lse - slopes.logprob) / inputs.temperature
    dh = at_mean[:, None] * mean + at_label[:, None] * forward.label_rows(inputs.weight, inputs.labels, options.dtype)
    if slopes.mean_logit is None:
        return dh
    tokens = jnp.arange(len(inputs.weight)) < number_of_columns(inputs)
    sum_D = jnp.where(tokens[:, None], as_operand(inputs.weight, options.dtype), 0).sum(axis=0)
    return dh + (slopes.mean_logit / inputs.temperature)[:, None] * sum_D
