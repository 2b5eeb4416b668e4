"""The head on TPUs: from derivatives by a row's statistics to the numbers that make dy of its logits, and to dh.

Suffixes: N rows, M rows in the kernels' order, D features.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from kernels.lm_head.contract import Inputs, Options, TokenLogprobs
from kernels.lm_head.softmax import Softmax, label_slope
from kernels.lm_head.tpu.backward import RowFactors
from kernels.lm_head.tpu.forward import label_rows

_NEVER = 1e30  # a maximum that makes every probability 0


def row_factors(inputs: Inputs, softmax: Softmax, top_y: Array, slopes: TokenLogprobs, options: Options) -> RowFactors:
    """The factors of dy, 0 where rows don't count."""
    scale = 1 / inputs.temperature
    by_p = slopes.lse - slopes.logprob
    if options.entropy_slopes:
        by_p -= slopes.entropy * softmax.entropy
    at_p = by_p * scale
    at_p_log_p = -slopes.entropy * scale if options.entropy_slopes else None
    at_label = label_slope(softmax, slopes, inputs.temperature, options.softcap)
    return _masked(inputs.live, RowFactors(top_y, softmax.log_sum_e, at_p, at_p_log_p, at_label))


def _masked(live: Bool[Array, "M"], factors: RowFactors) -> RowFactors:
    """Factors that make dy and every probability 0 at rows that don't count."""
    zeroed = jax.tree.map(lambda x: jnp.where(live, x, 0), factors)
    return zeroed._replace(top=jnp.where(live, factors.top, _NEVER))


def gather_factors(factors: RowFactors, row: Integer[Array, "M"], live: Bool[Array, "M"]) -> RowFactors:
    return _masked(live, jax.tree.map(lambda x: x[row], factors))


def hidden_gradient_from_mean(
    inputs: Inputs,
    options: Options,
    labels: Integer[Array, "N"],
    softmax: Softmax,
    slopes: TokenLogprobs,
    share: Float[Array, "N"],
    mean: Float[Array, "N D"],
) -> Float[Array, "N D"]:
    """dh, float32, where the loss doesn't depend on the entropy, from E_q[W] and the probability of its columns."""
    own = jnp.where(labels >= 0, label_slope(softmax, slopes, inputs.temperature, options.softcap), 0)
    at_mean = share * (slopes.lse - slopes.logprob) / inputs.temperature
    return at_mean[:, None] * mean + own[:, None] * label_rows(inputs.weight, labels, options.dtype)
