"""The head with a teacher on TPUs: Pallas kernels that see both models' logits a tile at a time.

A block of both models' hidden states stays on the chip while tiles of both weights pass by, as in `forward.py` with y
transposed. One kernel body has three ends, each of which takes 1 + r matrix products of 2 N V D flops, r = E / D:

    statistics  the running sums of `RunningPair`, of each sublane's columns on their own
    mixture     jsd and KL(p || m), which need both normalisers
    slopes      dy, the derivatives by the student's products, of a chunk of the vocabulary's columns

XLA multiplies a chunk's dy by the weight and by hidden states. Logits aren't kept, since that gains nothing
(docs/log.md, 2026-11-26). A workspace makes chunks wider, so that rows are gathered, and the float32 sums of dh read
and written, less often; not wider than the sum of a chunk's dW stays on the chip.

Suffixes as in `forward.py`, but T columns of a chunk; E the teacher's features.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import contract
from ..contract import Gradients, Inputs, Options, capped, dot, number_of_columns
from ..live_rows import LiveRows, live_rows, write
from ..shapes import Array, Float, Integer
from ..softmax import FLOOR, Columns, Running, Slopes, Softmax, cap_slope, logit_slopes
from ..two_softmaxes import (
    RunningPair,
    both_log_p,
    combine_pairs,
    divergence_slopes,
    finish_pair,
    include_tiles,
    mixture_terms,
)
from ..xla import add_rows, product
from . import forward as head
from . import tiles
from .backward import one_ahead
from .forward import SUBLANES, Given, Output
from .tiles import Case, Tiles

_MIB = 2**20
_ROOM, _MOST_ROOM = 40 * _MIB, 80 * _MIB  # bytes of a chunk's arrays: without a workspace, and at most
_SOFTMAX, _VECTORS = 8, 2 * SUBLANES  # the statistics of a row that slopes need, and all of its numbers

Part = Literal["statistics", "mixture", "slopes"]


class Plan(NamedTuple):
    case: Case
    tile: Tiles
    rows: int  # of one call of a kernel
    chunk: int  # columns of a chunk: whole tiles, or all


def forward(inputs: Inputs, options: Options) -> Softmax:
    """The statistics of all rows: 1 + r matrix products, 2 + 2 r for jsd."""
    plan, axis, scales = make_plan(inputs, options), options.vocabulary_axis, contract.scales_of(inputs, options)
    measure, live = options.divergence, live_rows(inputs.live, plan.rows)

    def over(i: Array, all_M: Softmax) -> Softmax:
        part, _ = _block(inputs, live, plan, i)
        sums = _call("statistics", part, options, plan).reshape(-1, SUBLANES, plan.rows)
        running = combine_pairs(_running(sums, options), scales, measure)
        softmax = finish_pair(running, part.live, scales, measure, axis, options.mean_over)
        if not measure.in_one_pass:
            sums_2R = _call("mixture", part, options, plan, softmax).reshape(2, SUBLANES, -1).sum(axis=1)
            divergence, to_mixture = jnp.where(part.live, sums_2R if axis is None else lax.psum(sums_2R, axis), 0)
            softmax = softmax._replace(divergence=divergence, to_mixture=to_mixture)
        return write(all_M, softmax, i * plan.rows)

    nothing = contract.no_statistics(inputs, options, len(live.row))
    return jax.tree.map(lambda x: x[live.place], live.over_blocks(plan.rows, over, nothing, options.in_step))


def gradients(inputs: Inputs, softmax: Softmax, slopes: Slopes, options: Options) -> Gradients:
    """The student's gradients from logits that are computed again: 3 + r matrix products, 2 + r for one alone."""
    plan = make_plan(inputs, options)
    live = live_rows(inputs.live, plan.rows)
    columns = min(len(inputs.weight), len(_teacher(inputs).weight))

    def chunk(c: Array | int, width: int, carry: Any) -> Any:
        dh_MD, dw_VD = carry
        first = jnp.int32(c) * plan.chunk

        def over(i: Array, carry: Any) -> Any:
            dh_MD, dw_TD = carry
            part, row_R = _block(inputs, live, plan, i)
            softmax_R, slopes_R = jax.tree.map(lambda x: x[row_R], (softmax, slopes))
            slopes_R = jax.tree.map(lambda x: jnp.where(part.live, x, 0), slopes_R)
            dy_TR = _call("slopes", part, options, plan, softmax_R, slopes_R, first, width)
            if options.wants_hidden:
                w_TD = lax.dynamic_slice_in_dim(inputs.weight, first, width)
                dh_MD = add_rows(dh_MD, product(options, dy_TR, w_TD, (0, 0)), i * plan.rows)
            if options.wants_weight:
                dw_TD += product(options, dy_TR, part.hidden, (1, 0))
            return dh_MD, dw_TD

        dw_TD = contract.zeros(inputs, width, features) if options.wants_weight else None
        dh_MD, dw_TD = live.over_blocks(plan.rows, over, (dh_MD, dw_TD))
        return dh_MD, None if dw_TD is None else lax.dynamic_update_slice_in_dim(
            dw_VD, dw_TD.astype(dw_dtype), first, 0
        )

    vocabulary, features = inputs.weight.shape
    dh_dtype, dw_dtype = contract.gradient_dtypes(inputs, options)
    dh_MD = contract.zeros(inputs, len(live.row), features) if options.wants_hidden else None
    dw = contract.zeros(inputs, vocabulary, features, dtype=dw_dtype) if options.wants_weight else None
    count, remainder = divmod(columns, plan.chunk)
    carry = lax.fori_loop(0, count, lambda c, carry: chunk(c, plan.chunk, carry), (dh_MD, dw))
    dh_MD, dw = chunk(count, remainder, carry) if remainder else carry
    dh = None if dh_MD is None else jnp.where(inputs.live[:, None], dh_MD[live.place], 0).astype(dh_dtype)
    return dh, dw


