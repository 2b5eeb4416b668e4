"""Divergences of two heads on Hopper: the head's own kernels, and XLA's fusions of both models' logits between them.

The forward kernel keeps the logits of student and teacher: how far each is below its row's maximum in the tile, in
float16 (see forward.py). Statistics, divergences and slopes are all those of the logits that were rounded so: a
divergence is that of two softmaxes, never below 0, and equal models have equal logits. Logits further than 65504 below
their tile's maximum count as so far below.

With r = D_teacher / D, in matrix products of 2 N V D flops: waves, which keep all logits of some rows, take 3 + r in
all. Without room for them, logits of a chunk of columns are computed whenever they are read: statistics take 1 + r, jsd
as much again, and gradients 3 + r.

Suffixes: N rows, M those in the kernels' order, R of a wave or a block of them; V vocabulary, D features; C columns of
a chunk, U its tiles, T columns of a tile; 2 for student and teacher.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.lm_head import contract, two_softmaxes
from kernels.lm_head.contract import Gradients, Options
from kernels.lm_head.gpu import engine, tiles
from kernels.lm_head.gpu.backward import Block
from kernels.lm_head.gpu.forward import KeptLogits, Rows
from kernels.lm_head.gpu.forward import forward as forward_kernel
from kernels.lm_head.gpu.tiles import KEPT_DTYPE, Sizes, kept_bytes
from kernels.lm_head.live_rows import live_rows, round_up, write
from kernels.lm_head.two_softmaxes import Divergence, Pair, TwoSoftmaxes

_ROWS = 2048  # rows whose statistics are taken at a time, at most: so many hidden states of both models are gathered


def obstacle(pair: Pair, options: Options) -> str | None:
    of_student, of_teacher = (engine.obstacle(model, options) for model in pair)
    return of_student or (of_teacher and f"of the teacher, {of_teacher}")


def forward(pair: Pair, how: Divergence, options: Options) -> TwoSoftmaxes:
    """The statistics of all rows: 1 + r matrix products, or twice as many for jsd without room for logits."""
    return _by_rows(_plan(pair, how, options.values_alone), _of_common_tokens(pair), None, how, options.values_alone)[0]


def gradients(
    pair: Pair, found: TwoSoftmaxes, slopes: Float[Array, "N"], how: Divergence, options: Options
) -> Gradients:
    """The student's gradients by logits computed anew: 3 + r matrix products, 2 + r for one gradient alone."""
    return _anew(_of_common_tokens(pair), found, slopes, how, options, 0)


def loss_and_gradients(
    pair: Pair, weights: Float[Array, "N"], how: Divergence, options: Options
) -> tuple[TwoSoftmaxes, Gradients]:
    """The statistics, and the gradients of the divergences' weighted sum: 3 + r matrix products in waves."""
    plan, pair = _plan(pair, how, options), _of_common_tokens(pair)
    if plan.keep:
        return _by_rows(plan, pair, weights, how, options)
    found, _ = _by_rows(plan, pair, None, how, options)
    return found, _anew(pair, found, weights, how, options, _room(pair, options))


def _by_rows(
    plan: "_Plan", pair: Pair, weights: Float[Array, "N"] | None, how: Divergence, options: Options
) -> tuple[TwoSoftmaxes, Gradients]:
    """Statistics, and with `weights` the wanted gradients, of so many rows at a time as the plan says."""
    student = pair.student
    live = live_rows(student.live, plan.rows)
    (dh_dtype, dw_dtype), count = contract.gradient_dtypes(student, options), len(live.row)
    wants_hidden, wants_weight = (weights is not None and x for x in (options.wants_hidden, options.wants_weight))
    one = count == plan.rows
    sum_dtype = dw_dtype if one else jnp.dtype(jnp.float32)

    def wave(i: Array, carry: Any) -> Any:
        found_M, dh_MD, dw_VD = carry
        row_R, live_R = live.block(i, plan.rows)
        number = jnp.clip(live.number - i * plan.rows, 0, plan.rows)
        rows = _gathered(plan, pair, options, row_R, number)
        logits = _Logits(plan, pair, options, rows, _kept(plan, pair, options, rows) if plan.keep else None)
        found_R = two_softmaxes.statistics(plan.chunks, logits.of_chunk, live_R, how, options.vocabulary_axis)
        found_M = write(found_M, found_R, i * plan.rows)
        if weights is None:
            return found_M, dh_MD, dw_VD
        slopes_R = jnp.where(live_R, weights[row_R], 0)

        def dy(c: Array, *_: Any) -> Float[Array, "R C"]:
            return logits.product_slopes(c, found_R, slopes_R, how)

        spans = [engine.Span(0, plan.chunk, plan.chunks, dy)]
        dh_RD, dw_VD = engine.products_of_slopes(student, options, plan.sizes, rows[0], spans, dw_VD, add=not one)
        return found_M, None if dh_RD is None else write(dh_MD, dh_RD, i * plan.rows), dw_VD

    features = student.hidden.shape[1]
    carry = (
        TwoSoftmaxes(*(contract.zeros(student, count) for _ in TwoSoftmaxes._fields)),
        contract.zeros(student, count, features, dtype=dh_dtype) if wants_hidden else None,
        contract.zeros(student, *student.weight.shape, dtype=sum_dtype) if wants_weight else None,
    )
    # The host would have to wait for the device before each step of a loop whose length is found there.
    found_M, dh_MD, dw = wave(jnp.int32(0), carry) if one else live.over_blocks(plan.rows, wave, carry, options.in_step)
    dh = None if dh_MD is None else jnp.where(student.live[:, None], dh_MD[live.place], 0)
    return jax.tree.map(lambda x: x[live.place], found_M), (dh, None if dw is None else dw.astype(dw_dtype))


