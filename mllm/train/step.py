"""One update: model -> hidden -> head -> objective -> gradients -> optimizer; the log-prob pass; SFT's validation.

This is the only file of the trainer that calls the head.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from kernels import lm_head
from kernels.lm_head import EngineChoice, HeadSharding, TokenLogprobs
from mllm.config.grpo import GrpoConfig, RolloutConfig
from mllm.config.model import HeadConfig, ModelConfig
from mllm.config.schema import Rows
from mllm.data.batch import Batch
from mllm.errors import UserError
from mllm.model.architecture import Architecture
from mllm.model.layout import LOGICAL_AXES, Params, axes_of, map_parameters
from mllm.parallel.mesh import shard_batch, sharding
from mllm.train import objectives
from mllm.train.optimizer import update_count, update_key, updated

Metrics = dict[str, Float[Array, ""]]
Carry = TypeVar("Carry")
NONE_FROZEN: Params = nnx.State({})


class TrainState(NamedTuple):
    params: Params
    opt_state: optax.OptState
    step: Int[Any, ""]


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step, with the moments laid out as the parameters are."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(params, optimizer))
    init = jax.jit(lambda params: (optimizer.init(params), jnp.zeros((), jnp.int32)), out_shardings=shardings[1:])
    return TrainState(params, *init(params))


def abstract_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of the state: moments have their parameters', scalars are replicated."""
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
    """Model and head as functions of the parameters and a batch; UserError if `head.impl` is for other devices."""

    def __init__(
        self,
        graphdef: Any,
        mesh: Mesh,
        head: HeadConfig,
        rows: Rows,
        grpo: GrpoConfig | None = None,
        rollout: RolloutConfig | None = None,
    ) -> None:
        """`grpo` None: SFT, which does not look at `rollout`."""
        impl, kind = head.impl or "", mesh.devices.flat[0].platform
        needed = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}.get(impl, kind)
        if needed != kind:
            needs = f"{impl} needs a {needed.upper()}"
            raise UserError(f"head.impl: {needs}, and the devices here are of the kind {kind}: remove it")
        self.graphdef = graphdef
        self.mesh = mesh
        self.head, self.rows, self.grpo = head, rows, grpo
        # The policy is the distribution that is sampled from: its temperature is part of it.
        temperature = rollout.temperature if grpo and rollout else 1.0
        self.options: dict[str, Any] = {"temperature": temperature, "impl": head.impl, "sharding": head_sharding(mesh)}

    def head_logprobs(
        self, hidden: Float[Array, "B T D"], weight: Float[Array, "V D"], copy: Float[Array, "V D"], batch: Batch
    ) -> TokenLogprobs:
        """Log-probability, lse and entropy of each label, [B, T] each, in nats; 0 where `weights` is 0."""
        how = {"where": batch.weights > 0, "weight_copy": copy, "dtype": hidden.dtype}
        return lm_head.token_logprobs(hidden, weight, batch.labels, **how, **self.options)

    def loss(self, params: Params, batch: Batch) -> tuple[Float[Array, ""], TokenLogprobs]:
        """The batch's share of the step's loss, and its log-probabilities without gradient, for the metrics."""
        return self.head_loss(*self.hidden(params, batch), batch)

    def head_loss(
        self, hidden: Float[Array, "B T D"], weight: Float[Array, "V D"], copy: Float[Array, "V D"], batch: Batch
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        """The same from hidden states, the vocabulary matrix, and its copy, which is multiplied."""
        config, objective = self.grpo, objectives.sft
        operands: list[Array] = []
        if config is not None and config.loss_type == "gspo":
            # The ratio of a sequence needs the log-probabilities of all its tokens before any loss is known.
            outputs, counts = self.head_logprobs(hidden, weight, copy, batch), batch.weights > 0
            inputs = objectives.token_inputs(config, batch)
            losses = objectives.gspo(config, outputs.logprob, outputs.entropy, inputs, counts, batch.segments)
            return jnp.sum(jnp.where(counts, batch.weights * losses, 0.0)), jax.lax.stop_gradient(outputs)
        if config is not None:
            operands, structure = jax.tree.flatten(objectives.token_inputs(config, batch))

            def objective(logprob: Array, entropy: Array, *operands: Array) -> Array:
                return objectives.grpo(config, logprob, entropy, jax.tree.unflatten(structure, operands))

        workspace = self.head.workspace_mib
        return lm_head.token_loss(
            hidden,
            weight,
            batch.labels,
            objective,
            *operands,
            weights=batch.weights,
            weight_copy=copy,
            workspace=None if workspace is None else workspace * 2**20,
            dtype=hidden.dtype,
            **self.options,
        )

    def hidden(
        self, params: Params, batch: Batch
    ) -> tuple[Float[Array, "B T D"], Float[Array, "V D"], Float[Array, "V D"]]:
        """Hidden states, the vocabulary matrix and its copy: what the head takes."""
        model = nnx.merge(self.graphdef, params)
        if model.layout is not None:
            # The parameters have these shardings already; a constraint on them constrains their gradients, too.
            constrain = model.layout.constrain
            params = map_parameters(lambda x, name: constrain(x, axes_of(x, name)), params)
            model = nnx.merge(self.graphdef, params)
        weight = model.head_weight
        return model(batch.tokens, batch.positions, batch.segments), weight, model.head_copy(weight)

    def metrics(self, batch: Batch, outputs: TokenLogprobs) -> Metrics:
        """The metrics of a whole batch, over the tokens with a weight, under TRL's names; NaN where there are none."""
        mask = batch.weights > 0
        if self.grpo is None:
            return {"entropy": objectives.masked_mean(outputs.entropy, mask)}
        metrics = objectives.policy_metrics(self.grpo, outputs.logprob, outputs.entropy, batch)
        return {name: jnp.where(mask.any(), value, jnp.nan) for name, value in metrics.items()}


def head_sharding(mesh: Mesh) -> HeadSharding:
    """The shardings of the head's arguments: tokens have the batch's, the vocabulary matrix its parameter's."""
    (tokens,) = sharding(mesh, ("batch",)).spec
    vocabulary, features = sharding(mesh, LOGICAL_AXES["head"]).spec
    return HeadSharding(mesh, tokens, vocabulary, features)


def choose_head(
    head: HeadConfig, model: ModelConfig, rows: Rows, architecture: Architecture, mesh: Mesh
) -> EngineChoice:
    """The implementation of the head that the train step uses, and the reason why it is not a faster one."""
    if head.impl is not None:
        return EngineChoice(head.impl, "head.impl asks for it")
    dtype = jnp.dtype(model.dtype)
    hidden = jax.ShapeDtypeStruct((rows.micro, rows.length, architecture.hidden_size), dtype)
    weight = jax.ShapeDtypeStruct((architecture.vocab_size, architecture.hidden_size), model.param_dtype)
    return lm_head.choose_impl(hidden, weight, dtype=dtype, sharding=head_sharding(mesh))


def make_train_step(
    forward: Forward, optimizer: optax.GradientTransformation, schedule: optax.Schedule, seed: int
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The jitted update; it reuses the state's memory.

    Its third argument has the frozen parameters, where there are any; the state has the others.

    If the loss or a gradient is not finite, parameters and optimizer stay as they were and `skipped` is 1. They stay
    as they were, too, without weight decay or momentum, where no token has a weight. The metric `learning_rate` is that
    of the update which was made, or skipped: a skipped update does not move the schedule on.
    """

    @jax.jit(donate_argnums=0)
    def train_step(state: TrainState, batch: Batch, frozen: Params = NONE_FROZEN) -> tuple[TrainState, Metrics]:
        def loss_of(trained: Params, micro: Batch) -> tuple[Float[Array, ""], TokenLogprobs]:
            return forward.loss(nnx.merge_state(trained, frozen), micro)

        loss, outputs, gradients = accumulate(loss_of, state.params, batch, forward.rows.micro)
        norm = optax.tree.norm(gradients)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)
        made = sound & (batch.weights > 0).any()

        new = updated(optimizer, gradients, state.params, state.opt_state, update_key(seed, state.step))
        # No `cond`: XLA for GPUs holds its results beside the state, and on every device the whole of them.
        params, opt_state = jax.tree.map(partial(jnp.where, made), new, (state.params, state.opt_state))
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

    @jax.jit(in_shardings=(None, sharding(forward.mesh, ("batch",))))
    def logprob_pass(params: Params, batch: Batch) -> Float[Array, "B T"]:
        def logprobs(_: None, micro: Batch) -> tuple[None, Float[Array, "B T"]]:
            return None, forward.head_logprobs(*forward.hidden(params, micro), micro).logprob

        return loop(logprobs, None, jnp.zeros(batch.tokens.shape), batch, forward.rows.micro)[1]

    return logprob_pass


def make_validation(
    forward: Forward, batches: Callable[[], Iterable[Batch]], poll: Callable[[], None]
) -> Callable[[Params, int], dict[str, float]]:
    """SFT's validation: the function (parameters, step) -> metrics of `batches`, which have each document once.

    The metrics are `validation/loss` (the mean negative log-probability of a learned token, in nats),
    `validation/perplexity` (its exponential) and `validation/token_accuracy` (the share of learned tokens that are
    the likeliest at their place; ties count). All processes call `poll` between two batches; what it raises ends the
    validation.
    """

    @jax.jit(in_shardings=(None, sharding(forward.mesh, ("batch",))))
    def validation_pass(params: Params, batch: Batch) -> Float[Array, "3"]:
        def measure(_: None, micro: Batch) -> tuple[None, list[Float[Array, "B T"]]]:
            found = forward.head_logprobs(*forward.hidden(params, micro), micro)
            return None, [found.logprob, found.likeliest.astype(jnp.float32)]

        zeros = jnp.zeros(batch.tokens.shape)
        outputs = loop(measure, None, [zeros, zeros], batch, forward.rows.micro)[1]
        return jnp.stack([*map(jnp.sum, outputs), (batch.weights > 0).sum(dtype=jnp.float32)])

    def validate(params: Params, step: int) -> dict[str, float]:
        sums = []
        for batch in batches():
            poll()
            sums.append(validation_pass(params, shard_batch(forward.mesh, batch)))
        logprob, likeliest, tokens = np.array(jax.device_get(sums), np.float64).sum(axis=0).tolist()
        loss = -logprob / tokens
        perplexity = math.exp(loss) if loss < math.log(np.finfo(np.float64).max) else math.inf
        metrics = {"loss": loss, "perplexity": perplexity, "token_accuracy": likeliest / tokens}
        return {f"validation/{name}": value for name, value in metrics.items()}

    return validate


def accumulate(
    loss_fn: Callable[..., tuple[Float[Array, ""], TokenLogprobs]], params: Params, batch: Batch, rows: int
) -> tuple[Float[Array, ""], TokenLogprobs, Params]:
    """Loss, outputs and gradients of the batch, computed for `rows` rows at a time and summed in float32."""
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    if rows == batch.tokens.shape[0]:
        (loss, outputs), gradients = value_and_grad(params, batch)
        return loss, outputs, gradients

    def add(sums: tuple[Float[Array, ""], Any], micro: Batch) -> tuple[tuple[Float[Array, ""], Any], TokenLogprobs]:
        (loss, outputs), gradients = value_and_grad(params, micro)
        return jax.tree.map(jnp.add, sums, (loss, gradients)), outputs

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    zeros_BT = jnp.zeros(batch.tokens.shape)
    none = TokenLogprobs(zeros_BT, zeros_BT, zeros_BT, zeros_BT > 0)
    (loss, gradients), outputs = loop(add, (jnp.zeros(()), zeros), none, batch, rows)
    return loss, outputs, gradients


def loop(
    function: Callable[[Carry, Batch], tuple[Carry, Any]], carry: Carry, outputs: Any, batch: Batch, rows: int
) -> tuple[Carry, Any]:
    """The last `carry` of a scan over micro-batches of `rows` rows, and `outputs` [B, T] with theirs written into it.

    It ends with the last micro-batch that has a token with a weight. Which one that is, is known only when the program
    runs: one program serves batches of all sizes. A micro-batch takes every M-th row, so that each device's share of
    its rows stays on that device.
    """
    micro_batches = jax.tree.map(lambda x: x.reshape(rows, -1, x.shape[-1]), batch)
    number = 1 + jnp.arange(len(batch.tokens) // rows)
    last = jnp.max(jnp.where((micro_batches.weights > 0).any((0, 2)), number, 0))

    def step(index: Int[Array, ""], state: tuple[Carry, Any]) -> tuple[Carry, Any]:
        micro = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False), micro_batches)
        carry, parts = function(state[0], micro)
        update = jax.lax.dynamic_update_index_in_dim
        return carry, jax.tree.map(lambda whole, part: update(whole, part, index, 1), state[1], parts)

    apart = jax.tree.map(lambda x: x.reshape(rows, -1, x.shape[-1]), outputs)
    carry, written = jax.lax.fori_loop(0, last, step, (carry, apart))
    return carry, jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), written)
