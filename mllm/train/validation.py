"""SFT's validation: loss, perplexity and token accuracy on documents that training never sees."""

import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from mllm.config.schema import Config
from mllm.data.documents import Documents
from mllm.data.pipeline import validation_batches
from mllm.model.layout import Params
from mllm.model.load import Policy
from mllm.parallel.mesh import shard_batch
from mllm.parallel.processes import RowShare
from mllm.train.step import make_validation_pass


def make_validation(
    config: Config, policy: Policy, mesh: Mesh, documents: Documents | None, poll: Callable[[], None] = lambda: None
) -> Callable[[Params, int], dict[str, float]]:
    """The function (parameters, step) -> metrics that validates on the documents, in batches as large as training's.

    The metrics are `validation/loss` (the mean negative log-probability of a learned token, in nats),
    `validation/perplexity` (its exponential) and `validation/token_accuracy` (the share of learned tokens that are
    the likeliest at their place). All processes call `poll` between two batches; what it raises ends the validation.
    """
    assert config.data and documents  # noqa: PT018
    data, rows = config.data, RowShare.of_mesh(mesh)
    add_up = make_validation_pass(policy.graphdef, config, mesh)

    def validate(params: Params, step: int) -> dict[str, float]:
        sums = []
        for batch in validation_batches(
            data, documents, batch_size=config.batch_size, process_index=rows.index, process_count=rows.count
        ):
            poll()
            sums.append(add_up(params, shard_batch(mesh, batch)))
        logprob, likeliest, tokens = np.array(jax.device_get(sums), np.float64).sum(axis=0).tolist()
        loss = -logprob / tokens
        perplexity = math.exp(loss) if loss < math.log(np.finfo(np.float64).max) else math.inf
        metrics = {"loss": loss, "perplexity": perplexity, "token_accuracy": likeliest / tokens}
        return {f"validation/{name}": value for name, value in metrics.items()}

    return validate
