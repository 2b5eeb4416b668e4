"""The backward kernels for TPUs: dW and dh from logits that are computed again, dW from exponentials that were kept.

dW's kernel sums a tile in float32 on the chip while the blocks of hidden states pass by. It works on y transposed,
W hᵀ, so that dW = dyᵀ h needs no transpose. dh's mirrors the forward kernel. With what was kept, dW is the third
product of the single pass.

Suffixes as in `forward.py`. With p = exp(log p), log p = scale (y - top) - log_sum_e, all kernels compute dy, the
derivatives by products, as `RowFactors` says; `top` is the maximum of y over the whole vocabulary.
"""

import dataclasses
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
from ..softmax import FLOOR, RowFactors, Slopes, Softmax, cap_slope, label_slope
from . import forward
from .forward import LOG2E, SUBLANES, KeptExponentials, Output
from .tiles import LANES, KernelName, Tiles, case_of


def _number_of_factors(options: Options) -> int:
    return len(RowFactors._fields) - (options.mean_over is None)


def _weight_kernel(*refs: Any, tile: Tiles, options: Options) -> None:
    ints, scales, hidden, weight, labels, factors, out, scratch = refs
    j, i = pl.program_id(0), pl.program_id(1)
    step, dtype = tile.step, options.dtype

    @pl.when(i == 0)
    def _() -> None:
        scratch["sum"][...] = jnp.zeros(scratch["sum"].shape, jnp.float32)
        if "weight" in scratch:
            forward.load_tile(scratch["weight"], weight)

    @pl.when(i * tile.rows < ints[0])
    def _() -> None:
        h_RD, w_TD = scratch.get("hidden", hidden), scratch.get("weight", weight)
        if "hidden" in scratch:
            h_RD[...] = hidden[...].astype(dtype)
        factors_1R = RowFactors(*(factors[pl.ds(n, 1), :] for n in range(_number_of_factors(options))))

        def products(s: int) -> Float[Array, "S R"]:
            return dot(w_TD[pl.ds(s * step, step), :], h_RD[...], (1, 1), dtype)

        for s, product_SR in one_ahead(products, tile.columns // step):
            y_SR = capped(product_SR, options.softcap)
            column_SR = lax.broadcasted_iota(jnp.int32, y_SR.shape, 0)
            hit_SR = column_SR == labels[...] - (j * tile.columns + s * step)
            dy_SR = _dy(y_SR, hit_SR, scales[0], factors_1R, options)
            scratch["sum"][pl.ds(s * step, step), :] += dot(dy_SR.astype(dtype), h_RD[...], (1, 0), dtype)

    _store_weight_gradient(ints, tile, out, scratch)


def _store_weight_gradient(ints: Any, tile: Tiles, out: Any, scratch: Any) -> None:
    """Writes a tile's sum after the last block of rows; rows of W that are no tokens get 0, whatever their dy was."""
    j, i = pl.program_id(0), pl.program_id(1)

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        forward.zero_tail(scratch["sum"], ints[1] - j * tile.columns, (j + 1) * tile.columns > ints[1])
        forward.store_tile(out["gradient"], scratch["sum"])


def _hidden_kernel(*refs: Any, tile: Tiles, options: Options) -> None:
    ints, scales, hidden, weight, labels, factors, out, scratch = refs
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
            y_RS = jnp.where(column_RS < ints[1] - first, y_RS, FLOOR)
            hit_RS = column_RS == forward.lanes(scratch["label"][...] - first, step)
            numbers = range(_number_of_factors(options))
            factors_RS = RowFactors(*(forward.lanes(scratch["factors"][n], step) for n in numbers))
            dy_RS = _dy(y_RS, hit_RS, scales[0], factors_RS, options)
            if options.mean_over is not None:
                dy_RS = jnp.where(y_RS == FLOOR, 0, dy_RS)
            scratch["sum"][...] += dot(dy_RS.astype(dtype), w_TD[pl.ds(s * step, step), :], (1, 0), dtype)

        @pl.when(j == last)
        def _() -> None:
            out["gradient"][...] = scratch["sum"][...].astype(out["gradient"].dtype)


def _dy(y: Array, hit: Array, scale: Array, factors: RowFactors, options: Options) -> Array:
    if options.entropy_slopes:
        log_p = (y - factors.top) * scale - factors.log_sum_e
        dy = jnp.exp2(log_p * LOG2E) * (factors.at_p + factors.at_p_log_p * log_p)
    else:
        dy = jnp.exp2((y - factors.top) * (scale * LOG2E)) * (factors.at_p * jnp.exp2(-factors.log_sum_e * LOG2E))
    if options.mean_over is not None:
        dy += factors.at_all
    if options.softcap is not None:
        dy *= cap_slope(y)
    return jnp.where(hit, factors.at_label, dy)


def _kept_kernel(*refs: Any, tile: Tiles, options: Options) -> None:
    ints, scales, hidden, kept, kept_top, labels, factors, *so_far, out, scratch = refs
    j, i = pl.program_id(0), pl.program_id(1)
    columns, step, dtype = tile.columns, tile.step, options.dtype

    @pl.when(i == 0)
    def _() -> None:
        if so_far:
            forward.load_tile(scratch["sum"], so_far[0])
        else:
            scratch["sum"][...] = jnp.zeros(scratch["sum"].shape, jnp.float32)

    @pl.when(i * tile.rows < ints[0])
    def _() -> None:
        h_RD = scratch.get("hidden", hidden)
        if "hidden" in scratch:
            h_RD[...] = hidden[...].astype(dtype)
        row_1R = RowFactors(*(factors[pl.ds(n, 1), :] for n in range(_number_of_factors(options))))
        for s in range(columns // step):
            then_1R = kept_top[pl.ds(s, 1), :]
            factor_1R = row_1R.at_p * jnp.exp2(((then_1R - row_1R.top) * scales[0] - row_1R.log_sum_e) * LOG2E)
            e_SR = kept[pl.ds(s * step, step), :].astype(jnp.float32)
            column_SR = lax.broadcasted_iota(jnp.int32, e_SR.shape, 0)
            hit_SR = column_SR == labels[...] - (j * columns + s * step)
            dy_SR = e_SR * factor_1R
            if options.mean_over is not None:
                dy_SR += row_1R.at_all
            dy_SR = jnp.where(hit_SR, row_1R.at_label, dy_SR)
            scratch["sum"][pl.ds(s * step, step), :] += dot(dy_SR.astype(dtype), h_RD[...], (1, 0), dtype)

    _store_weight_gradient(ints, tile, out, scratch)


def one_ahead(products: Callable[[int], Any], steps: int) -> Iterator[tuple[int, Any]]:
    """The number of each step and its products; those of the next step are begun before."""
    following = products(0)
    for s in range(steps):
        own = following
        if s + 1 < steps:
            following = products(s + 1)
        yield s, own


_KERNELS: dict[str, Callable[..., None]] = {"hidden": _hidden_kernel, "weight": _weight_kernel, "kept": _kept_kernel}


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
    to, own = forward.tile_of_rows(side, shape[0], lambda *step: step[0])
    if case.by_rows:
        to, own = side, pl.BlockSpec(shape, lambda i, *_: (i, 0))
    # The factors as rows of one array, padded to whole sublanes.
    given = jax.tree.leaves(factors)
    factors_8M = jnp.stack(given + [jnp.zeros_like(factors.top)] * (SUBLANES - len(given)))
    others = [(factors_8M, forward.block_spec(case, tile, (SUBLANES, tile.rows), lambda i, j: (0, i), live=True))]
    streamed, scratch = [], {"sum": pltpu.VMEM(shape, jnp.float32)}
    if name == "hidden":
        scratch["label"] = pltpu.VMEM((tile.rows, LANES), jnp.int32)
        scratch["factors"] = pltpu.VMEM((len(given), tile.rows, LANES), jnp.float32)
    if kept is not None:
        for array, height in ((kept.exponential, tile.columns), (kept.top, SUBLANES)):
            spec = forward.block_spec(case, tile, (height, tile.rows), lambda i, j: (j, i), live=True)
            streamed.append((array, spec))
    if so_far is not None:
        case = dataclasses.replace(case, gradient=so_far.dtype)
        others.append(forward.tile_of_rows(so_far, tile.columns, lambda *step: step[0]))
    found = forward.kernel_call(
        _KERNELS[name],
        case,
        tile,
        f"head_{'kept_weight' if name == 'kept' else name}_gradient",
        inputs,
        inputs.live.sum(dtype=jnp.int32),
        options,
        streamed=streamed,
        others=others,
        outputs={"gradient": Output(to.shape, case.gradient, own)},
        scratch=scratch,
        # The interpreter, off the TPU, returns an aliased output with the last tile's padding.
        aliases={7: 0} if so_far is not None and target.platform() == "tpu" else {},
    )["gradient"]
    return found if found.shape == side.shape or case.by_rows else found.T


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
    own = jnp.where(inputs.labels >= 0, label_slope(softmax, alone, inputs.temperature, options.softcap), 0)
    at_mean = share * (slopes.lse - slopes.logprob) / inputs.temperature
    dh = at_mean[:, None] * mean + own[:, None] * forward.label_rows(inputs.weight, inputs.labels, options.dtype)
    if slopes.mean_logit is None:
        return dh
    tokens = jnp.arange(len(inputs.weight)) < number_of_columns(inputs)
    sum_D = jnp.where(tokens[:, None], as_operand(inputs.weight, options.dtype), 0).sum(axis=0)
    return dh + (slopes.mean_logit / inputs.temperature)[:, None] * sum_D
