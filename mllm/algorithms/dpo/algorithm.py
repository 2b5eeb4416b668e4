"""DPO and its kin: the loss of a micro-batch of preferences, its metrics, and the validation."""

from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lm_head import TokenLogprobs
from mllm.algorithms.dpo.losses import preference_loss, preference_metrics
from mllm.algorithms.dpo.settings import DpoConfig, DpoRun
from mllm.algorithms.dpo.source import PreferenceInputs, PreferenceSource
from mllm.data.batch import Batch
from mllm.model.layout import Params
from mllm.training.head import Head, HeadInputs
from mllm.training.means import masked_mean
from mllm.training.recipe import Demands, Parts, Pass, Recipe, Shape
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
        return {"entropy": entropy, **preference_metrics(dpo, outputs.logprob, batch)}

    def inputs(tokens: Shape, rows: Shape) -> PreferenceInputs:
        return PreferenceInputs(rows, tokens if dpo.needs_reference else None)

    # The reference's pass comes before the optimizer's moments are made.
    passes = (Pass("policy", beside_optimizer=False),) if dpo.needs_reference else ()
    demands = Demands(reference="at_start" if dpo.needs_reference else None, passes=passes, inputs=inputs)

    def source(parts: Parts) -> PreferenceSource:
        return PreferenceSource(config, parts, partial(validation_metrics, dpo))

    return Recipe(loss, metrics, source, demands, PROGRESS)


def validation_metrics(
    config: DpoConfig, forward: Forward, params: Params, batch: Batch
) -> tuple[Metrics, Float[Array, ""]]:
    """The loss and training's metrics of validation examples, and their number."""

    def measure(loss: Float[Array, ""], micro: Batch) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
        logprob = forward.logprobs(params, micro).logprob
        return loss + preference_loss(config, logprob, micro), logprob

    loss, logprob = loop(measure, jnp.zeros(()), jnp.zeros(batch.tokens.shape), batch, forward.shape.micro)
    return {"loss": loss, **preference_metrics(config, logprob, batch)}, 1 / batch.inputs.share[0]
