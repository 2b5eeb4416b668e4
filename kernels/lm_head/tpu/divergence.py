"""Divergences of two heads on TPUs: Pallas kernels that see both models' logits a tile at a time, and their engine.

A block of both models' hidden states stays on the chip while tiles of both weights pass by, as in `forward.py` with y
transposed. One kernel body has three ends, each of which takes 1 + r matrix products of 2 N V D flops, r = E / D:

    statistics  the running sums of `RunningPair`, of each sublane's columns on their own
    mixture     jsd and KL(p || m), which need both normalisers
    slopes      dy, the derivatives by the student's products, of a chunk of the vocabulary's columns

XLA multiplies a chunk's dy by the weight and by hidden states. So the value takes 1 + r products, and twice as many for
jsd; loss and both gradients take 4 + 2 r, and 5 + 3 r for jsd. Logits aren't kept, whatever the workspace, since
that gains nothing (docs/log.md, 2026-11-26): it makes chunks wider, so that rows are gathered, and the float32 sums of
dh read and written, less often; not wider than the sum of a chunk's dW stays on the chip.

Maxima are in units of y, as in `forward.py`. Suffixes as there, but T columns of a chunk; E the teacher's features, 2
for student and teacher.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import contract, two_softmaxes
from ..contract import Gradients, Options, capped, dot, number_of_columns
from ..live_rows import LiveRows, live_rows, write
from ..shapes import Array, Float, Integer
from ..softmax import FLOOR
from ..two_softmaxes import Divergence, Pair, RunningPair, TwoSoftmaxes
from ..xla import add_rows, product
from . import forward as head
from . import tiles
from .backward import one_ahead
from .forward import SUBLANES, Given, Output
from .tiles import Case, Tiles

_MIB = 2**20
_ROOM, _MOST_ROOM = 40 * _MIB, 80 * _MIB  # bytes of a chunk's arrays: without a workspace, and at most
_PARTS = {"statistics": 5, "mixture": 2}  # sums of a row

Part = Literal["statistics", "mixture", "slopes"]


class _Plan(NamedTuple):
    case: Case
    tile: Tiles
    rows: int  # of one call of a kernel
    chunk: int  # columns of a chunk: whole tiles, or all


class _Block(NamedTuple):
    """Rows in the kernels' order."""

    pair: Pair  # of these rows alone
    number: Integer[Array, ""]  # how many of the rows count; they are the first
    row: Integer[Array, "R"]  # where they are among all rows


def obstacle(pair: Pair, options: Options) -> str | None:
    try:
        _plan(pair, options)
    except ValueError as error:
        return str(error)
    return None


def forward(pair: Pair, how: Divergence, options: Options) -> TwoSoftmaxes:
    """The statistics of all rows: 1 + r matrix products, 2 + 2 r for jsd."""
    plan, axis, scale = _plan(pair, options), options.vocabulary_axis, 1 / pair.student.temperature
    live = live_rows(pair.student.live, plan.rows)

    def over(i: Array, all_M: TwoSoftmaxes) -> TwoSoftmaxes:
        block = _block(pair, live, plan, i)
        live_R = block.pair.student.live
        sums_58R = _call("statistics", block, how, options, plan).reshape(5, SUBLANES, -1)
        running = two_softmaxes.combine_all(_running(sums_58R), how, scale)
        found = two_softmaxes.finish(running, live_R, how, axis, scale)
        if not how.in_one_pass:
            sums_2R = _call("mixture", block, how, options, plan, found).reshape(2, SUBLANES, -1).sum(axis=1)
            divergence, to_mixture = jnp.where(live_R, sums_2R if axis is None else lax.psum(sums_2R, axis), 0)
            found = found._replace(divergence=divergence, to_mixture=to_mixture)
        return write(all_M, found, i * plan.rows)

    nothing = TwoSoftmaxes(*(contract.zeros(pair.student, len(live.row)) for _ in TwoSoftmaxes._fields))
    return jax.tree.map(lambda x: x[live.place], live.over_blocks(plan.rows, over, nothing, options.in_step))


