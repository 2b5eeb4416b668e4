"""SFT: cross-entropy of documents, and the validation on documents that training never sees."""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lm_head import TokenLogprobs
from mllm.algorithms.examples import ExampleSource
from mllm.algorithms.rows import BatchPlan, RowBatches
from mllm.config.run import ExampleRun
from mllm.data.batch import Batch
from mllm.data.packing import add_sequence
from mllm.data.source import Evaluate
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch, sharding
from mllm.training.head import Head, HeadInputs
from mllm.training.means import masked_mean
from mllm.training.recipe import Parts, Recipe
from mllm.training.step import Forward, Metrics, loop


def make(config: ExampleRun) -> Recipe[TokenLogprobs]:
    return Recipe(loss, metrics, lambda parts: document_source(config, parts))


def document_source(config: ExampleRun, parts: Parts) -> ExampleSource["DocumentBatches"]:
    """The source of documents, also for distillation."""
    return ExampleSource(config, parts, DocumentBatches, make_validation)


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


def make_validation(forward: Forward, batches: Callable[[], Iterable[Batch]], poll: Callable[[], None]) -> Evaluate:
    """SFT's validation: the function (parameters, step) -> metrics of `batches`, which have each document once.

    `validation/loss` is the mean negative log-probability of a learned token, in nats, and `validation/perplexity` its
    exponential. `validation/token_accuracy` is the share of learned tokens that are the likeliest at their place; ties
    count. All processes call `poll` between two batches; its exceptions end the validation.
    """

    @jax.jit(in_shardings=(None, sharding(forward.mesh, ("batch",))))
    def validation_pass(params: Params, batch: Batch) -> Float[Array, "3"]:
        def measure(_: None, micro: Batch) -> tuple[None, list[Float[Array, "B T"]]]:
            token_logprobs = forward.logprobs(params, micro)
            return None, [token_logprobs.logprob, token_logprobs.likeliest.astype(jnp.float32)]

        zeros = jnp.zeros(batch.tokens.shape)
        outputs = loop(measure, None, [zeros, zeros], batch, forward.shape.micro)[1]
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
