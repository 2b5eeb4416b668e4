"""The interface of the head's engines: inputs, results, and the definition of the loss."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from .precision import precision_of
from .shapes import Array, Bool, Float, Int, Integer, Shaped
from .softmax import Running, Slopes, Softmax, empty_running, finish_live
from .target import vary, varying_axes
from .two_softmaxes import REVERSE_KL, Divergence

Gradients = tuple[Array | None, Array | None]  # dh [N, D] and dW [V, D]; None where not asked for


class Teacher(NamedTuple):
    """The teacher's head at the same rows, to compare its distribution with the student's."""

    hidden: Float[Array, "N E"]
    weight: Float[Array, "W E"]
    temperature: Float[Array, ""]


class Inputs(NamedTuple):
    """The arguments of a pass; `live` are the rows that count."""

    hidden: Float[Array, "N D"]
    weight: Float[Array, "V D"]
    labels: Int[Array, "N"]
    live: Bool[Array, "N"]
    temperature: Float[Array, ""]
    columns: Integer[Array, ""] | None = None  # the vocabulary's size; None: every row of the weights
    teacher: Teacher | None = None

    def each_row(self, change: Callable[[Array], Array]) -> "Inputs":
        """The inputs with `change` applied to every array [N, ...]."""
        hidden, labels, live = map(change, (self.hidden, self.labels, self.live))
        teacher = self.teacher and self.teacher._replace(hidden=change(self.teacher.hidden))
        return self._replace(hidden=hidden, labels=labels, live=live, teacher=teacher)


class GivenLogits(NamedTuple):
    """The arguments of a pass over given logits; labels are relative to this device's first column."""

    logits: Float[Array, "N V"]
    labels: Int[Array, "N"]
    live: Bool[Array, "N"]
    scale: Float[Array, ""]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of a pass."""

    softcap: float | None
    dtype: jnp.dtype  # dtype of the matrix products' operands
    workspace: int | None = None  # bytes, as for `token_loss`
    wants_hidden: bool = True
    wants_weight: bool = True
    entropy_slopes: bool = True  # False: the derivative by the entropy is 0 everywhere
    token_slopes: bool = True  # False: the derivatives by the log-probability, the lse and the mean logit are 0
    mean_over: int | None = None  # number of tokens, where the mean of their logits is asked for
    collision: bool = False  # whether the sum of p^2 is asked for
    divergence: Divergence = REVERSE_KL
    teacher_softcap: float | None = None
    vocabulary_axis: tuple[str, ...] | None = None  # inside `shard_map`, the mesh axes of the rows of W
    token_axes: tuple[str, ...] = ()  # inside `shard_map`, the mesh axes that shard the tokens
    gradient_dtypes: tuple[jnp.dtype, jnp.dtype] | None = None  # dtypes of dh and dW; None: the inputs'

    @property
    def wants_any(self) -> bool:
        return self.wants_hidden or self.wants_weight

    @property
    def values_alone(self) -> "Options":
        return dataclasses.replace(self, wants_hidden=False, wants_weight=False)

    @property
    def in_step(self) -> tuple[str, ...]:
        """The mesh axes along which devices must run a loop over blocks of tokens equally often."""
        return self.token_axes if self.vocabulary_axis else ()


class Terms(NamedTuple):
    """The parts of a loss that are not statistics of tokens: objective, weights and operands."""

    objective: Any  # (statistics of one token, *operands) -> its loss: a `jax.tree_util.Partial` over shared arrays
    weights: Float[Array, "N"]
    operands: tuple[Shaped[Array, "N"], ...] = ()

    def of_rows(self, row: Integer[Array, "R"]) -> "Terms":
        """The terms of these rows alone."""
        return Terms(self.objective, self.weights[row], tuple(x[row] for x in self.operands))


@runtime_checkable
class Engine(Protocol):
    """An implementation of the head. Its results are 0 in rows that don't count."""

    def forward(self, inputs: Inputs, options: Options) -> tuple[Softmax, Any]:
        """The tokens' statistics, and residuals for the wanted gradients: a tree of arrays [N, ...], or None."""

    def gradients(self, inputs: Inputs, softmax: Softmax, saved: Any, slopes: Slopes, options: Options) -> Gradients:
        """The wanted gradients of a scalar with derivatives `slopes`; dh is the part of this vocabulary shard."""

    def loss_and_gradients(self, inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
        """The statistics, and the gradients of `weighted_sum`."""

    def obstacle(self, inputs: Inputs, options: Options) -> str | None:
        """Why the engine can't run, or None. `inputs` may be ShapeDtypeStructs."""


def number_of_columns(inputs: Inputs) -> Int[Array, ""]:
    """The number of rows of the weight that belong to the vocabulary."""
    return jnp.int32(len(inputs.weight)) if inputs.columns is None else inputs.columns.astype(jnp.int32)


def local_labels(inputs: Inputs) -> Int[Array, "N"]:
    """The labels, with -1 for a label of another shard or out of range, so that no label hits a padding column."""
    inside = (inputs.labels >= 0) & (inputs.labels < number_of_columns(inputs))
    return jnp.where(inside, inputs.labels, -1).astype(jnp.int32)


def gradient_dtypes(inputs: Inputs, options: Options) -> tuple[jnp.dtype, jnp.dtype]:
    """The dtypes of dh and dW."""
    return options.gradient_dtypes or (inputs.hidden.dtype, inputs.weight.dtype)


def zeros(inputs: Inputs, *shape: int, dtype: Any = jnp.float32) -> Array:
    """Zeros that vary, under `shard_map`, over the axes that the inputs vary over, as a loop's carry must."""
    return vary(jnp.zeros(shape, dtype), varying_axes(inputs.hidden))


def no_statistics(inputs: Inputs, options: Options, rows: int) -> Softmax:
    """Statistics of rows before any was visited."""
    wanted = [True] * 4 + [inputs.teacher is not None] * 4 + [options.mean_over is not None, options.collision]
    return Softmax(*(zeros(inputs, rows) if is_wanted else None for is_wanted in wanted))  # type: ignore[arg-type]


def no_columns(zeros_R: Float[Array, "*R"], options: Options) -> Running:
    """The state of rows' softmax before any column."""
    return empty_running(zeros_R, options.mean_over is not None, options.collision)


def finish(running: Running, inputs: Inputs, options: Options) -> Softmax:
    """The statistics of the inputs' rows after all columns."""
    scale = scale_of(inputs.temperature, options.softcap)
    return finish_live(running, inputs.live, scale, options.vocabulary_axis, options.mean_over)


def dot(a: Array, b: Array, contract: tuple[int, int], product: Any) -> Float[Array, "_ _"]:
    """The product over one dim of each with float32 sums, at the precision that goes with the dtype `product`."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision_of(product), preferred_element_type=jnp.float32)


def as_operand(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """The numbers, in float32, that a product of this dtype multiplies. XLA would drop two casts."""
    return lax.reduce_precision(x.astype(jnp.float32), jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


def capped(products: Float[Array, "..."], softcap: float | None) -> Float[Array, "..."]:
    """y of products h·W (see softmax.py)."""
    return products if softcap is None else jnp.tanh(products * (1 / softcap))


def scale_of(temperature: Float[Array, ""], softcap: float | None) -> Float[Array, ""]:
    """The logits over y."""
    return (1 if softcap is None else softcap) / temperature


def scales_of(inputs: Inputs, options: Options) -> tuple[Array, ...]:
    """The student's scale, and the teacher's if given."""
    student = scale_of(inputs.temperature, options.softcap)
    if inputs.teacher is None:
        return (student,)
    return student, scale_of(inputs.teacher.temperature, options.teacher_softcap)


def outputs_of(softmax: Softmax, inputs: Inputs, options: Options) -> Any:
    """The statistics as the head returns them."""
    return softmax.outputs(inputs.live, scale_of(inputs.temperature, options.softcap))


def weighted_sum(live: Bool[Array, "N"], statistics: Slopes, terms: Terms) -> Float[Array, ""]:
    """`sum_i weights_i * objective(*statistics_i, *operands_i)` over the rows that count.

    An objective may be NaN at a row that doesn't count. The NaN reaches neither the sum nor a gradient, except the
    gradients of arrays (not scalars) that the rows share. This takes a `where` before and after the objective.
    """

    def guard(x: jax.Array, live: jax.Array = live) -> jax.Array:
        return jnp.where(live, x, jax.lax.stop_gradient(x))

    def of_token(live: jax.Array, *scalars: jax.Array) -> jax.Array:
        objective = jax.tree.map(lambda x: x if x.ndim else guard(x, live), terms.objective)
        return objective(*scalars)

    values = jax.vmap(of_token)(live, *map(guard, (*jax.tree.leaves(statistics), *terms.operands)))
    return jnp.sum(jnp.where(live, guard(terms.weights) * values.astype(jnp.float32), 0))


def loss_slopes(softmax: Softmax, terms: Terms, inputs: Inputs, options: Options) -> Slopes:
    """The derivatives of `weighted_sum` by the tokens' statistics."""
    tokens = outputs_of(softmax, inputs, options)
    slopes = jax.grad(weighted_sum, 1)(inputs.live, tokens.statistics, terms)
    return slopes if options.mean_over is None else slopes._replace(mean_logit=slopes.mean_logit / options.mean_over)
