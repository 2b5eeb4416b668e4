"""Divergences of two heads in plain XLA, a tile of both models' logits at a time; the counterpart of xla.py.

With r = D_teacher / D, in matrix products of 2 N V D flops: statistics take 1 + r, and jsd as much again where logits
aren't kept, since the mixture needs both normalisers; gradients from recomputed logits 3 + r. Waves, which keep both
models' logits of some rows, take 3 + r in all.

Suffixes as in xla.py; 2 for student and teacher, E the teacher's features.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import contract, two_softmaxes
from .contract import Gradients, Options
from .live_rows import live_rows, round_up, write
from .shapes import Array, Bool, Float, Int
from .two_softmaxes import Divergence, Pair, TwoSoftmaxes
from .xla import (
    Plan,
    columns_of,
    in_waves,
    make_plan,
    product,
    products_of_slopes,
    wave_rows,
    weight_tile,
)


def obstacle(pair: Pair, options: Options) -> None:
    """It always runs."""


def forward(pair: Pair, how: Divergence, options: Options) -> TwoSoftmaxes:
    """The statistics of all rows: 1 + r matrix products, or twice as many for jsd without room for logits."""
    plan, options = _plan(pair), options.values_alone
    wave = 0 if how.in_one_pass else wave_rows(plan, pair.student, options, logits=2)
    if wave:
        none = contract.zeros(pair.student, len(pair.student.labels))
        return _waves(plan._replace(block=wave), pair, none, how, options)[0]
    live = live_rows(pair.student.live, plan.block)

    def block(i: Array, all_M: TwoSoftmaxes) -> TwoSoftmaxes:
        row_R, live_R = live.block(i, plan.block)
        logits = _Logits(plan, _rows(pair, row_R, live_R), options)
        return write(all_M, logits.statistics(logits.of_tile, live_R, how), i * plan.block)

    all_M = live.over_blocks(plan.block, block, _nothing(pair, len(live.row)), options.in_step)
    return jax.tree.map(lambda x: x[live.place], all_M)


def gradients(
    pair: Pair, found: TwoSoftmaxes, slopes: Float[Array, "N"], how: Divergence, options: Options
) -> Gradients:
    """The student's gradients by recomputed logits: 3 + r matrix products, 2 + r for one gradient alone."""
    plan = _plan(pair)

    def dy(c: Array, row_R: Array, live_R: Array) -> Float[Array, "R T"]:
        logits, found_R = _Logits(plan, _rows(pair, row_R, live_R), options), jax.tree.map(lambda x: x[row_R], found)
        return logits.product_slopes(logits.of_tile(c), c, found_R, jnp.where(live_R, slopes[row_R], 0), how)

    return products_of_slopes(plan, pair.student, options, dy)


def loss_and_gradients(
    pair: Pair, weights: Float[Array, "N"], how: Divergence, options: Options
) -> tuple[TwoSoftmaxes, Gradients]:
    """The statistics, and the gradients of the divergences' weighted sum: 3 + r matrix products in waves."""
    plan = _plan(pair)
    wave = wave_rows(plan, pair.student, options, logits=2)
    if wave:
        return _waves(plan._replace(block=wave), pair, weights, how, options)
    found = forward(pair, how, dataclasses.replace(options, workspace=0))
    return found, gradients(pair, found, weights, how, options)


def _waves(
    plan: Plan, pair: Pair, weights: Float[Array, "N"], how: Divergence, options: Options
) -> tuple[TwoSoftmaxes, Gradients]:
    """Statistics and wanted gradients, keeping a block's logits."""

    def wave(row_R: Array, live_R: Array, _: Array, y_C2RT: Array) -> Any:
        logits = _Logits(plan, _rows(pair, row_R, live_R), options)

        def keep(c: Array, y_C2RT: Array) -> Array:
            return lax.dynamic_update_index_in_dim(y_C2RT, logits.of_tile(c), c, 0)

        y_C2RT = lax.fori_loop(0, plan.tiles, keep, y_C2RT)
        found_R, slopes_R = logits.statistics(lambda c: y_C2RT[c], live_R, how), jnp.where(live_R, weights[row_R], 0)
        return found_R, y_C2RT, lambda c: logits.product_slopes(y_C2RT[c], c, found_R, slopes_R, how)

    all_M = _nothing(pair, round_up(len(weights), plan.block))
    return in_waves(
        plan, pair.student, options, wave, all_M, contract.zeros(pair.student, plan.tiles, 2, plan.block, plan.tile)
    )


# --- blocks and tiles ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Logits:
    """Both models' products of a block of rows, tile by tile, and what follows from them."""

    plan: Plan
    own: Pair  # of the block's rows
    options: Options

    def of_tile(self, c: Array) -> Float[Array, "2 R T"]:
        """The products y of tile c."""
        return jnp.stack([product(self.options, x.hidden, weight_tile(self.plan, x, c), (1, 1)) for x in self.own])

    def fresh(self, c: Array) -> Bool[Array, "T"]:
        return columns_of(self.plan, self.own.student, c)[1]

    def scaled(self, y: Float[Array, "*R T"]) -> Float[Array, "*R T"]:
        return contract.logits_of(self.own.student, self.options, y)

    def statistics(
        self, products: Callable[[Array], Float[Array, "2 R T"]], live_R: Bool[Array, "R"], how: Divergence
    ) -> TwoSoftmaxes:
        """The statistics of the block; `products` gives those of a tile."""
        of_tile = lambda c: (self.scaled(products(c)), self.fresh(c))  # noqa: E731
        return two_softmaxes.statistics(self.plan.tiles, of_tile, live_R, how, self.options.vocabulary_axis)

    def product_slopes(
        self, y_2RT: Array, c: Array, found: TwoSoftmaxes, slopes: Float[Array, "R"], how: Divergence
    ) -> Float[Array, "R T"]:
        """The derivatives by the student's products."""
        z_RT, pull = jax.vjp(self.scaled, y_2RT[0])
        z_2RT = jnp.stack([z_RT, self.scaled(y_2RT[1])])
        return pull(two_softmaxes.logit_slopes(z_2RT, found, slopes, self.fresh(c), how))[0]


def _plan(pair: Pair) -> Plan:
    student, teacher = (x.weight.shape for x in pair)
    return make_plan(len(pair.student.labels), min(student[0], teacher[0]), max(student[1], teacher[1]))


def _rows(pair: Pair, row_R: Int[Array, "R"], live_R: Bool[Array, "R"]) -> Pair:
    """The pair at these rows; 0 where they don't count: a block that runs for its collectives must not hold NaN."""
    return Pair(*(x._replace(hidden=jnp.where(live_R[:, None], x.hidden[row_R], 0)) for x in pair))


def _nothing(pair: Pair, rows: int) -> TwoSoftmaxes:
    return TwoSoftmaxes(*(contract.zeros(pair.student, rows) for _ in TwoSoftmaxes._fields))
