"""One update: model -> hidden -> head -> objective -> gradients -> optimizer; and the log-prob pass.

The loss of a step is a sum of per-token terms whose weights already hold the whole batch's denominator (see `Batch`),
so micro-batches just add up: loss and gradients do not depend on how the batch is split. This is the only file of the
trainer that touches the head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, Int

from kernels.lm_head import HeadSharding, TokenLogprobs, token_logprobs, token_loss
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.errors import UserError
from mllm.model.decoder import LOGICAL_AXES, parameter_name
from mllm.model.layout import Layout
from mllm.parallel.mesh import sharding
from mllm.train import objectives

Metrics = dict[str, Float[Array, ""]]


class TrainState(NamedTuple):
    params: Any
    opt_state: Any
    step: Int[Any, ""]
    """Updates tried; skipped ones count."""


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state of a run that begins, laid out as the parameters are."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(params, optimizer))

    @jax.jit(out_shardings=shardings[1:])
    def init(params: Any) -> tuple[Any, Int[Array, ""]]:
        return optimizer.init(params), jnp.zeros((), jnp.int32)

    return TrainState(params, *init(params))


def abstract_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of the state: the moments lie as their parameters do, scalars everywhere.

    `params` are ShapeDtypeStructs or arrays, with shardings.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    everywhere = NamedSharding(mesh, PartitionSpec())

    def like(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract = jax.tree.map(lambda p: like(p, p.sharding), params)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda moment, param: like(moment, param.sharding),
        jax.eval_shape(optimizer.init, abstract),
        abstract,
        transform_non_params=lambda leaf: like(leaf, everywhere),
    )
    return TrainState(abstract, opt_state, jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere))


class Forward:
    """Model and head as functions of the parameters and a batch, with the run's settings and mesh bound.

    Raises:
        UserError: the head that is asked for needs other devices.
    """

    def __init__(self, graphdef: Any, config: Config, mesh: Mesh) -> None:
        needed = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}.get(config.head.impl or "")
        kind = mesh.devices.flat[0].platform
        if needed not in (None, kind):
            raise UserError(
                f"head.impl: {config.head.impl} needs a {needed.upper()}, and the devices here are of the kind {kind}: "
                "remove it"
            )
        self.graphdef = graphdef
        self.sharding = head_sharding(mesh)
        self.dtype = jnp.dtype(config.model.dtype)
        self.head = config.head
        self.temperature = 1.0
        self.objective: objectives.GrpoObjective | None = None
        self.sequence_level = False
        if config.grpo is not None and config.rollout is not None:
            # The policy is the distribution that is sampled from: its temperature is part of it.
            self.temperature = config.rollout.temperature
            self.objective = make_objective(config)
            self.sequence_level = config.grpo.loss_type == "gspo"

    def logprobs(self, params: Any, batch: Batch) -> TokenLogprobs:
        """Log-probability of each label that counts, lse and entropy, [B, T] each; 0 where `weights` is 0."""
        return self.head_logprobs(*self.hidden(params, batch), batch)

    def head_logprobs(self, hidden: Float[Array, "B T D"], weight: Float[Array, "V D"], batch: Batch) -> TokenLogprobs:
        return token_logprobs(
            hidden,
            weight,
            batch.labels,
            where=batch.weights > 0,
            temperature=self.temperature,
            dtype=self.dtype,
            impl=self.head.impl,
            sharding=self.sharding,
        )

    def loss(self, params: Any, batch: Batch) -> tuple[Float[Array, ""], TokenLogprobs]:
        """The batch's share of the step's loss, and its log-probabilities for the metrics."""
        return self.head_loss(*self.hidden(params, batch), batch)

    def head_loss(
        self, hidden: Float[Array, "B T D"], weight: Float[Array, "V D"], batch: Batch
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        if self.objective is not None and self.sequence_level:
            outputs = self.head_logprobs(hidden, weight, batch)
            loss = objectives.gspo(
                self.objective, outputs.logprob, outputs.entropy, batch.weights, *self.operands(batch)
            )
            return loss, jax.lax.stop_gradient(outputs)
        workspace = self.head.workspace_mib
        return token_loss(
            hidden,
            weight,
            batch.labels,
            self.objective or objectives.sft,
            *self.operands(batch),
            weights=batch.weights,
            temperature=self.temperature,
            workspace=None if workspace is None else workspace * 2**20,
            dtype=self.dtype,
            impl=self.head.impl,
            sharding=self.sharding,
        )

    def hidden(self, params: Any, batch: Batch) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
        model = nnx.merge(self.graphdef, params)
        if model.layout is not None:
            # Of the parameters it is known; said of them, it holds for their gradients, too.
            model = nnx.merge(self.graphdef, by_table(model.layout, params))
        hidden, _ = model(batch.tokens, batch.positions, batch.segments)
        return hidden, model.head_weight

    def operands(self, batch: Batch) -> list[Float[Array, "B T"]]:
        return [] if self.objective is None else [getattr(batch, name) for name in self.objective.operands]

    def metrics(self, batch: Batch, outputs: TokenLogprobs) -> Metrics:
        """Of the whole batch, under TRL's names."""
        mask = batch.weights > 0
        if self.objective is None:
            return {"entropy": objectives.masked_mean(outputs.entropy, mask)}
        metrics = objectives.policy_metrics(
            self.objective,
            outputs.logprob,
            outputs.entropy,
            mask,
            *self.operands(batch),
            sequence_level=self.sequence_level,
        )
        trainer = outputs.logprob if batch.old_logprobs is None else batch.old_logprobs
        assert batch.sampler_logprobs is not None
        return metrics | objectives.sampling_metrics(trainer, batch.sampler_logprobs, mask)


