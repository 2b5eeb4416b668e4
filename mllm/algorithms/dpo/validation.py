"""DPO's validation: the loss and the metrics of preferences that training never sees."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mllm.algorithms.dpo.losses import Dpo, Sums, means, preference_loss, preference_sums
from mllm.data.batch import Batch
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch, sharding
from mllm.train.step import Forward, loop


def make_preference_validation(
    forward: Forward, batches: Callable[[Params], Iterable[Batch]], poll: Callable[[], None]
) -> Callable[[Params, int], dict[str, float]]:
    """The function (parameters, step) -> metrics of `batches`, which have each preference once.

    The metrics are `validation/loss` and those of training, as `validation/rewards/accuracies`: means over all
    examples. All processes call `poll` between two batches; what it raises ends the validation.
    """
    assert isinstance(forward.algorithm, Dpo)
    config = forward.algorithm.config

    @jax.jit(in_shardings=(None, sharding(forward.mesh, ("batch",))))
    def validation_pass(params: Params, batch: Batch) -> Sums:
        def measure(loss: Float[Array, ""], micro: Batch) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
            logprob = forward.logprobs(params, micro).logprob
            return loss + preference_loss(config, logprob, micro), logprob

        loss, logprob = loop(measure, jnp.zeros(()), jnp.zeros(batch.tokens.shape), batch, forward.rows.micro)
        examples = 1 / jnp.max(batch.weights)
        sums = preference_sums(config, logprob, batch)
        kl = {} if batch.old_logprobs is None else {"kl": (examples * batch.old_logprobs[0, 0], examples)}
        return {"loss": (examples * loss, examples), **sums, **kl}

    def validate(params: Params, step: int) -> dict[str, float]:
        found = []
        for batch in batches(params):
            poll()
            found.append(validation_pass(params, shard_batch(forward.mesh, batch)))
        sums = jax.tree.map(lambda *parts: np.sum(np.array(parts, np.float64)), *jax.device_get(found))
        return {f"validation/{name}": float(value) for name, value in means(sums).items()}

    return validate