def _anew(
    pair: Pair, found: TwoSoftmaxes, slopes: Float[Array, "N"], how: Divergence, options: Options, room: int
) -> Gradients:
    """The wanted gradients by logits computed again, over chunks of columns and in each over blocks of rows."""
    student, plan = pair.student, _chunks(pair, len(pair.student.labels), room)
    sizes = plan.sizes
    live = live_rows(student.live, sizes.rows(len(student.labels)))
    # Not ahead of the statistics: so many hidden states would be there beside their logits.
    row_M, found = lax.optimization_barrier((live.row, found))
    rows = _gathered(plan, pair, options, row_M, live.number)
    found_M, slopes_M = jax.tree.map(lambda x: x[row_M], (found, slopes))
    slopes_M = jnp.where(rows[0].live, slopes_M, 0)
    size = sizes.block(len(live.row))

    def dy(c: Array, block: Block, *_: Any) -> Float[Array, "R C"]:
        def cut(x: Array, by: int = 1) -> Array:
            return lax.dynamic_slice_in_dim(x, block.first // by, size // by)

        def of_block(rows: Rows) -> Rows:
            h, labels, in_tile, live, _ = rows
            return Rows(cut(h), cut(labels), cut(in_tile, sizes.tiles.rows_each), cut(live), block.number)

        own = rows if size == len(live.row) else (of_block(rows[0]), of_block(rows[1]))
        logits = _Logits(plan, pair, options, own, None)
        return logits.product_slopes(c, jax.tree.map(cut, found_M), cut(slopes_M), how)

    dw_dtype = contract.gradient_dtypes(student, options)[1]
    dw = contract.zeros(student, *student.weight.shape, dtype=dw_dtype) if options.wants_weight else None
    spans = [engine.Span(0, plan.chunk, plan.chunks, dy)]
    dh, dw = engine.products_of_slopes(student, options, sizes, rows[0], spans, dw, add=False)
    return None if dh is None else jnp.where(student.live[:, None], dh[live.place], 0), dw


# --- logits -----------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """How rows and columns are divided."""

    sizes: Sizes
    rows: int  # rows of a wave, or of a block whose statistics are taken at a time
    chunk: int  # columns
    chunks: int  # their number, for all tokens that both models have
    keep: bool  # whether all logits of a wave are kept

    @property
    def bytes_a_row(self) -> int:
        """Bytes that the logits of a row take, of both models."""
        return 2 * kept_bytes(self.chunk * self.chunks, self.sizes.tiles)


def _plan(pair: Pair, how: Divergence, options: Options) -> _Plan:
    """Waves if there is room for them, and they take less time than logits computed again."""
    (student, features), (teacher, width) = (model.weight.shape for model in pair)
    sizes = tiles.choose(len(pair.student.labels), min(student, teacher), features)
    unit, rows = sizes.tiles.cluster_rows, sizes.rows(len(pair.student.labels))

    def within(room: int) -> _Plan:
        """Waves of the most rows whose logits are at most `room` bytes."""
        found = _waves(pair, min(rows, room // (2 * kept_bytes(min(student, teacher), sizes.tiles))))
        return found._replace(rows=min(room // found.bytes_a_row, rows, sizes.most_rows) // unit * unit)

    room = _room(pair, options)
    found, again, of_wave = within(room), options.wants_any + (not how.in_one_pass), 0.0
    if options.wants_weight and found.rows < rows:
        of_wave = sizes.wave_cost(cast=pair.student.weight.dtype != options.dtype)
        if contract.gradient_dtypes(pair.student, options)[1] != jnp.float32:
            # Several waves are summed in float32, which is no gradient then but one more array.
            found = within(max(0, (options.workspace or 0) - 4 * pair.student.weight.size))
    if found.rows and -(-rows // found.rows) * of_wave < rows * again * (1 + width / features):
        return found._replace(rows=round_up(-(-rows // -(-rows // found.rows)), unit))
    room = room if options.wants_any or options.workspace is not None else 0
    # XLA writes up to three float32 arrays of a chunk's size on the way to jsd's sums.
    return _chunks(pair, min(rows, _ROWS), room, 3 if how.in_one_pass else 8)


def _waves(pair: Pair, rows: int) -> _Plan:
    """Waves of so many rows, in chunks of nearly one size."""
    (student, features), (teacher, _) = (model.weight.shape for model in pair)
    return _even(min(student, teacher), tiles.choose(rows, min(student, teacher), features), rows, keep=True)


def _chunks(pair: Pair, rows: int, room: int, arrays: int = 3) -> _Plan:
    """Blocks of at most so many rows without kept logits, in chunks that take `room` bytes beyond the head's.

    The head has one array of a chunk's size, dy. `arrays` are such as there are here: by default dy and the logits of
    both models.
    """
    (student, features), (teacher, _) = (model.weight.shape for model in pair)
    common = min(student, teacher)
    size = tiles.choose(rows, common, features).block(rows)
    dy = tiles.dy_bytes(size, features)
    sizes = tiles.choose(rows, common, features, (room + dy) // arrays - dy)
    return _even(common, sizes, size, keep=False)


def _even(common: int, sizes: Sizes, rows: int, keep: bool) -> _Plan:
    chunk = round_up(-(-common // -(-common // sizes.chunk)), sizes.tiles.columns)
    return _Plan(sizes, rows, chunk, -(-common // chunk), keep)


def _room(pair: Pair, options: Options) -> int:
    """Bytes of the workspace; by default, of as many logits as the head keeps."""
    half = _waves(pair, tiles.choose(1, *pair.student.weight.shape).default_rows // 2)
    return half.rows * half.bytes_a_row if options.workspace is None else options.workspace


@dataclasses.dataclass(frozen=True)
class _Logits:
    """Both models' logits of R rows, a chunk at a time: those that were kept, or computed whenever they are read."""

    plan: _Plan
    pair: Pair
    options: Options
    rows: tuple[Rows, Rows]
    kept: tuple[KeptLogits, KeptLogits] | None

    def of_chunk(self, c: Array) -> tuple[Float[Array, "2 R C"], Bool[Array, "C"]]:
        """The logits of chunk c, and which of its columns count; 0 at rows and columns that don't."""
        student, (rows, _) = self.pair.student, self.rows
        fresh_C = c * self.plan.chunk + jnp.arange(self.plan.chunk) < contract.number_of_columns(student)

        def scaled(kept: KeptLogits) -> Float[Array, "R C"]:
            top_UR, below_RC = kept
            below_RUT = below_RC.reshape(len(below_RC), len(top_UR), -1).astype(jnp.float32)
            # Where no float16 is so low: finite.
            below_RUT = jnp.maximum(below_RUT, -float(jnp.finfo(KEPT_DTYPE).max)) / student.temperature
            z_RC = (below_RUT + top_UR.T[:, :, None]).reshape(below_RC.shape)
            return jnp.where(rows.live[:, None] & fresh_C, z_RC, 0)  # nothing was written elsewhere

        return jnp.stack([scaled(self._chunk(side, c)) for side in (0, 1)]), fresh_C

    def _chunk(self, side: int, c: Array) -> KeptLogits:
        model, rows, (sizes, _, size, *_) = self.pair[side], self.rows[side], self.plan
        if self.kept is not None:
            across = size // sizes.tiles.columns
            return engine.read_kept(self.kept[side], c, jnp.int32(0), (len(rows.labels), size), across)
        weight, chunk = engine.chunk_of(model, self.options, c * size, size)
        how: Any = {"size": size, "sizes": sizes, "softcap": self.options.softcap, "keep": True}
        return forward_kernel(rows, weight, chunk, model.temperature, **how)[1]  # type: ignore[return-value]

    def product_slopes(
        self, c: Array, found: TwoSoftmaxes, slopes: Float[Array, "R"], how: Divergence
    ) -> Float[Array, "R C"]:
        """The derivatives by the student's products, in the products' dtype."""
        temperature, softcap = self.pair.student.temperature, self.options.softcap
        z_2RC, fresh_C = self.of_chunk(c)
        dy_RC = two_softmaxes.logit_slopes(z_2RC, found, slopes / temperature, fresh_C, how)
        if softcap is not None:
            dy_RC *= 1 - (z_2RC[0] * temperature / softcap) ** 2
        return dy_RC.astype(self.options.dtype)


def _kept(plan: _Plan, pair: Pair, options: Options, rows: tuple[Rows, Rows]) -> tuple[KeptLogits, KeptLogits]:
    """All logits of the rows, in one kernel a model unless its weight has another dtype."""

    def of(side: int) -> KeptLogits:
        columns = 0, plan.chunk * plan.chunks, plan.chunk
        return engine.forward_over(pair[side], options, plan.sizes, rows[side], *columns, keep=True)[1]  # type: ignore[return-value]

    return of(0), of(1)


def _of_common_tokens(pair: Pair) -> Pair:
    """The pair without labels, with the columns that both models have."""
    common = jnp.int32(min(len(model.weight) for model in pair))
    columns = common if pair.student.columns is None else jnp.minimum(pair.student.columns, common)
    none = jnp.full_like(pair.student.labels, -1)
    return Pair(*(model._replace(labels=none, columns=columns) for model in pair))


def _gathered(
    plan: _Plan, pair: Pair, options: Options, row: Int[Array, "R"], number: Int[Array, ""]
) -> tuple[Rows, Rows]:
    student, teacher = (engine.gather_rows(model, options, plan.sizes, row, number) for model in pair)
    return student, teacher
