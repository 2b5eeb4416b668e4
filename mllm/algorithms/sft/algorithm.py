"""SFT: cross-entropy of documents, and the validation on documents that training never sees."""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lm_head import TokenLogprobs
from mllm.algorithms.sft.source import SftBatches, SftSource
from mllm.data.batch import Batch
from mllm.data.source import Source
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch, sharding
from mllm.training.algorithm import Algorithm, Evaluate, Metrics, Parts
from mllm.training.head import Head, States
from mllm.training.means import masked_mean
from mllm.training.step import Forward, loop


class Sft(Algorithm):
    def loss(
        self, head: Head, states: States, batch: Batch, teacher: States | None = None
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        return head.loss(states, batch, cross_entropy)

    def metrics(self, batch: Batch, outputs: TokenLogprobs) -> Metrics:
        return {"entropy": masked_mean(outputs.entropy, batch.weights > 0)}

    def make_source(self, parts: Parts) -> Source:
        return SftSource(parts)

    def evaluations(self, forward: Forward, source: Source, poll: Callable[[], None]) -> Iterable[Evaluate]:
        return example_evaluations(forward, source, poll)


def cross_entropy(logprob: Float[Array, "*S"], entropy: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The loss of each token in nats."""
    return -logprob


def example_evaluations(forward: Forward, source: Source, poll: Callable[[], None]) -> Iterable[Evaluate]:
    """The validation of a source of documents, where it has one."""
    assert isinstance(source, SftSource)
    if source.validation is not None:
        training = source.batches
        batches = SftBatches(training.config, source.validation, training.batch_size, share=source.rows)
        yield make_validation(forward, batches.validate, poll)


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
            token_logprobs = forward.logprobs(params, micro)
            return None, [token_logprobs.logprob, token_logprobs.likeliest.astype(jnp.float32)]

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