def gradients(
    pair: Pair, found: TwoSoftmaxes, slopes: Float[Array, "N"], how: Divergence, options: Options
) -> Gradients:
    """The student's gradients from logits that are computed again: 3 + r matrix products, 2 + r for one alone."""
    plan, student = _plan(pair, options), pair.student
    live = live_rows(student.live, plan.rows)

    def chunk(c: Array | int, width: int, carry: Any) -> Any:
        dh_MD, dw_VD = carry
        first = jnp.int32(c) * plan.chunk

        def over(i: Array, carry: Any) -> Any:
            dh_MD, dw_TD = carry
            block = _block(pair, live, plan, i)
            found_R, slopes_R = jax.tree.map(lambda x: x[block.row], (found, slopes))
            slopes_R = jnp.where(block.pair.student.live, slopes_R, 0)
            dy_TR = _call("slopes", block, how, options, plan, found_R, slopes_R, first, width)
            if options.wants_hidden:
                w_TD = lax.dynamic_slice_in_dim(student.weight, first, width)
                dh_MD = add_rows(dh_MD, product(options, dy_TR, w_TD, (0, 0)), i * plan.rows)
            if options.wants_weight:
                dw_TD += product(options, dy_TR, block.pair.student.hidden, (1, 0))
            return dh_MD, dw_TD

        dw_TD = contract.zeros(student, width, features) if options.wants_weight else None
        dh_MD, dw_TD = live.over_blocks(plan.rows, over, (dh_MD, dw_TD))
        return dh_MD, None if dw_TD is None else lax.dynamic_update_slice_in_dim(
            dw_VD, dw_TD.astype(dw_dtype), first, 0
        )

    vocabulary, features = student.weight.shape
    dh_dtype, dw_dtype = contract.gradient_dtypes(student, options)
    dh_MD = contract.zeros(student, len(live.row), features) if options.wants_hidden else None
    dw = contract.zeros(student, vocabulary, features, dtype=dw_dtype) if options.wants_weight else None
    whole, rest = divmod(vocabulary, plan.chunk)
    carry = lax.fori_loop(0, whole, lambda c, carry: chunk(c, plan.chunk, carry), (dh_MD, dw))
    dh_MD, dw = chunk(whole, rest, carry) if rest else carry
    dh = None if dh_MD is None else jnp.where(student.live[:, None], dh_MD[live.place], 0).astype(dh_dtype)
    return dh, dw


def loss_and_gradients(
    pair: Pair, weights: Float[Array, "N"], how: Divergence, options: Options
) -> tuple[TwoSoftmaxes, Gradients]:
    """The statistics, and the gradients of the divergences' weighted sum: 4 + 2 r matrix products, 5 + 3 r for jsd."""
    found = forward(pair, how, options.values_alone)
    return found, gradients(pair, found, weights, how, options)


