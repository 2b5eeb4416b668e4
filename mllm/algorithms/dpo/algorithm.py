"""DPO and its kin: the loss of a micro-batch of preferences, its metrics, and the validation."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lm_head import TokenLogprobs
from mllm.algorithms.dpo.losses import Sums, means, preference_loss, preference_sums
from mllm.algorithms.dpo.settings import DpoConfig
from mllm.algorithms.dpo.source import PreferenceInputs, PreferenceSource
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.data.source import Source
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch, sharding
from mllm.training.algorithm import Algorithm, Evaluate, Metrics, Parts, Pass
from mllm.training.head import Head, States
from mllm.training.means import masked_mean
from mllm.training.step import Forward, loop


class Dpo(Algorithm):
    progress: Mapping[str, str] = MappingProxyType({"loss": "loss", "preferred": "rewards/accuracies"})
    """`preferred` is the share of pairs whose chosen completion has gained more."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.settings = config.section(DpoConfig)
        if self.settings.needs_reference:
            self.reference = "at_start"
            # The reference's pass comes before the optimizer's moments are made; KTO estimates z0 beside them.
            self.passes = (Pass("policy", beside_optimizer=self.settings.form == "labelled"),)

    def loss(
        self, head: Head, states: States, batch: Batch, teacher: States | None = None
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        """A sequence's loss needs the log-probabilities of all its tokens, which are differentiated."""
        outputs = head.logprobs(states, batch)
        return preference_loss(self.settings, outputs.logprob, batch), jax.lax.stop_gradient(outputs)

    def metrics(self, batch: Batch, outputs: TokenLogprobs) -> Metrics:
        entropy = masked_mean(outputs.entropy, batch.weights > 0)
        return {"entropy": entropy, **means(preference_sums(self.settings, outputs.logprob, batch))}

    def inputs(self, tokens: jax.ShapeDtypeStruct, rows: jax.ShapeDtypeStruct) -> PreferenceInputs:
        labelled = self.settings.form == "labelled"
        reference, labels = tokens if self.settings.needs_reference else None, tokens if labelled else None
        return PreferenceInputs(rows, reference, labels, rows if labelled else None)

    def make_source(self, parts: Parts) -> Source:
        return PreferenceSource(self.settings, parts)

    def evaluations(self, forward: Forward, source: Source, poll: Callable[[], None]) -> Iterable[Evaluate]:
        assert isinstance(source, PreferenceSource)
        if source.heldout is not None:
            yield make_validation(self.settings, forward, source.heldout_batches, poll)


def make_validation(
    config: DpoConfig, forward: Forward, batches: Callable[[Params], Iterable[Batch]], poll: Callable[[], None]
) -> Callable[[Params, int], dict[str, float]]:
    """The function (parameters, step) -> metrics of `batches`, which have each preference once.

    The metrics are `validation/loss` and training's metrics, as `validation/rewards/accuracies`: means over all
    examples. All processes call `poll` between two batches; what it raises ends the validation.
    """

    @jax.jit(in_shardings=(None, sharding(forward.mesh, ("batch",))))
    def validation_pass(params: Params, batch: Batch) -> Sums:
        def measure(loss: Float[Array, ""], micro: Batch) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
            logprob = forward.logprobs(params, micro).logprob
            return loss + preference_loss(config, logprob, micro), logprob

        loss, logprob = loop(measure, jnp.zeros(()), jnp.zeros(batch.tokens.shape), batch, forward.rows.micro)
        examples = 1 / batch.inputs.share[0]
        sums = preference_sums(config, logprob, batch)
        kl = {} if batch.inputs.kl is None else {"kl": (examples * batch.inputs.kl[0], examples)}
        return {"loss": (examples * loss, examples), **sums, **kl}

    def validate(params: Params, step: int) -> dict[str, float]:
        batch_sums = []
        for batch in batches(params):
            poll()
            batch_sums.append(validation_pass(params, shard_batch(forward.mesh, batch)))
        sums = jax.tree.map(lambda *parts: np.sum(np.array(parts, np.float64)), *jax.device_get(batch_sums))
        return {f"validation/{name}": float(value) for name, value in means(sums).items()}

    return validate
