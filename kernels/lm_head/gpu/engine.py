"""The head on Hopper GPUs: which kernel when.

Rows that count are gathered ahead of the others. With F = 2 N V D flops for a product:

- Statistics: the forward kernel, F.
- Backward goes over the vocabulary in chunks: dy of a chunk, [rows, chunk] in bfloat16, from logits computed again; dh
  += dy W; dW's rows, complete at once. 3 F, 2 F for one gradient alone. What it needs beside: the chunk, the gathered
  hidden states and the sum of dh in float32.
- Where the objective is known (`token_loss`), forward keeps logits of as many columns as dW's memory holds until it is
  written (`gpu_loan.py`), and of more with a workspace. For those XLA makes dy without a product: between 4 F and 3 F
  in all, on one line.
- Where dW is wanted in float32, or there is room for such a sum, the workspace can keep all columns of some rows
  instead: waves of 3 F, each of which adds to dW. So it does where that is less work, by arithmetic (`wave_cost`).
- With `filter_eps`, tiles in which every probability is below it, and no label is, are left out of backward: 1 F and
  three times the share of the others, and a gradient that lacks them.

dy has no form as an attention's backward would have, without a buffer: a sum of dh for 128 rows, 1 MiB at 2048
features, is more than a multiprocessor holds.

Left out: the passes (`gpu_passes.py`), their kernels (`gpu_forward.py`, `gpu_backward.py`), and what a workspace is
spent on (`gpu_plan.py`).

Suffixes: N rows, M those in the kernels' order, R of a wave; D features, V vocabulary, U tiles of it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels.lm_head import target
from kernels.lm_head.contract import (
    Gradients,
    Inputs,
    Objective,
    Options,
    Terms,
    TokenLogprobs,
    gradient_dtypes,
    loss_slopes,
    zeros,
)
from kernels.lm_head.gpu import passes as gpu_passes
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.passes import Kept, gathered, softmax_of
from kernels.lm_head.gpu.plan import Plan
from kernels.lm_head.gpu.plan import plan as make_plan
from kernels.lm_head.live_rows import live_rows
from kernels.lm_head.softmax import Softmax


def obstacle(inputs: Inputs, options: Options) -> str | None:
    if options.dtype != jnp.bfloat16:
        return f"dtype is {options.dtype}, and the kernels multiply in bfloat16"
    for name, dtype in {"hidden": inputs.hidden.dtype, "weight": inputs.weight.dtype}.items():
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {dtype}, and the kernels know bfloat16 and float32"
    vocabulary, features = inputs.weight.shape
    if features % 64 or vocabulary % 8:
        return f"weight is {vocabulary} x {features}, and the kernels want multiples of 8 x 64"
    # Elsewhere they can be interpreted, with tiles for that.
    return None if gpu_tiles.overridden() else target.why_not_hopper()


def statistics(inputs: Inputs, options: Options) -> Softmax:
    return forward(inputs, dataclasses.replace(options, filter_eps=None))[0]


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, Float[Array, "N U"] | None]:
    """With the maxima of tiles, if some are to be left out of backward."""
    sizes = gpu_tiles.choose(len(inputs.labels), *inputs.weight.shape)
    live = live_rows(inputs.live, sizes.tiles.cluster_rows)
    rows = gathered(inputs, options, sizes, live.row, live.number)
    running, kept = gpu_passes.forward(inputs, options, Plan(sizes, len(rows.labels)), rows)
    softmax = softmax_of(options, jax.tree.map(lambda x: x[live.place], running), inputs.live)
    return softmax, None if kept.tops is None else kept.tops.T[live.place]


def gradients(
    inputs: Inputs, softmax: Softmax, saved: Float[Array, "N U"] | None, slopes: TokenLogprobs, options: Options
) -> Gradients:
    sizes = gpu_tiles.choose(len(inputs.labels), *inputs.weight.shape)
    live = live_rows(inputs.live, sizes.rows(len(inputs.labels)))
    rows = gathered(inputs, options, sizes, live.row, live.number)
    softmax, slopes = jax.tree.map(lambda x: x[live.row], (softmax, slopes))
    dw = (
        zeros(inputs, *inputs.weight.shape, dtype=gradient_dtypes(inputs, options)[1]) if options.wants_weight else None
    )
    kept = Kept(None if saved is None else saved[live.row].T)
    plan = Plan(sizes, len(rows.labels))
    dh, dw = gpu_passes.backward(inputs, options, plan, rows, softmax, slopes, kept, dw, add=False)
    return None if dh is None else jnp.where(inputs.live[:, None], dh[live.place], 0), dw


def loss_and_gradients(
    inputs: Inputs, objective: Objective, terms: Terms, options: Options
) -> tuple[Softmax, Gradients]:
    plan = make_plan(inputs, options)
    sizes = plan.sizes
    live = live_rows(inputs.live, plan.rows)
    dh_dtype, dw_dtype = gradient_dtypes(inputs, options)
    count, features = len(live.row), inputs.hidden.shape[1]
    one_wave = count == plan.rows
    sum_dtype = dw_dtype if one_wave else jnp.dtype(jnp.float32)

    def wave(i: Array, carry: Any) -> Any:
        softmax_M, dh_MD, dw_VD = carry
        row_R, live_R = live.block(i, plan.rows)
        rows = gathered(inputs, options, sizes, row_R, jnp.clip(live.number - i * plan.rows, 0, plan.rows))
        running, kept = gpu_passes.forward(inputs, options, plan, rows)
        softmax_R = softmax_of(options, running, live_R)
        terms_R = Terms(terms.weights[row_R], tuple(x[row_R] for x in terms.operands), terms.shared)
        slopes_R = loss_slopes(objective, live_R, softmax_R.outputs(), terms_R)
        dh_RD, dw_VD = gpu_passes.backward(
            inputs, options, plan, rows, softmax_R, slopes_R, kept, dw_VD, add=not one_wave
        )
        if dh_RD is not None:
            dh_MD = lax.dynamic_update_slice_in_dim(dh_MD, dh_RD, i * plan.rows, 0)
        softmax_M = jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, i * plan.rows, 0), softmax_M, softmax_R
        )
        return softmax_M, dh_MD, dw_VD

    carry = (
        Softmax(*(zeros(inputs, count) for _ in Softmax._fields)),
        zeros(inputs, count, features, dtype=dh_dtype) if options.wants_hidden else None,
        zeros(inputs, *inputs.weight.shape, dtype=sum_dtype) if options.wants_weight else None,
    )
    in_step = options.token_axes if options.vocabulary_axis else ()
    # A loop as long as the device finds would have to wait for it to tell.
    one = wave(jnp.int32(0), carry) if one_wave else None
    softmax_M, dh_MD, dw = one or live.over_blocks(plan.rows, wave, carry, in_step)
    dh = None if dh_MD is None else jnp.where(inputs.live[:, None], dh_MD[live.place], 0)
    softmax = jax.tree.map(lambda x: x[live.place], softmax_M)
    return softmax, (dh, None if dw is None else dw.astype(dw_dtype))
