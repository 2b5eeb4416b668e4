"""One update: model -> hidden -> head -> objective -> gradients -> optimizer; and the log-prob pass."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from lm_head import TokenLogprobs
from mllm.config.run import BatchShape
from mllm.data.batch import Batch
from mllm.model.attention import platform
from mllm.model.layout import Params, axes_of, map_parameters
from mllm.parallel.mesh import shard_batch, sharding
from mllm.training.head import Head, HeadInputs
from mllm.training.optimizer import update_count, update_key, updated

Carry = TypeVar("Carry")
Metrics = dict[str, Float[Array, ""]]
NONE_FROZEN: Params = nnx.State({})
COMPILER_OPTIONS = {"gpu": {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True}}
"""XLA's options for an update, by platform. XLA for GPUs fills and copies the arrays of all layers' results with zeros,
although the loop over the layers writes every element (openxla/xla pull request 42808)."""


class TrainState(NamedTuple):
    params: Params
    opt_state: optax.OptState
    step: Int[Any, ""]


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; the moments have the parameters' shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(params, optimizer))
    init = jax.jit(lambda params: (optimizer.init(params), jnp.zeros((), jnp.int32)), out_shardings=shardings[1:])
    return TrainState(params, *init(params))


def abstract_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of the state: moments are sharded like their parameters, scalars replicated."""
    replicated = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, PartitionSpec())

    def like(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract = jax.tree.map(lambda p: like(p, p.sharding), params)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda moment, param: like(moment, param.sharding),
        jax.eval_shape(optimizer.init, abstract),
        abstract,
        transform_non_params=lambda leaf: like(leaf, replicated),
    )
    return TrainState(abstract, opt_state, jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated))


class Forward:
    """Model, head and loss as functions of the parameters and a batch."""

    def __init__(
        self,
        graphdef: Any,
        mesh: Mesh,
        head: Head,
        shape: BatchShape,
        loss: Callable[..., tuple[Float[Array, ""], Any]],
        metrics: Callable[[Batch, Any], Metrics],
        teacher: Any = None,
    ) -> None:
        """`loss` and `metrics` are from a `mllm.training.recipe.Recipe`."""
        self.graphdef, self.mesh, self.head, self.shape = graphdef, mesh, head, shape
        self.head_loss, self.metrics = loss, metrics
        self.teacher = None if teacher is None else Teacher(teacher, mesh, head, shape, loss, metrics)
        """The teacher's functions, with the same head."""

    def logprobs(self, params: Params, batch: Batch) -> TokenLogprobs:
        """Log-probability, lse and entropy of each label, [B, T] each, in nats; 0 where `weights` is 0."""
        return self.head.logprobs(self.states(params, batch), batch)

    def loss(self, params: Params, batch: Batch, teacher: Params = NONE_FROZEN) -> tuple[Float[Array, ""], Any]:
        """The batch's share of the step's loss, and arrays for `metrics`, without gradient."""
        if self.teacher is None or not teacher:
            return self.head_loss(self.head, self.states(params, batch), batch)
        scored = jax.lax.stop_gradient(self.teacher.states(teacher, batch))
        return self.head_loss(self.head, self.states(params, batch), batch, scored)

    def states(self, params: Params, batch: Batch) -> HeadInputs:
        """The head's inputs: hidden states, the vocabulary matrix and its copy."""
        model = nnx.merge(self.graphdef, params)
        if model.layout is not None:
            # The parameters have these shardings already; the constraint is for their gradients.
            constrain = model.layout.constrain
            params = map_parameters(lambda x, name: constrain(x, axes_of(x, name)), params)
            model = nnx.merge(self.graphdef, params)
        weight = model.head_weight
        return HeadInputs(model(batch.tokens, batch.positions, batch.segments), weight, model.head_copy(weight))


class Teacher(Forward):
    """The teacher's model and the student's head; no gradient reaches it.

    Only an untrained student samples tokens that the teacher lacks: they are read as its last token, of probability 0.
    """

    def states(self, params: Params, batch: Batch) -> HeadInputs:
        return super().states(params, batch._replace(tokens=jnp.minimum(batch.tokens, self.last(params))))

    def logprobs(self, params: Params, batch: Batch) -> TokenLogprobs:
        last = self.last(params)
        scored = super().logprobs(params, batch._replace(labels=jnp.minimum(batch.labels, last)))
        return scored._replace(logprob=jnp.where(batch.labels > last, -jnp.inf, scored.logprob))

    def last(self, params: Params) -> int:
        """The last token of the teacher's vocabulary."""
        return nnx.merge(self.graphdef, params).embed[...].shape[0] - 1


