"""SFT: cross-entropy of documents, and the validation on documents that training never sees."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lm_head import TokenLogprobs
from mllm.algorithms.examples import ExampleSource
from mllm.algorithms.rows import BatchPlan, RowBatches
from mllm.config.run import ExampleRun
from mllm.data.batch import Batch
from mllm.data.packing import add_sequence
from mllm.model.layout import Params
from mllm.training.head import Head, HeadInputs
from mllm.training.means import masked_mean
from mllm.training.recipe import Parts, Recipe
from mllm.training.step import Forward, Metrics, loop


def make(config: ExampleRun) -> Recipe[TokenLogprobs]:
    return Recipe(loss, metrics, lambda parts: document_source(config, parts))


def document_source(config: ExampleRun, parts: Parts) -> ExampleSource["DocumentBatches"]:
    """The source of documents, also for distillation."""
    return ExampleSource(config, parts, DocumentBatches, validation_metrics)


def loss(
    head: Head, states: HeadInputs, batch: Batch, teacher: HeadInputs | None = None
) -> tuple[Float[Array, ""], TokenLogprobs]:
    return head.loss(states, batch, cross_entropy)


def metrics(batch: Batch, outputs: TokenLogprobs) -> Metrics:
    return {"entropy": masked_mean(outputs.entropy, batch.weights > 0)}


def cross_entropy(logprob: Float[Array, "*S"], entropy: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The loss of each token in nats."""
    return -logprob


class DocumentBatches(RowBatches):
    """Batches of documents; weights are 1 over the number of learned tokens in the whole batch, and 0 elsewhere."""

    def make(self, plan: BatchPlan) -> Batch:
        """This process's rows, padded; rows without a document are padding."""
        batch, local = self.empty(plan)
        weight = 1 / np.sum([self.documents.sizes[index][1] for index, _ in plan])
        documents = self.documents.read([index for index, _ in local])
        for (_, row), document in zip(local, documents, strict=True):
            add_sequence(batch, row, document.tokens, document.counts, weight, len(document.tokens))
        return batch


def validation_metrics(forward: Forward, params: Params, batch: Batch) -> tuple[Metrics, Float[Array, ""]]:
    """The metrics of validation documents, and their number of learned tokens.

    `loss` is the mean negative log-probability of a learned token, in nats. `token_accuracy` is the share of learned
    tokens that are the likeliest at their place; ties count.
    """

    def measure(_: None, micro: Batch) -> tuple[None, list[Float[Array, "B T"]]]:
        token_logprobs = forward.logprobs(params, micro)
        return None, [token_logprobs.logprob, token_logprobs.likeliest.astype(jnp.float32)]

    zeros = jnp.zeros(batch.tokens.shape)
    logprob, likeliest = loop(measure, None, [zeros, zeros], batch, forward.shape.micro)[1]
    tokens = (batch.weights > 0).sum(dtype=jnp.float32)
    loss = -logprob.sum() / tokens
    return {"loss": loss, "perplexity": loss, "token_accuracy": likeliest.sum() / tokens}, tokens
