"""SFT's validation: loss, perplexity and token accuracy on documents that training never sees."""

import math
from collections.abc import Callable

import jax
import numpy as np

from mllm.config.data import DataConfig
from mllm.data.sft_source import SftBatches
from mllm.data.tokenizing import Documents
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch
from mllm.parallel.processes import RowShare
from mllm.train.step import Forward, make_validation_pass


def make_validation(
    config: DataConfig, batch_size: int, documents: Documents, forward: Forward, poll: Callable[[], None] = lambda: None
) -> Callable[[Params, int], dict[str, float]]:
    """The function (parameters, step) -> metrics that validates on the documents, in batches as large as training's.

    The metrics are `validation/loss` (the mean negative log-probability of a learned token, in nats),
    `validation/perplexity` (its exponential) and `validation/token_accuracy` (the share of learned tokens that are
    the likeliest at their place). All processes call `poll` between two batches; what it raises ends the validation.
    """
    batches = SftBatches(config, documents, batch_size, share=RowShare.of_mesh(forward.mesh))
    add_up = make_validation_pass(forward)

    def validate(params: Params, step: int) -> dict[str, float]:
        sums = []
        for batch in batches.validate():
            poll()
            sums.append(add_up(params, shard_batch(forward.mesh, batch)))
        logprob, likeliest, tokens = np.array(jax.device_get(sums), np.float64).sum(axis=0).tolist()
        loss = -logprob / tokens
        perplexity = math.exp(loss) if loss < math.log(np.finfo(np.float64).max) else math.inf
        metrics = {"loss": loss, "perplexity": perplexity, "token_accuracy": likeliest / tokens}
        return {f"validation/{name}": value for name, value in metrics.items()}

    return validate