def _plan(pair: Pair, options: Options) -> _Plan:
    (vocabulary, features), teachers = pair.student.weight.shape, pair.teacher.weight.shape[1]

    def stored(*arrays: Array) -> jnp.dtype:
        """The dtype of one that isn't the products', if there is one."""
        return next((x.dtype for x in arrays if x.dtype != options.dtype), options.dtype)

    hidden, weight = (stored(*x) for x in zip(*((x.hidden, x.weight) for x in pair), strict=True))
    tokens, product = len(pair.student.labels), options.dtype
    case = Case("pair", tokens, vocabulary, features + teachers, hidden, weight, product, product)
    tile = tiles.choose(case)
    rows = tiles.call_rows(tokens, features + teachers, tile)
    room = _MOST_ROOM if options.workspace is None else min(_ROOM + options.workspace, _MOST_ROOM)
    a_column = rows * product.itemsize + features * (4 + 2 * product.itemsize)  # dy; dW and its sum, and the weight
    return _Plan(case, tile, rows, min(vocabulary, max(1, room // a_column // tile.columns) * tile.columns))


def _block(pair: Pair, live: LiveRows, plan: _Plan, i: Array) -> _Block:
    row_R, live_R = live.block(i, plan.rows)
    columns = jnp.minimum(*map(number_of_columns, pair))

    def of_rows(model: contract.Inputs) -> contract.Inputs:
        return model._replace(hidden=model.hidden[row_R], labels=model.labels[row_R], live=live_R, columns=columns)

    return _Block(Pair(*map(of_rows, pair)), jnp.clip(live.number - i * plan.rows, 0, plan.rows), row_R)


def _running(sums_58R: Float[Array, "5 8 R"]) -> RunningPair:
    return RunningPair(sums_58R[:2], sums_58R[2:4], sums_58R[4])


# --- the kernels --------------------------------------------------------------------------------------------------


def _call(
    part: Part,
    block: _Block,
    how: Divergence,
    options: Options,
    plan: _Plan,
    found: TwoSoftmaxes | None = None,
    slopes: Float[Array, "R"] | None = None,
    first: Any = 0,
    width: int | None = None,
) -> Float[Array, "_ R"]:
    """A kernel's result for the `width` columns from `first` on (whole tiles): sums of each sublane's columns, or dy.

    In blocks of rows past those that count, dy is 0.
    """
    (student, teacher), (case, tile, rows, _) = block.pair, plan
    width = len(student.weight) if width is None else width
    across = pl.cdiv(width, tile.columns)
    spec = functools.partial(head.block_spec, case, tile)

    def of_weight(model: contract.Inputs) -> Given:
        last = pl.cdiv(len(model.weight), tile.columns) - 1

        def place(i: Any, j: Any, ints: Any, _: Any) -> tuple[Any, Any]:  # past the rows that count, nothing is fetched
            return jnp.minimum(ints[2] + jnp.where(i * tile.rows < ints[0], j, across - 1), last), 0

        return model.weight, pl.BlockSpec((tile.columns, model.weight.shape[1]), place)

    zeros_R = contract.zeros(student, rows)
    found = TwoSoftmaxes(*[zeros_R] * 6) if found is None else found
    at_y_R = zeros_R if slopes is None else slopes / student.temperature
    features = teacher.hidden.shape[1]
    others = [
        (teacher.hidden, spec((tile.rows, features), lambda i, j: (i, 0), live=True)),
        of_weight(teacher),
        (jnp.stack([*found, at_y_R, zeros_R]), spec((SUBLANES, tile.rows), lambda i, j: (0, i), live=True)),
    ]
    if part == "slopes":
        out = Output((width, rows), case.product, spec((tile.columns, tile.rows), lambda i, j: (j, i)))
    else:
        height = SUBLANES * _PARTS[part]
        out = Output((height, rows), jnp.float32, spec((height, tile.rows), lambda i, j: (0, i)))
    scratch = {}
    if case.hidden != case.product:
        scratch["teacher_hidden"] = pltpu.VMEM((tile.rows, features), case.product)
    if case.weight != case.product:
        scratch["teacher_weight"] = pltpu.VMEM((tile.columns, features), case.product)
    chunk = jax.ShapeDtypeStruct((width, student.weight.shape[1]), student.weight.dtype)  # `streamed` is in its place
    columns = jnp.clip(number_of_columns(student) - first, 0, width)
    return head.kernel_call(
        functools.partial(_kernel, part=part, how=how),
        case,
        tile,
        f"head_pair_{part}",
        student._replace(weight=chunk, columns=columns),  # type: ignore[arg-type]
        block.number,
        options,
        streamed=[of_weight(student)],
        others=others,
        outputs={"result": out},
        scratch=scratch,
        more=[jnp.int32(first // tile.columns)],
    )["result"]


def _kernel(*refs: Any, tile: Tiles, options: Options, part: Part, how: Divergence) -> None:
    ints, scales, hidden, weight, _labels, teacher_hidden, teacher_weight, vectors, outputs, scratch = refs
    i, j = pl.program_id(0), pl.program_id(1)
    rows, step, dtype, out = tile.rows, tile.step, options.dtype, outputs["result"]
    counts = i * rows < ints[0]

    @pl.when((j == 0) | jnp.logical_not(counts))
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)
        maxima = jnp.full((2 * SUBLANES, rows), FLOOR if part == "statistics" else 0, out.dtype)
        out[pl.ds(0, 2 * SUBLANES), :] = maxima

    @pl.when(counts)
    def compute() -> None:
        given = {"hidden": hidden, "weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
        for name in [name for name in given if name in scratch]:

            @pl.when((j == 0) | name.endswith("weight"))
            def cast(name: str = name) -> None:
                scratch[name][...] = given[name][...].astype(dtype)

        h_RD, w_TD, h_RE, w_TE = (scratch.get(name, ref) for name, ref in given.items())
        of_row = [vectors[pl.ds(n, 1), :] for n in range(7)]
        found, at_y_1R = TwoSoftmaxes(*of_row[:6]), of_row[6]

        def products(s: int) -> Float[Array, "2 C 8 R"]:
            own = pl.ds(s * step, step)
            y = [dot(w[own, :], h[...], (1, 1), dtype) for w, h in ((w_TD, h_RD), (w_TE, h_RE))]
            return jnp.stack([capped(y_SR, options.softcap).reshape(-1, SUBLANES, rows) for y_SR in y])

        for s, y_2C8R in one_ahead(products, tile.columns // step):
            column = functools.partial(lax.broadcasted_iota, jnp.int32, y_2C8R.shape[1:])
            fresh_C8R = SUBLANES * column(0) + column(1) < ints[1] - (j * tile.columns + s * step)
            y_2C8R = jnp.where(fresh_C8R, y_2C8R, 0)  # past the arrays' ends there may be NaN
            if part == "statistics":
                running = _running(out[...].reshape(5, SUBLANES, rows))
                running = two_softmaxes.include_tile(running, y_2C8R, fresh_C8R, how, 1, scales[0])
                out[...] = jnp.concatenate([*running[:2], running.cross[None]]).reshape(out.shape)
            elif part == "mixture":
                log_p_2C8R = two_softmaxes.log_p(y_2C8R, found, 1, scales[0])
                terms = two_softmaxes.mixture_terms(log_p_2C8R, fresh_C8R, how)
                out[...] += jnp.concatenate([term_C8R.sum(axis=0) for term_C8R in terms])
            else:
                dy_C8R = two_softmaxes.logit_slopes(y_2C8R, found, at_y_1R, fresh_C8R, how, 1, scales[0])
                if options.softcap is not None:
                    dy_C8R *= head.cap_slope(y_2C8R[0], options.softcap)
                out[pl.ds(s * step, step), :] = dy_C8R.reshape(step, rows).astype(dtype)
