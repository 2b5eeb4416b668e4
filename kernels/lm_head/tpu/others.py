"""The head on TPUs: a row's softmax from sums over all columns but the label's.

Where the label's p is near 1, the sum of the others' exponentials has all of its digits, which a sum that includes the
label's has lost. So 1 - p, and what follows from it, is as exact as the logits are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from kernels.lm_head.softmax import Softmax

FLOOR = -1e30  # below any product, yet its sums and differences are finite


class Others(NamedTuple):
    """Sums over all columns but the label's, in units of y, with e = exp((y - top) / temperature)."""

    top: Float[Array, "R"]  # the maximum of y; FLOOR where there is no such column, and the sums then mean nothing
    sum_e: Float[Array, "R"]
    sum_e_y: Float[Array, "R"]  # the sum of e (y - top)
    label: Float[Array, "R"]  # the label's y; FLOOR where the label is in none of these columns


def finish(
    others: Others, temperature: Float[Array, ""], live: Bool[Array, "R"], axis: str | None
) -> tuple[Softmax, Float[Array, "R"], Float[Array, "R"]]:
    """The softmax over the columns of all devices along `axis`; its maximum in units of y; this device's share.

    The share is the probability of this device's columns but the label's. All are 0 at rows that don't count. Devices
    exchange two maxima and two sums a row.
    """
    scale = 1 / temperature
    top, label = (others.top, others.label) if axis is None else lax.pmax((others.top, others.label), axis)
    highest = jnp.maximum(top, label)
    shift, label_z = (others.top - highest) * scale, (label - highest) * scale
    sum_e = own = jnp.exp(shift) * others.sum_e
    sum_e_z = jnp.exp(shift) * (others.sum_e_y * scale + shift * others.sum_e)
    if axis is not None:
        sum_e, sum_e_z = lax.psum((sum_e, sum_e_z), axis)
    # Where the label is the maximum, this is log(1 + sum_e), and expm1 is 0.
    log_sum_e = jnp.log1p(sum_e + jnp.expm1(label_z))
    entropy = log_sum_e - (sum_e_z + jnp.exp(label_z) * label_z) * jnp.exp(-log_sum_e)
    softmax = Softmax(highest * scale, log_sum_e, jnp.where(label == FLOOR, -highest * scale, label_z), entropy)
    return jax.tree.map(lambda x: jnp.where(live, x, 0), (softmax, highest, own * jnp.exp(-log_sum_e)))
