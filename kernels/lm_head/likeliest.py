"""Whether a label is the likeliest token, for token accuracy: the vocabulary is seen a tile at a time.

It is plain XLA on every device: the maximum must be over the very numbers that the label's logit is one of, and the
kernels compute that logit apart. It is not differentiable.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from kernels.lm_head import xla
from kernels.lm_head.arguments import check_floating, check_labels, check_tokens, product_dtype
from kernels.lm_head.autodiff import Engine
from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.sharded import HeadSharding, Sharded


def label_is_likeliest(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "*N"],
    *,
    where: Bool[Array, "*N"],
    dtype: object = None,
    sharding: HeadSharding | None = None,
) -> Bool[Array, "*N"]:
    """True where no token has a larger logit `hidden @ weight.T` than the label has, ties included; 1 matrix product.

    It is False where `where` is. The arguments are those of `token_logprobs`; ValueError names the one at fault. A
    temperature or softcap would change nothing.
    """
    check_floating("hidden", hidden)
    check_floating("weight", weight)
    check_tokens(hidden.shape[:-1], "hidden", {"labels": labels, "where": where})
    check_labels(labels, where, vocabulary=len(weight))
    rows = hidden.reshape(-1, hidden.shape[-1])
    inputs = Inputs(rows, weight, labels.reshape(-1), where.reshape(-1), jnp.ones(()))
    engine: Engine = xla
    if sharding is not None and sharding.mesh.size > 1:
        sharding.check(rows, weight)
        engine = Sharded(xla, sharding.in_use())
    # The label's logit less the maximum; XLA drops the sums that nothing else uses.
    below = engine.statistics(inputs, Options(None, product_dtype(dtype, hidden, weight))).label
    return ((below >= 0) & inputs.live).reshape(labels.shape)