def by_table(layout: Layout, params: Any) -> Any:
    """The parameters, laid out by the table; inside jit."""

    def place(path: KeyPath, leaf: Array) -> Array:
        return layout.constrain(leaf, LOGICAL_AXES[parameter_name(path)])

    return jax.tree_util.tree_map_with_path(place, params)


def head_sharding(mesh: Mesh) -> HeadSharding:
    """Tokens as the batch lies, the vocabulary's matrix as its parameter."""
    (tokens,) = sharding(mesh, ("batch",)).spec
    vocabulary, features = sharding(mesh, LOGICAL_AXES["head"]).spec
    return HeadSharding(mesh, tokens, vocabulary, features)


def make_objective(config: Config) -> objectives.GrpoObjective:
    grpo = config.grpo
    assert grpo is not None
    return objectives.GrpoObjective(
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon_high,
        beta=grpo.beta,
        entropy_coef=grpo.entropy_coef,
        importance_cap=grpo.importance_cap,
        num_iterations=grpo.num_iterations,
    )


def make_train_step(
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    config: Config,
    mesh: Mesh,
    kind: type[Forward] = Forward,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted update; it takes over the state's memory. `kind`: for comparisons, a forward pass with another head.

    Where the loss or a gradient is not finite, parameters and optimizer stay as they were and `skipped` is 1.
    """
    forward = kind(graphdef, config, mesh)
    rows = config.micro_batch_size or config.batch_size

    @jax.jit(donate_argnums=0)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, outputs, gradients = accumulate(forward.loss, state.params, batch, rows)
        norm = optax.tree.norm(gradients)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)

        # Micro-batches add up in float32, and moments made of that would not have the parameters' dtype.
        narrowed = jax.tree.map(lambda gradient, param: gradient.astype(param.dtype), gradients, state.params)
        updates, opt_state = optimizer.update(narrowed, state.opt_state, state.params)
        updated = optax.apply_updates(state.params, updates), opt_state
        # No `cond`: XLA for GPUs holds what comes out of one beside the state, and on every device the whole of it.
        kept = jax.tree.map(lambda new, old: jnp.where(sound, new, old), updated, (state.params, state.opt_state))
        params, opt_state = kept
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": schedule(state.step),
            "skipped": 1.0 - sound,
            **forward.metrics(batch, outputs),
        }
        return TrainState(params, opt_state, state.step + 1), metrics

    return train_step


def make_logprob_pass(graphdef: Any, config: Config, mesh: Mesh) -> Callable[[Any, Batch], Float[Array, "B T"]]:
    """The jitted forward pass: log-probabilities of a batch's labels under any parameters."""
    forward = Forward(graphdef, config, mesh)
    rows = config.micro_batch_size or config.batch_size

    @jax.jit(in_shardings=(None, sharding(mesh, ("batch",))))
    def logprob_pass(params: Any, batch: Batch) -> Float[Array, "B T"]:
        logprobs = jax.lax.map(lambda micro: forward.logprobs(params, micro).logprob, split(batch, rows))
        return join(logprobs)

    return logprob_pass


def accumulate(
    loss_fn: Callable[[Any, Batch], tuple[Float[Array, ""], TokenLogprobs]],
    params: Any,
    batch: Batch,
    rows: int,
) -> tuple[Float[Array, ""], TokenLogprobs, Any]:
    """Loss, outputs and gradients of the batch, `rows` of it at a time; the sums are in float32."""
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    if rows == batch.tokens.shape[0]:
        (loss, outputs), gradients = value_and_grad(params, batch)
        return loss, outputs, gradients

    def add(sums: tuple[Float[Array, ""], Any], micro: Batch) -> tuple[tuple[Float[Array, ""], Any], TokenLogprobs]:
        (loss, outputs), gradients = value_and_grad(params, micro)
        return jax.tree.map(jnp.add, sums, (loss, gradients)), outputs

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (loss, gradients), outputs = jax.lax.scan(add, (jnp.zeros(()), zeros), split(batch, rows))
    return loss, jax.tree.map(join, outputs), gradients


def split(batch: Batch, rows: int) -> Batch:
    """[B, ...] to [B / rows, rows, ...], dealt out so that each device's share of the rows stays on it."""
    return jax.tree.map(lambda x: x.reshape(rows, -1, *x.shape[1:]).swapaxes(0, 1), batch)


def join(split_rows: Float[Array, "M R ..."]) -> Float[Array, "B ..."]:
    """The inverse of `split`."""
    return split_rows.swapaxes(0, 1).reshape(-1, *split_rows.shape[2:])
