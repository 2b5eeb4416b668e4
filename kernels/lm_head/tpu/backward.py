"""The backward kernels for TPUs: dW and dh from logits that are computed again, dW from exponentials that were kept.

`weight_gradient` sums a tile of dW in float32 on the chip while the blocks of hidden states pass by. It works on y
transposed, W hᵀ, so that dW = dyᵀ h needs no transpose. `hidden_gradient` mirrors the forward kernel.
`kept_weight_gradient` is the third product of the single pass.

Suffixes as in `forward.py`. With p = exp(log p), log p = (y - top) / temperature - log_sum_e, all kernels compute dy as
`RowFactors` says; `top` is the maximum of y over the whole vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Integer

from kernels.lm_head import target
from kernels.lm_head.contract import Inputs, Options, dot, gradient_dtypes
from kernels.lm_head.softmax import FLOOR, RowFactors, Softmax, TokenLogprobs, label_slope
from kernels.lm_head.tpu.forward import (
    LOG2E,
    SUBLANES,
    KeptExponentials,
    cap_slope,
    kernel_call,
    label_rows,
    lanes,
    live_block,
    live_tile,
    operands,
    scalars,
    to_lanes,
    zero_tail,
)
from kernels.lm_head.tpu.tiles import LANES, Tiles, case_of

_FACTORS = len(RowFactors._fields)


def weight_gradient(
    inputs: Inputs, number: Integer[Array, ""], factors: RowFactors, options: Options, tile: Tiles
) -> Float[Array, "V D"]:
    """dW from the rows [0, number); in later rows of their last block, factors must make every probability 0."""
    hidden, weight, dtype = inputs.hidden, inputs.weight, options.dtype
    blocks, features = len(hidden) // tile.rows, hidden.shape[1]
    row_block = live_block(tile)
    return kernel_call(
        functools.partial(
            _weight_kernel, tile=tile, softcap=options.softcap, dtype=dtype, entropy=options.entropy_slopes
        ),
        case_of(inputs, options, "weight"),
        tile,
        "head_weight_gradient",
        out_shape=_typed(inputs, weight.shape, gradient_dtypes(inputs, options)[1]),
        grid=(pl.cdiv(len(weight), tile.columns), blocks),
        in_specs=[
            pl.BlockSpec((tile.rows, features), lambda j, i, ints, _: (row_block(i, ints), 0)),
            pl.BlockSpec((tile.columns, features), lambda j, i, *_: (j, 0)),
            pl.BlockSpec((1, tile.rows), lambda j, i, ints, _: (0, row_block(i, ints))),
            pl.BlockSpec((SUBLANES, tile.rows), lambda j, i, ints, _: (0, row_block(i, ints))),
        ],
        out_specs=pl.BlockSpec((tile.columns, features), lambda j, i, *_: (j, 0)),
        scratch={"sum": pltpu.VMEM((tile.columns, features), jnp.float32)}
        | operands(tile, features, hidden.dtype, weight.dtype, dtype),
    )(*scalars(inputs, number), hidden, weight, inputs.labels[None], _packed(factors))


def _weight_kernel(*refs: Any, tile: Tiles, softcap: float | None, dtype: jnp.dtype, entropy: bool) -> None:
    ints, scales, hidden, weight, labels, factors, out, scratch = refs
    j, i = pl.program_id(0), pl.program_id(1)
    step = tile.step

    @pl.when(i == 0)
    def _() -> None:
        scratch["sum"][...] = jnp.zeros(scratch["sum"].shape, jnp.float32)
        if "weight" in scratch:
            scratch["weight"][...] = weight[...].astype(dtype)

    @pl.when(i * tile.rows < ints[0])
    def _() -> None:
        h_RD, w_TD = scratch.get("hidden", hidden), scratch.get("weight", weight)
        if "hidden" in scratch:
            h_RD[...] = hidden[...].astype(dtype)
        factors_1R = RowFactors(*(factors[pl.ds(n, 1), :] for n in range(_FACTORS)))

        def products(s: int) -> Float[Array, "S R"]:
            return dot(w_TD[pl.ds(s * step, step), :], h_RD[...], (1, 1), dtype)

        y_next = products(0)
        for s in range(tile.columns // step):
            y_SR = y_next
            if s + 1 < tile.columns // step:
                y_next = products(s + 1)
            y_SR = y_SR if softcap is None else softcap * jnp.tanh(y_SR / softcap)
            column_SR = lax.broadcasted_iota(jnp.int32, y_SR.shape, 0)
            hit_SR = column_SR == labels[...] - (j * tile.columns + s * step)
            dy_SR = _dy(y_SR, hit_SR, scales[0], softcap, factors_1R, entropy)
            scratch["sum"][pl.ds(s * step, step), :] += dot(dy_SR.astype(dtype), h_RD[...], (1, 0), dtype)

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = scratch["sum"][...].astype(out.dtype)


def hidden_gradient(
    inputs: Inputs, number: Integer[Array, ""], factors: RowFactors, options: Options, tile: Tiles
) -> Float[Array, "M D"]:
    """dh of rows [0, number) from the columns of the vocabulary; undefined in other rows."""
    hidden, weight, dtype = inputs.hidden, inputs.weight, options.dtype
    features = hidden.shape[1]
    tiles_of_weight = pl.cdiv(len(weight), tile.columns)
    row_block = live_block(tile)
    return kernel_call(
        functools.partial(
            _hidden_kernel, tile=tile, softcap=options.softcap, dtype=dtype, entropy=options.entropy_slopes
        ),
        case_of(inputs, options, "hidden"),
        tile,
        "head_hidden_gradient",
        out_shape=_typed(inputs, hidden.shape, gradient_dtypes(inputs, options)[0]),
        grid=(len(hidden) // tile.rows, tiles_of_weight),
        in_specs=[
            pl.BlockSpec((tile.rows, features), lambda i, j, ints, _: (row_block(i, ints), 0)),
            pl.BlockSpec((tile.columns, features), live_tile(tile, tiles_of_weight)),
            pl.BlockSpec((1, tile.rows), lambda i, j, ints, _: (0, row_block(i, ints))),
            pl.BlockSpec((SUBLANES, tile.rows), lambda i, j, ints, _: (0, row_block(i, ints))),
        ],
        out_specs=pl.BlockSpec((tile.rows, features), lambda i, j, *_: (i, 0)),
        scratch={
            "sum": pltpu.VMEM((tile.rows, features), jnp.float32),
            "label": pltpu.VMEM((tile.rows, LANES), jnp.int32),
            "factors": pltpu.VMEM((_FACTORS, tile.rows, LANES), jnp.float32),
        }
        | operands(tile, features, hidden.dtype, weight.dtype, dtype),
    )(*scalars(inputs, number), hidden, weight, inputs.labels[None], _packed(factors))


def _hidden_kernel(*refs: Any, tile: Tiles, softcap: float | None, dtype: jnp.dtype, entropy: bool) -> None:
    ints, scales, hidden, weight, labels, factors, out, scratch = refs
    i, j = pl.program_id(0), pl.program_id(1)
    last = pl.num_programs(1) - 1
    step = tile.step

    @pl.when(i * tile.rows < ints[0])
    def _() -> None:
        @pl.when(j == 0)
        def _() -> None:
            scratch["sum"][...] = jnp.zeros(scratch["sum"].shape, jnp.float32)
            scratch["label"][...] = to_lanes(labels[...])
            for n in range(_FACTORS):
                scratch["factors"][n] = to_lanes(factors[pl.ds(n, 1), :])
            if "hidden" in scratch:
                scratch["hidden"][...] = hidden[...].astype(dtype)

        zero_tail(weight, ints[1] - j * tile.columns, j == last)
        h_RD, w_TD = scratch.get("hidden", hidden), scratch.get("weight", weight)
        if "weight" in scratch:
            w_TD[...] = weight[...].astype(dtype)

        def products(s: int) -> Float[Array, "R S"]:
            return dot(h_RD[...], w_TD[pl.ds(s * step, step), :], (1, 1), dtype)

        y_next = products(0)
        for s in range(tile.columns // step):
            y_RS = y_next
            if s + 1 < tile.columns // step:
                y_next = products(s + 1)
            y_RS = y_RS if softcap is None else softcap * jnp.tanh(y_RS / softcap)
            first = j * tile.columns + s * step
            column_RS = lax.broadcasted_iota(jnp.int32, y_RS.shape, 1)
            y_RS = jnp.where(column_RS < ints[1] - first, y_RS, FLOOR)
            hit_RS = column_RS == lanes(scratch["label"][...] - first, step)
            factors_RS = RowFactors(*(lanes(scratch["factors"][n], step) for n in range(_FACTORS)))
            dy_RS = _dy(y_RS, hit_RS, scales[0], softcap, factors_RS, entropy)
            scratch["sum"][...] += dot(dy_RS.astype(dtype), w_TD[pl.ds(s * step, step), :], (1, 0), dtype)

        @pl.when(j == last)
        def _() -> None:
            out[...] = scratch["sum"][...].astype(out.dtype)


def _dy(y: Array, hit: Array, scale: Array, softcap: float | None, factors: RowFactors, entropy: bool) -> Array:
    if entropy:
        log_p = (y - factors.top) * scale - factors.log_sum_e
        dy = jnp.exp2(log_p * LOG2E) * (factors.at_p + factors.at_p_log_p * log_p)
    else:
        dy = jnp.exp2((y - factors.top) * (scale * LOG2E)) * (factors.at_p * jnp.exp2(-factors.log_sum_e * LOG2E))
    if softcap is not None:
        dy *= cap_slope(y, softcap)
    return jnp.where(hit, factors.at_label, dy)


def kept_weight_gradient(
    inputs: Inputs,
    number: Integer[Array, ""],
    factors: RowFactors,
    options: Options,
    kept: KeptExponentials,
    so_far: Float[Array, "V D"] | None,
) -> Float[Array, "V D"]:
    """dW of a wave's rows [0, number) from kept exponentials; or that plus `so_far` (float32), in its memory."""
    hidden, dtype, tile = inputs.hidden, kept.exponential.dtype, kept.tile
    features, columns, row_block = hidden.shape[1], tile.columns, live_block(tile)
    dw_dtype = gradient_dtypes(inputs, options)[1] if so_far is None else so_far.dtype
    dw_tile = pl.BlockSpec((columns, features), lambda j, i, *_: (j, 0))
    return kernel_call(
        functools.partial(_kept_kernel, tile=tile, dtype=dtype),
        dataclasses.replace(case_of(inputs, options, "kept"), gradient=jnp.dtype(dw_dtype)),
        tile,
        "head_kept_weight_gradient",
        out_shape=_typed(inputs, inputs.weight.shape, dw_dtype),
        grid=(kept.exponential.shape[0] // columns, len(hidden) // tile.rows),
        in_specs=[
            pl.BlockSpec((tile.rows, features), lambda j, i, ints, _: (row_block(i, ints), 0)),
            pl.BlockSpec((columns, tile.rows), lambda j, i, ints, _: (j, row_block(i, ints))),
            pl.BlockSpec((SUBLANES, tile.rows), lambda j, i, ints, _: (j, row_block(i, ints))),
            pl.BlockSpec((1, tile.rows), lambda j, i, ints, _: (0, row_block(i, ints))),
            pl.BlockSpec((SUBLANES, tile.rows), lambda j, i, ints, _: (0, row_block(i, ints))),
            *([] if so_far is None else [dw_tile]),
        ],
        out_specs=dw_tile,
        scratch={"sum": pltpu.VMEM((columns, features), jnp.float32)}
        | operands(tile, features, hidden.dtype, dtype, dtype),
        # The interpreter, off the TPU, returns an aliased output with the last tile's padding.
        aliases={7: 0} if so_far is not None and target.platform() == "tpu" else {},
    )(
        *scalars(inputs, number),
        hidden,
        kept.exponential,
        kept.top,
        inputs.labels[None],
        _packed(factors),
        *([] if so_far is None else [so_far]),
    )


def _kept_kernel(*refs: Any, tile: Tiles, dtype: jnp.dtype) -> None:
    ints, scales, hidden, kept, kept_top, labels, factors, *so_far, out, scratch = refs
    j, i = pl.program_id(0), pl.program_id(1)
    columns = kept.shape[0]
    step = tile.step

    @pl.when(i == 0)
    def _() -> None:
        scratch["sum"][...] = so_far[0][...] if so_far else jnp.zeros(scratch["sum"].shape, jnp.float32)

    @pl.when(i * tile.rows < ints[0])
    def _() -> None:
        h_RD = scratch.get("hidden", hidden)
        if "hidden" in scratch:
            h_RD[...] = hidden[...].astype(dtype)
        top_1R, log_sum_e_1R, at_p_1R, _, at_label_1R = (factors[pl.ds(n, 1), :] for n in range(_FACTORS))
        for s in range(columns // step):
            then_1R = kept_top[pl.ds(s, 1), :]
            factor_1R = at_p_1R * jnp.exp2(((then_1R - top_1R) * scales[0] - log_sum_e_1R) * LOG2E)
            e_SR = kept[pl.ds(s * step, step), :].astype(jnp.float32)
            column_SR = lax.broadcasted_iota(jnp.int32, e_SR.shape, 0)
            hit_SR = column_SR == labels[...] - (j * columns + s * step)
            dy_SR = jnp.where(hit_SR, at_label_1R, e_SR * factor_1R)
            scratch["sum"][pl.ds(s * step, step), :] += dot(dy_SR.astype(dtype), h_RD[...], (1, 0), dtype)

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = scratch["sum"][...].astype(out.dtype)


def _typed(inputs: Inputs, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(inputs.hidden).manual_axis_type)


def _packed(factors: RowFactors) -> Float[Array, "8 M"]:
    """The factors as rows of one array, padded to whole sublanes."""
    return jnp.stack([*factors, *[jnp.zeros_like(factors.top)] * (SUBLANES - _FACTORS)])


def hidden_gradient_from_mean(
    inputs: Inputs,
    options: Options,
    softmax: Softmax,
    slopes: TokenLogprobs,
    share: Float[Array, "N"],
    mean: Float[Array, "N D"],
) -> Float[Array, "N D"]:
    """dh, float32, where the loss doesn't depend on the entropy, from E_q[W] and the probability of its columns.

    The labels of `inputs` are negative where they are another shard's.
    """
    own = jnp.where(inputs.labels >= 0, label_slope(softmax, slopes, inputs.temperature, options.softcap), 0)
    at_mean = share * (slopes.lse - slopes.logprob) / inputs.temperature
    return at_mean[:, None] * mean + own[:, None] * label_rows(inputs.weight, inputs.labels, options.dtype)
