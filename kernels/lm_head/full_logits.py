"""The head with full logits: the strongest plain program, and the baseline that the fused engines are compared with.

The logits [N, V] are stored once, in float32; backward writes their derivative in the compute dtype (over them, if
that is float32, or on TPUs). The entropy's sum and its derivative are computed only where something uses them. It takes
no workspace, and rows that don't count cost as much as the others.

Suffixes: N rows, D features, V vocabulary; `y` is the product of hidden states and weight, `z` the logits.
"""

import jax
import jax.numpy as jnp
from jax import lax

from . import contract, target
from .contract import Gradients, Inputs, Options, Terms
from .shapes import Array, Float
from .softmax import FLOOR, MASKED, Running, Slopes, Softmax, finish_live


def obstacle(inputs: Inputs, options: Options) -> None:
    """Nothing keeps it from running."""


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, Float[Array, "N V"]]:
    """The statistics, and y for backward."""
    hidden_ND, weight_VD = _live_hidden(inputs).astype(options.dtype), inputs.weight.astype(options.dtype)
    y_NV = contract.dot(hidden_ND, weight_VD, (1, 1), options.dtype)
    z_NV = _logits(inputs, options, y_NV)
    top_N = jnp.maximum(z_NV.max(axis=1), FLOOR)  # a shard may have no column of the vocabulary
    below_NV = z_NV - top_N[:, None]
    e_NV = jnp.exp(below_NV)
    label_N = contract.local_labels(inputs)
    label_z_N = jnp.take_along_axis(z_NV, jnp.maximum(label_N, 0)[:, None], axis=1)[:, 0]
    running = Running(top_N, e_NV.sum(axis=1), (e_NV * below_NV).sum(axis=1), jnp.where(label_N < 0, 0, label_z_N))
    return finish_live(running, inputs.live, options.vocabulary_axis), y_NV


def gradients(
    inputs: Inputs, softmax: Softmax, y_NV: Float[Array, "N V"], slopes: Slopes, options: Options
) -> Gradients:
    """The products of `dz = p (g_lse - g_logprob - g_entropy (log p + H)) + g_logprob onehot` with W and hidden."""
    logprob_N1, lse_N1, entropy_N1 = (jnp.where(inputs.live, x, 0)[:, None] for x in slopes)
    z_NV, pull = jax.vjp(lambda y_NV: _logits(inputs, options, y_NV), y_NV)
    log_p_NV = (z_NV - softmax.top[:, None]) - softmax.log_sum_e[:, None]
    by_p_NV = lse_N1 - logprob_N1
    if options.entropy_slopes:
        by_p_NV -= entropy_N1 * (log_p_NV + softmax.entropy[:, None])
    # XLA fuses the comparison with what follows; a scatter would be one more pass.
    hit_NV = lax.broadcasted_iota(jnp.int32, y_NV.shape, 1) == contract.local_labels(inputs)[:, None]
    (dy_NV,) = pull(jnp.exp(log_p_NV) * by_p_NV + jnp.where(hit_NV, logprob_N1, 0))
    if target.platform() != "tpu":
        # A TPU's matrix units round a float32 operand themselves: there dy overwrites y, and needs no array of its own.
        dy_NV = dy_NV.astype(options.dtype)
    dh_dtype, dw_dtype = contract.gradient_dtypes(inputs, options)
    weight_VD, hidden_ND = inputs.weight.astype(options.dtype), _live_hidden(inputs).astype(options.dtype)
    dh = contract.dot(dy_NV, weight_VD, (1, 0), options.dtype).astype(dh_dtype) if options.wants_hidden else None
    dw = contract.dot(dy_NV, hidden_ND, (0, 0), options.dtype).astype(dw_dtype) if options.wants_weight else None
    return dh, dw


def loss_and_gradients(inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
    softmax, y_NV = forward(inputs, options)
    slopes = contract.loss_slopes(inputs.live, softmax, terms)
    return softmax, gradients(inputs, softmax, y_NV, slopes, options)


def _live_hidden(inputs: Inputs) -> Float[Array, "N D"]:
    """Hidden states, 0 at rows that don't count, which may hold anything."""
    return jnp.where(inputs.live[:, None], inputs.hidden, 0)


def _logits(inputs: Inputs, options: Options, y_NV: Float[Array, "N V"]) -> Float[Array, "N V"]:
    z_NV = contract.logits_of(inputs, options, y_NV)
    if inputs.columns is None:
        return z_NV
    column_NV = lax.broadcasted_iota(jnp.int32, y_NV.shape, 1)
    return jnp.where(column_NV < contract.number_of_columns(inputs), z_NV, MASKED)
