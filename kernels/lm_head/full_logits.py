"""The head with full logits: the best plain program, as the baseline of the fused engines.

The logits [N, V] are stored once, in float32. The backward pass writes their derivative in the compute dtype, over the
logits if that is float32, or on TPUs. It takes no workspace, and rows that don't count cost as much as rows that count.

It is xla.py's program for one block of all rows and one tile of all columns. Suffixes: N rows, D features, V
vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

from . import contract, target, xla
from .contract import Gradients, Inputs, Options, Terms
from .shapes import Array
from .softmax import Slopes, Softmax

obstacle = xla.obstacle  # it always runs


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, tuple[Array, ...]]:
    """The statistics, and y for backward."""
    plan, masked = plan_of(inputs), xla.zeroed(inputs)
    nothing = (contract.zeros(inputs, 1, plan.block, plan.tile),) * (1 if inputs.teacher is None else 2)
    softmax, y = xla.statistics(plan, masked, options, nothing)
    assert y is not None
    # The label's logit is gathered: XLA drops the sum over all columns that finds it in other engines.
    label, axis = contract.local_labels(masked), options.vocabulary_axis
    label_y = jnp.take_along_axis(y[0][0], jnp.maximum(label, 0)[:, None], axis=1)[:, 0]
    label_y = jnp.where(label < 0, 0, label_y) if axis is None else lax.psum(jnp.where(label < 0, 0, label_y), axis)
    label_z = contract.scales_of(masked, options)[0] * (label_y - softmax.top)
    return softmax._replace(label=jnp.where(masked.live, label_z, 0)), tuple(x[0] for x in y)


def gradients(inputs: Inputs, softmax: Softmax, y: tuple[Array, ...], slopes: Slopes, options: Options) -> Gradients:
    """The products of the derivatives by h·W with W and hidden."""
    plan, masked = plan_of(inputs), xla.zeroed(inputs)
    slopes = jax.tree.map(lambda x: jnp.where(inputs.live, x, 0), slopes)
    dy_NV = xla.slopes_of_tile(plan, masked, options, y, jnp.int32(0), softmax, slopes)
    if target.platform() != "tpu":
        # A TPU's matrix units round a float32 operand themselves: there dy overwrites y, and needs no array of its own.
        dy_NV = dy_NV.astype(options.dtype)
    dh_dtype, dw_dtype = contract.gradient_dtypes(inputs, options)
    dh = dw = None
    if options.wants_hidden:
        dh = xla.product(options, dy_NV, inputs.weight[: plan.vocabulary], (1, 0)).astype(dh_dtype)
    if options.wants_weight:
        dw = xla.product(options, dy_NV, masked.hidden, (0, 0)).astype(dw_dtype)
        dw = jnp.pad(dw, ((0, len(inputs.weight) - len(dw)), (0, 0)))
    return dh, dw


def loss_and_gradients(inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
    softmax, y = forward(inputs, options)
    return softmax, gradients(inputs, softmax, y, contract.loss_slopes(softmax, terms, inputs, options), options)


def plan_of(inputs: Inputs) -> xla.Tiling:
    """All rows and columns as one tile."""
    vocabulary = len(inputs.weight) if inputs.teacher is None else min(len(inputs.weight), len(inputs.teacher.weight))
    return xla.Tiling(len(inputs.labels), vocabulary, 1, vocabulary)
