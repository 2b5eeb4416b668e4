"""Divergence between a teacher's and a student's next-token distributions, from the hidden states of both models.

Neither model's logits are stored as an array. The divergence is `token_loss`'s objective.
"""

from typing import Any

import numpy as np

from .api import token_loss
from .shapes import Array, Float


def divergence_loss(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    teacher_hidden: Float[Array, "*N E"],
    teacher_weight: Float[Array, "W E"],
    **options: Any,
) -> tuple[Float[Array, ""], Float[Array, "*N"]]:
    """`sum_i weights_i * divergence_i`, and the divergences; loss, dh and dW in one pass.

    With r = E / D, the loss takes 3 + r matrix products of 2 N V D flops if `workspace` has room for a wave of both
    models' logits. Otherwise it takes 4 + 2 r (jsd: 5 + 3 r). Divergences are 0 for equal models; below 1e-6 they are
    rounding. Options (`kind`, `beta`, `weights`, ...) and errors are as for `token_loss`.
    """
    labels: Any = np.zeros(np.shape(hidden)[:-1], np.int32)
    teacher: Any = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    itself = lambda logprob, entropy, *, divergence: divergence  # noqa: E731
    loss, tokens = token_loss(hidden, weight, labels, itself, **teacher, **options)
    assert tokens.divergence is not None
    return loss, tokens.divergence
