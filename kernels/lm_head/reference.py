"""The head with full logits, in the widest dtype there is: the oracle, and the A side of an A/B run.

Says what the head means and nothing of how to be quick: [N, V] logits in float64 where JAX has it (`jax_enable_x64`),
else in float32, differentiated by JAX. Runs only when asked for by name, and ignores `workspace`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.lm_head.contract import Inputs, Objective, Terms, TokenLogprobs, weighted_sum


def token_logprobs(inputs: Inputs, *, softcap: float | None, dtype: jnp.dtype) -> TokenLogprobs:
    wide = jnp.promote_types(jnp.float32, jax.dtypes.canonicalize_dtype(float))
    hidden = _rounded(jnp.where(inputs.live[:, None], inputs.hidden, 0).astype(wide), dtype)
    weight = _rounded(inputs.weight.astype(wide), dtype)
    z = jnp.matmul(hidden, weight.T, precision=jax.lax.Precision.HIGHEST)
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    z = z / inputs.temperature.astype(wide)
    log_p = jax.nn.log_softmax(z)
    hit = inputs.labels[:, None] == jnp.arange(weight.shape[0])
    in_vocabulary = hit.any(axis=1)
    lse = jax.nn.logsumexp(z, axis=1)
    result = TokenLogprobs(
        logprob=jnp.where(in_vocabulary, jnp.sum(jnp.where(hit, log_p, 0), axis=1), -lse),
        lse=lse,
        entropy=-jnp.sum(jnp.exp(log_p) * log_p, axis=1),
    )
    return TokenLogprobs(*(jnp.where(inputs.live, x, 0).astype(jnp.float32) for x in result))


def token_loss(
    inputs: Inputs,
    objective: Objective,
    terms: Terms,
    *,
    softcap: float | None,
    dtype: jnp.dtype,
    workspace: int | None,
) -> tuple[Float[Array, ""], TokenLogprobs]:
    del workspace
    tokens = token_logprobs(inputs, softcap=softcap, dtype=dtype)
    loss = weighted_sum(objective, inputs.live, tokens.logprob, tokens.entropy, terms)
    return loss, jax.lax.stop_gradient(tokens)


def _rounded(x: Float[Array, "_ _"], dtype: jnp.dtype) -> Float[Array, "_ _"]:
    """To what the products' operands can hold; the difference is exact. Derivatives pass unrounded."""
    return x + jax.lax.stop_gradient(x.astype(dtype).astype(x.dtype) - x)
