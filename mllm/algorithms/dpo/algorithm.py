"""DPO and its kin: the loss of a micro-batch of preferences, its metrics, and the validation."""

from collections.abc import Callable, Iterable
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lm_head import TokenLogprobs
from mllm.algorithms.dpo.losses import Sums, means, preference_loss, preference_sums
from mllm.algorithms.dpo.settings import DpoConfig, DpoRun
from mllm.algorithms.dpo.source import PreferenceInputs, PreferenceSource
from mllm.data.batch import Batch
from mllm.data.source import Evaluate
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch, sharding
from mllm.training.head import Head, HeadInputs
from mllm.training.means import masked_mean
from mllm.training.recipe import Demands, Pass, Recipe, Shape
from mllm.training.step import Forward, Metrics, loop

PROGRESS = MappingProxyType({"loss": "loss", "preferred": "rewards/accuracies"})
"""`preferred` is the share of pairs with a higher reward of the chosen completion."""


def make(config: DpoRun) -> Recipe[TokenLogprobs]:
    dpo = config.dpo

    def loss(
        head: Head, states: HeadInputs, batch: Batch, teacher: HeadInputs | None = None
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        """A sequence's loss needs the log-probabilities of all its tokens, which are differentiated."""
        outputs = head.logprobs(states, batch)
        return preference_loss(dpo, outputs.logprob, batch), jax.lax.stop_gradient(outputs)

    def metrics(batch: Batch, outputs: TokenLogprobs) -> Metrics:
        entropy = masked_mean(outputs.entropy, batch.weights > 0)
        return {"entropy": entropy, **means(preference_sums(dpo, outputs.logprob, batch))}

    def inputs(tokens: Shape, rows: Shape) -> PreferenceInputs:
        return PreferenceInputs(rows, tokens if dpo.needs_reference else None)

    # The reference's pass comes before the optimizer's moments are made.
    passes = (Pass("policy", beside_optimizer=False),) if dpo.needs_reference else ()
    demands = Demands(reference="at_start" if dpo.needs_reference else None, passes=passes, inputs=inputs)

    def validation(forward: Forward, batches: Callable[[], Iterable[Batch]], poll: Callable[[], None]) -> Evaluate:
        return make_validation(dpo, forward, batches, poll)

    return Recipe(loss, metrics, lambda parts: PreferenceSource(config, parts, validation), demands, PROGRESS)


def make_validation(
    config: DpoConfig, forward: Forward, batches: Callable[[], Iterable[Batch]], poll: Callable[[], None]
) -> Evaluate:
    """The function (parameters, step) -> metrics of `batches`, which have each preference once.

    The metrics are `validation/loss` and training's metrics, as `validation/rewards/accuracies`: means over the
    examples. All processes call `poll` between two batches; its exceptions end the validation.
    """

    @jax.jit(in_shardings=(None, sharding(forward.mesh, ("batch",))))
    def validation_pass(params: Params, batch: Batch) -> Sums:
        def measure(loss: Float[Array, ""], micro: Batch) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
            logprob = forward.logprobs(params, micro).logprob
            return loss + preference_loss(config, logprob, micro), logprob

        loss, logprob = loop(measure, jnp.zeros(()), jnp.zeros(batch.tokens.shape), batch, forward.shape.micro)
        examples = 1 / batch.inputs.share[0]
        sums = preference_sums(config, logprob, batch)
        return {"loss": (examples * loss, examples), **sums}

    def validate(params: Params, step: int) -> dict[str, float]:
        batch_sums = []
        for batch in batches():
            poll()
            batch_sums.append(validation_pass(params, shard_batch(forward.mesh, batch)))
        sums = jax.tree.map(lambda *parts: np.sum(np.array(parts, np.float64)), *jax.device_get(batch_sums))
        return {f"validation/{name}": float(value) for name, value in means(sums).items()}

    return validate