def make_plan(inputs: Inputs, options: Options) -> Plan:
    """The plan; a ValueError says why no tiles fit."""
    (vocabulary, features), teacher = inputs.weight.shape, _teacher(inputs)
    vocabulary, features_of_both = min(vocabulary, len(teacher.weight)), features + teacher.weight.shape[1]

    def stored(*arrays: Array) -> jnp.dtype:
        """The dtype of an array where it isn't the products', else the products'."""
        return next((x.dtype for x in arrays if x.dtype != options.dtype), options.dtype)

    hidden, weight = stored(inputs.hidden, teacher.hidden), stored(inputs.weight, teacher.weight)
    tokens, product = len(inputs.labels), options.dtype
    case = Case("pair", tokens, vocabulary, features_of_both, hidden, weight, product, product)
    tile = tiles.choose(case)
    rows = tiles.call_rows(tokens, features_of_both, tile)
    room = _MOST_ROOM if options.workspace is None else min(_ROOM + options.workspace, _MOST_ROOM)
    a_column = rows * product.itemsize + features * (4 + 2 * product.itemsize)  # dy; dW and its sum, and the weight
    return Plan(case, tile, rows, min(vocabulary, max(1, room // a_column // tile.columns) * tile.columns))


def _teacher(inputs: Inputs) -> contract.Teacher:
    assert inputs.teacher is not None
    return inputs.teacher


def _block(inputs: Inputs, live: LiveRows, plan: Plan, i: Array) -> tuple[Inputs, Integer[Array, "R"]]:
    """The inputs of a block's rows, the rows that count first, and where the rows are among all."""
    (row_R, live_R), teacher = live.block(i, plan.rows), _teacher(inputs)
    local = inputs._replace(labels=contract.local_labels(inputs))
    columns = jnp.minimum(number_of_columns(inputs), len(teacher.weight))
    return local.each_row(lambda x: x[row_R])._replace(live=live_R, columns=columns), row_R


def _running(sums: Float[Array, "_ 8 R"], options: Options) -> RunningPair:
    student = Running(*sums[:4], sum_y=None if options.mean_over is None else sums[7])  # type: ignore[misc]
    return RunningPair(student, Running(*sums[4:6]), sums[6])


# --- the kernels --------------------------------------------------------------------------------------------------


def _call(
    part: Part,
    student: Inputs,
    options: Options,
    plan: Plan,
    softmax: Softmax | None = None,
    slopes: Slopes | None = None,
    first: Any = 0,
    width: int | None = None,
) -> Float[Array, "_ R"]:
    """A kernel's result for the `width` columns from `first` on (whole tiles): sums of each sublane's columns, or dy.

    In blocks past the rows that count, dy is 0.
    """
    (case, tile, rows, _), teacher = plan, _teacher(student)
    width = case.vocabulary if width is None else width
    across = pl.cdiv(width, tile.columns)
    spec = functools.partial(head.block_spec, case, tile)

    def of_weight(model: Any) -> Given:
        last = pl.cdiv(len(model.weight), tile.columns) - 1

        def index(i: Any, j: Any, ints: Any, _: Any) -> Any:  # past the rows that count, nothing is fetched
            return jnp.minimum(ints[2] + jnp.where(i * tile.rows < ints[0], j, across - 1), last)

        return head.tile_of_rows(model.weight, tile.columns, index)

    zeros_R = contract.zeros(student, rows)
    numbers = [zeros_R] * _SOFTMAX if softmax is None else [*softmax[:_SOFTMAX]]
    if slopes is not None:
        numbers += [zeros_R if x is None else x / student.temperature for x in slopes]
    numbers += [zeros_R] * (_VECTORS - len(numbers))
    features = teacher.hidden.shape[1]
    others = [
        (teacher.hidden, spec((tile.rows, features), lambda i, j: (i, 0), live=True)),
        of_weight(teacher),
        (jnp.stack(numbers), spec((_VECTORS, tile.rows), lambda i, j: (0, i), live=True)),
    ]
    if part == "slopes":
        out = Output((width, rows), case.product, spec((tile.columns, tile.rows), lambda i, j: (j, i)))
    else:
        sums = 2 if part == "mixture" else 7 + (options.mean_over is not None)
        height = SUBLANES * sums
        out = Output((height, rows), jnp.float32, spec((height, tile.rows), lambda i, j: (0, i)))
    scratch = {}
    if case.hidden != case.product:
        scratch["teacher_hidden"] = pltpu.VMEM((tile.rows, features), case.product)
    if case.weight != case.product or tiles.turned(features):
        scratch["teacher_weight"] = pltpu.VMEM((tile.columns, features), case.product)
    chunk = jax.ShapeDtypeStruct((width, student.weight.shape[1]), student.weight.dtype)  # `streamed` is in its place
    columns = jnp.clip(number_of_columns(student) - first, 0, width)
    of_chunk = student._replace(weight=chunk, columns=columns)  # type: ignore[arg-type]
    kernel, more = functools.partial(_kernel, part=part), [jnp.int32(first // tile.columns)]
    blocks: Any = {"streamed": [of_weight(student)], "others": others, "outputs": {"result": out}, "scratch": scratch}
    return head.kernel_call(kernel, case, tile, f"head_pair_{part}", of_chunk, options, more=more, **blocks)["result"]


def _kernel(*refs: Any, tile: Tiles, options: Options, part: Part) -> None:
    ints, scale, hidden, weight, labels, teacher_hidden, teacher_weight, vectors, outputs, scratch = refs
    i, j, measure = pl.program_id(0), pl.program_id(1), options.divergence
    rows, step, dtype, out = tile.rows, tile.step, options.dtype, outputs["result"]
    counts, scales = i * rows < ints[0], (scale[0], scale[1])

    @pl.when((j == 0) | jnp.logical_not(counts))
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)
        if part == "statistics":
            for n in (0, 4):  # the maxima
                out[pl.ds(n * SUBLANES, SUBLANES), :] = jnp.full((SUBLANES, rows), FLOOR, out.dtype)

    @pl.when(counts)
    def compute() -> None:
        sides = {"hidden": hidden, "weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
        for name in [name for name in sides if name in scratch]:

            @pl.when((j == 0) | name.endswith("weight"))
            def cast(name: str = name) -> None:
                if name.endswith("weight"):
                    head.load_tile(scratch[name], sides[name])
                else:
                    scratch[name][...] = sides[name][...].astype(dtype)

        h_RD, w_TD, h_RE, w_TE = (scratch.get(name, ref) for name, ref in sides.items())
        numbers = [vectors[pl.ds(n, 1), :] for n in range(_SOFTMAX + len(Slopes._fields))]
        softmax, slopes = Softmax(*numbers[:_SOFTMAX]), Slopes(*numbers[_SOFTMAX:])
        if options.mean_over is None:
            slopes = slopes._replace(mean_logit=None)

        def products(s: int) -> tuple[Float[Array, "C 8 R"], Float[Array, "C 8 R"]]:
            slab = pl.ds(s * step, step)
            student, teacher = (dot(w[slab, :], h[...], (1, 1), dtype) for w, h in ((w_TD, h_RD), (w_TE, h_RE)))
            y = capped(student, options.softcap), capped(teacher, options.teacher_softcap)
            return y[0].reshape(-1, SUBLANES, rows), y[1].reshape(-1, SUBLANES, rows)

        for s, y in one_ahead(products, tile.columns // step):
            column = functools.partial(lax.broadcasted_iota, jnp.int32, y[0].shape)
            column_C8R, start = SUBLANES * column(0) + column(1), j * tile.columns + s * step
            fresh_C8R = column_C8R < ints[1] - start
            label_1R = labels[...] - (ints[2] * tile.columns + start)
            columns = Columns(fresh_C8R, fresh_C8R & (column_C8R == label_1R))
            y = tuple(jnp.where(fresh_C8R, x, 0) for x in y)  # past the arrays' ends there may be NaN
            if part == "statistics":
                running = _running(out[...].reshape(-1, SUBLANES, rows), options)
                student, teacher, cross = include_tiles(running, y, columns, scales, measure, 0)
                sum_y = [] if student.sum_y is None else [student.sum_y]
                out[...] = jnp.concatenate([*student[:4], *teacher[:2], cross, *sum_y])
            elif part == "mixture":
                terms = mixture_terms(both_log_p(y, softmax, scales, 0), fresh_C8R, measure)
                out[...] += jnp.concatenate([term_C8R.sum(axis=0) for term_C8R in terms])
            else:
                dy_C8R = divergence_slopes(y, softmax, slopes.divergence, fresh_C8R, scales, measure, 0)
                if options.token_slopes or options.entropy_slopes:
                    entropy = options.entropy_slopes
                    dy_C8R += logit_slopes(y[0], softmax, slopes, columns, scales[0], entropy=entropy, dim=0)
                if options.softcap is not None:
                    dy_C8R *= cap_slope(y[0])
                out[pl.ds(s * step, step), :] = dy_C8R.reshape(step, rows).astype(dtype)
