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
from collections.abc import Sequence
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
from kernels.lm_head.live_rows import live_rows, over_waves, round_up
from kernels.lm_head.two_softmaxes import Divergence, Pair, TwoSoftmaxes

_ROWS = 2048  # rows whose statistics are taken at a time, at most: so many hidden states of both models are gathered


def obstacle(pair: Pair, options: Options) -> str | None:
    of_student, of_teacher = (engine.obstacle(model, options) for model in pair)
    return of_student or (of_teacher and f"of the teacher, {of_teacher}")


def forward(pair: Pair, how: Divergence, options: Options) -> TwoSoftmaxes:
    """The statistics of all rows: 1 + r matrix products, or twice as many for jsd without room for logits."""
    return _by_rows(_plan(pair, how, options.values_alone), _of_common_tokens(pair), None, how, options.values_alone)[0]


def loss_and_gradients(
    pair: Pair, weights: Float[Array, "N"], how: Divergence, options: Options
) -> tuple[TwoSoftmaxes, Gradients]:
    """The statistics, and the gradients of the divergences' weighted sum: 3 + r matrix products in waves."""
    plan, pair = _plan(pair, how, options), _of_common_tokens(pair)
    if plan.keep:
        return _by_rows(plan, pair, weights, how, options)
    found, _ = _by_rows(plan, pair, None, how, options)
    return found, gradients(pair, found, weights, how, options, _room(pair, options))


def _by_rows(
    plan: "_Plan", pair: Pair, weights: Float[Array, "N"] | None, how: Divergence, options: Options
) -> tuple[TwoSoftmaxes, Gradients]:
    """Statistics, and with `weights` the wanted gradients, of so many rows at a time as the plan says."""
    student, count = pair.student, round_up(len(pair.student.labels), plan.rows)

    def wave(row_R: Array, live_R: Array, dw_VD: Array | None, _: None) -> Any:
        rows = _gathered(plan, pair, options, row_R, live_R.sum(dtype=jnp.int32))
        logits = _Logits(plan, pair, options, rows, None)
        if plan.keep:  # in one kernel a model, unless its weight has another dtype
            columns, both = (0, plan.chunk * plan.chunks, plan.chunk), zip(pair, rows, strict=True)
            kept = [engine.forward_over(x, options, plan.sizes, own, *columns, keep=True)[1] for x, own in both]
            logits = dataclasses.replace(logits, kept=kept)
        found_R = two_softmaxes.statistics(plan.chunks, logits.of_chunk, live_R, how, options.vocabulary_axis)
        if weights is None:
            return found_R, None, None, None
        slopes_R = jnp.where(live_R, weights[row_R], 0)

        def dy(c: Array, *_: Any) -> Float[Array, "R C"]:
            return logits.product_slopes(c, found_R, slopes_R, how)

        spans = [engine.Span(0, plan.chunk, plan.chunks, dy)]
        return found_R, *engine.products_of_slopes(student, options, plan.sizes, rows[0], spans, dw_VD), None

    nothing = TwoSoftmaxes(*(contract.zeros(student, count) for _ in TwoSoftmaxes._fields))
    wanted = options.values_alone if weights is None else options
    return over_waves(student, wanted, plan.rows, wave, nothing, one_always_runs=True)


def gradients(
    pair: Pair, found: TwoSoftmaxes, slopes: Float[Array, "N"], how: Divergence, options: Options, room: int = 0
) -> Gradients:
    """The student's gradients by logits computed anew: 3 + r matrix products, 2 + r for one gradient alone.

    They are taken over chunks of columns, for which there are `room` bytes, and in each over blocks of rows.
    """
    pair = _of_common_tokens(pair)
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
        row_R, found_R, slopes_R = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, block.first, size), (row_M, found_M, slopes_M)
        )
        own = rows if size == len(live.row) else _gathered(plan, pair, options, row_R, block.number)
        return _Logits(plan, pair, options, own, None).product_slopes(c, found_R, slopes_R, how)

    spans = [engine.Span(0, plan.chunk, plan.chunks, dy)]
    dh, dw = engine.products_of_slopes(student, options, sizes, rows[0], spans)
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
    features, width = (model.weight.shape[1] for model in pair)
    sizes = _sizes(pair, len(pair.student.labels))
    unit, rows = sizes.tiles.cluster_rows, sizes.rows(len(pair.student.labels))

    def within(room: int) -> _Plan:
        """Waves of the most rows whose logits are at most `room` bytes."""
        found = _waves(pair, min(rows, room // (2 * kept_bytes(pair.common, sizes.tiles))))
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
    return _even(pair, _sizes(pair, rows), rows, keep=True)


def _chunks(pair: Pair, rows: int, room: int, arrays: int = 3) -> _Plan:
    """Blocks of at most so many rows without kept logits, in chunks that take `room` bytes beyond the head's.

    The head has one array of a chunk's size, dy. `arrays` are such as there are here: by default dy and the logits of
    both models.
    """
    size = _sizes(pair, rows).block(rows)
    dy = tiles.dy_bytes(size, pair.student.weight.shape[1])
    return _even(pair, _sizes(pair, rows, (room + dy) // arrays - dy), size, keep=False)


def _sizes(pair: Pair, rows: int, spare: int = 0) -> Sizes:
    return tiles.choose(rows, pair.common, pair.student.weight.shape[1], spare)


def _even(pair: Pair, sizes: Sizes, rows: int, keep: bool) -> _Plan:
    chunk = round_up(-(-pair.common // -(-pair.common // sizes.chunk)), sizes.tiles.columns)
    return _Plan(sizes, rows, chunk, -(-pair.common // chunk), keep)


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
    rows: tuple[Rows, ...]
    kept: Sequence[Any] | None  # KeptLogits

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


def _of_common_tokens(pair: Pair) -> Pair:
    """The pair without labels, with the columns that both models have."""
    common = jnp.int32(pair.common)
    columns = common if pair.student.columns is None else jnp.minimum(pair.student.columns, common)
    none = jnp.full_like(pair.student.labels, -1)
    return Pair(*(model._replace(labels=none, columns=columns) for model in pair))


def _gathered(
    plan: _Plan, pair: Pair, options: Options, row: Int[Array, "R"], number: Int[Array, ""]
) -> tuple[Rows, ...]:
    return tuple(engine.gather_rows(model, options, plan.sizes, row, number) for model in pair)
