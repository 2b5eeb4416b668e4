"""The head on TPUs: what a row's slopes by its statistics make of its logits, and of its expectation of W.

Everything here is linear in the number of rows. Leaves out the products, which are the kernels' (`tpu_backward.py`).

Suffixes: N rows, M rows in the kernels' order, D features.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from kernels.lm_head.contract import Inputs, Options, TokenLogprobs
from kernels.lm_head.softmax import Softmax, label_slope
from kernels.lm_head.tpu.backward import Slopes

NEVER = 1e30  # log of a total that makes every probability 0


def slopes_by_row(inputs: Inputs, softmax: Softmax, top_y: Array, slopes: TokenLogprobs, options: Options) -> Slopes:
    """Of y, by `dz = g_logprob (onehot - p) + g_lse p - g_entropy p (log p + entropy)`; none where no row counts."""
    scale = 1 / inputs.temperature
    by_p = slopes.lse - slopes.logprob
    if options.entropy_slopes:
        by_p -= slopes.entropy * softmax.entropy
    return only(
        inputs.live,
        Slopes(
            top=top_y,
            log_sum_e=softmax.log_sum_e,
            at_p=by_p * scale,
            at_p_log_p=-slopes.entropy * scale if options.entropy_slopes else None,
            at_label=label_slope(softmax, slopes, inputs.temperature, options.softcap),
        ),
    )


def only(live: Bool[Array, "M"], slopes: Slopes) -> Slopes:
    """With slopes and probabilities 0 at rows that don't count."""
    zeroed = jax.tree.map(lambda x: jnp.where(live, x, 0), slopes)
    return zeroed._replace(log_sum_e=jnp.where(live, slopes.log_sum_e, NEVER))


def at_rows(slopes: Slopes, row: Integer[Array, "M"], live: Bool[Array, "M"]) -> Slopes:
    return only(live, jax.tree.map(lambda x: x[row], slopes))


def hidden_gradient_from_mean(
    inputs: Inputs,
    options: Options,
    labels: Integer[Array, "N"],
    softmax: Softmax,
    slopes: TokenLogprobs,
    mean: Float[Array, "N D"],
) -> Float[Array, "N D"]:
    """dh, float32, where the entropy has no slope: the label's row of W has its own factor."""
    here = labels >= 0
    w_ND = inputs.weight[jnp.where(here, labels, 0)].astype(options.dtype).astype(jnp.float32)
    own = jnp.where(here, label_slope(softmax, slopes, inputs.temperature, options.softcap), 0)
    at_mean = (slopes.lse - slopes.logprob) / inputs.temperature
    return at_mean[:, None] * mean + own[:, None] * w_ND