def make_train_step(
    forward: Forward, optimizer: optax.GradientTransformation, schedule: optax.Schedule, seed: int
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The jitted update; it reuses the state's memory.

    The state has the trained parameters, the third argument the frozen parameters, and the fourth a teacher's
    parameters; each may be empty.

    If the loss or a gradient is not finite, parameters and optimizer state don't change, and `skipped` is 1. They don't
    change either, by weight decay or momentum, if no token has a weight. The metric `learning_rate` is the rate of this
    update, made or skipped: a skipped update does not advance the schedule.
    """

    @jax.jit(donate_argnums=0, compiler_options=COMPILER_OPTIONS.get(platform(forward.mesh)))
    def train_step(
        state: TrainState, batch: Batch, frozen: Params = NONE_FROZEN, teacher: Params = NONE_FROZEN
    ) -> tuple[TrainState, Metrics]:
        def loss_of(trained: Params, micro: Batch) -> tuple[Float[Array, ""], Any]:
            return forward.loss(nnx.merge_state(trained, frozen), micro, teacher)

        loss, outputs, gradients = accumulate(loss_of, state.params, batch, forward.shape.micro)
        norm = optax.tree.norm(gradients)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)
        made = sound & (batch.weights > 0).any()

        results = updated(optimizer, gradients, state.params, state.opt_state, update_key(seed, state.step))
        # No `cond`: XLA for GPUs holds its results beside the state, and on every device the whole of them.
        params, opt_state = jax.tree.map(partial(jnp.where, made), results, (state.params, state.opt_state))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": schedule(update_count(state.opt_state)),
            "skipped": 1.0 - sound,
            **forward.metrics(batch, outputs),
        }
        return TrainState(params, opt_state, state.step + 1), metrics

    return train_step


def make_logprob_pass(forward: Forward) -> Callable[[Any, Batch], Float[Array, "B T"]]:
    """The jitted forward pass: log-probabilities of a batch's labels under any parameters, in nats."""

    rows = sharding(forward.mesh, ("batch",))

    @jax.jit(in_shardings=(None, rows), out_shardings=rows)
    def logprob_pass(params: Params, batch: Batch) -> Float[Array, "B T"]:
        def logprobs(_: None, micro: Batch) -> tuple[None, Float[Array, "B T"]]:
            return None, forward.logprobs(params, micro).logprob

        return loop(logprobs, None, jnp.zeros(batch.tokens.shape), batch, forward.shape.micro)[1]

    return logprob_pass


def logprobs_of(forward: Forward) -> Callable[[Params | None, Batch], Float[Array, "B T"]]:
    """`make_logprob_pass` for a source's batches: each process passes its own rows as NumPy arrays."""
    logprob_pass = make_logprob_pass(forward)
    return lambda params, batch: logprob_pass(params, shard_batch(forward.mesh, batch._replace(inputs=None)))


def accumulate(
    loss_fn: Callable[..., tuple[Float[Array, ""], Any]], params: Params, batch: Batch, rows: int
) -> tuple[Float[Array, ""], Any, Params]:
    """Loss, outputs and gradients of the batch, computed for `rows` rows at a time and summed in float32."""
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    if rows == batch.tokens.shape[0]:
        (loss, outputs), gradients = value_and_grad(params, batch)
        return loss, outputs, gradients

    def add(sums: tuple[Float[Array, ""], Any], micro: Batch) -> tuple[tuple[Float[Array, ""], Any], Any]:
        (loss, outputs), gradients = value_and_grad(params, micro)
        return jax.tree.map(jnp.add, sums, (loss, gradients)), outputs

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
    _, outputs = jax.eval_shape(loss_fn, params, micro)
    none = jax.tree.map(lambda x: jnp.zeros((len(batch.tokens), *x.shape[1:]), x.dtype), outputs)
    (loss, gradients), outputs = loop(add, (jnp.zeros(()), zeros), none, batch, rows)
    return loss, outputs, gradients


def loop(
    function: Callable[[Carry, Batch], tuple[Carry, Any]], carry: Carry, outputs: Any, batch: Batch, rows: int
) -> tuple[Carry, Any]:
    """Scan over micro-batches of `rows` rows; returns the last `carry`, and `outputs` [B, T] with all results.

    The loop ends with the last micro-batch that has a token with a weight. This is decided at run time, so one program
    serves batches of all sizes. A micro-batch takes every M-th row, so that rows stay on their devices.
    """
    micro_batches = jax.tree.map(lambda x: x.reshape(rows, -1, *x.shape[1:]), batch)
    number = 1 + jnp.arange(len(batch.tokens) // rows)
    last = jnp.max(jnp.where((micro_batches.weights > 0).any((0, 2)), number, 0))

    def step(index: Int[Array, ""], state: tuple[Carry, Any]) -> tuple[Carry, Any]:
        micro = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False), micro_batches)
        carry, parts = function(state[0], micro)
        update = jax.lax.dynamic_update_index_in_dim
        return carry, jax.tree.map(lambda array, part: update(array, part, index, 1), state[1], parts)

    apart = jax.tree.map(lambda x: x.reshape(rows, -1, x.shape[-1]), outputs)
    carry, written = jax.lax.fori_loop(0, last, step, (carry, apart))
    return carry, jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), written)
