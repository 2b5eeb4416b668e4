"""The head on Hopper GPUs: which kernel runs when.

docs/head.md describes the passes and their number of products. Backward goes over the vocabulary in chunks. Where the
objective is known (`token_loss`), forward keeps logits of as many columns as fit into the memory of dW
(`kept_logits.py`) and into a workspace; or, in waves that add to a float32 dW, of all columns of some rows, if that is
less work (`plan.py`, `Sizes.wave_cost`).

Suffixes: N rows, M those in the kernels' order, R of a wave; D features, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels.lm_head import target
from kernels.lm_head.contract import (
    Gradients,
    Inputs,
    Objective,
    Options,
    Terms,
    gradient_dtypes,
    loss_slopes,
    zeros,
)
from kernels.lm_head.gpu import passes, tiles
from kernels.lm_head.gpu.passes import Kept, finish_softmax, gather_rows
from kernels.lm_head.gpu.plan import Plan, make_plan
from kernels.lm_head.live_rows import live_rows, write
from kernels.lm_head.softmax import Softmax, TokenLogprobs


def obstacle(inputs: Inputs, options: Options) -> str | None:
    if options.dtype != jnp.bfloat16:
        return f"dtype is {options.dtype}, and the kernels multiply in bfloat16"
    for name, dtype in {"hidden": inputs.hidden.dtype, "weight": inputs.weight.dtype}.items():
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {dtype}, and the kernels know bfloat16 and float32"
    vocabulary, features = inputs.weight.shape
    if features % 64 or vocabulary % 8:
        return f"weight is {vocabulary} x {features}, and the kernels need multiples of 8 x 64"
    # Tests set tiles, and interpret the kernels elsewhere.
    return None if tiles.overridden() else target.why_not_hopper()


def statistics(inputs: Inputs, options: Options) -> Softmax:
    sizes = tiles.choose(len(inputs.labels), *inputs.weight.shape)
    live = live_rows(inputs.live, sizes.tiles.cluster_rows)
    rows = gather_rows(inputs, options, sizes, live.row, live.number)
    running, _ = passes.forward(inputs, options, Plan(sizes, len(rows.labels)), rows)
    return finish_softmax(options, jax.tree.map(lambda x: x[live.place], running), inputs.live)


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, None]:
    return statistics(inputs, options), None


def gradients(inputs: Inputs, softmax: Softmax, saved: None, slopes: TokenLogprobs, options: Options) -> Gradients:
    sizes = tiles.choose(len(inputs.labels), *inputs.weight.shape)
    live = live_rows(inputs.live, sizes.rows(len(inputs.labels)))
    rows = gather_rows(inputs, options, sizes, live.row, live.number)
    softmax, slopes = jax.tree.map(lambda x: x[live.row], (softmax, slopes))
    dw_dtype = gradient_dtypes(inputs, options)[1]
    dw = zeros(inputs, *inputs.weight.shape, dtype=dw_dtype) if options.wants_weight else None
    plan = Plan(sizes, len(rows.labels))
    dh, dw = passes.backward(inputs, options, plan, rows, softmax, slopes, Kept(), dw, add=False)
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
        rows = gather_rows(inputs, options, sizes, row_R, jnp.clip(live.number - i * plan.rows, 0, plan.rows))
        running, kept = passes.forward(inputs, options, plan, rows)
        softmax_R = finish_softmax(options, running, live_R)
        slopes_R = loss_slopes(objective, live_R, softmax_R.outputs(), terms.of_rows(row_R))
        dh_RD, dw_VD = passes.backward(inputs, options, plan, rows, softmax_R, slopes_R, kept, dw_VD, add=not one_wave)
        if dh_RD is not None:
            dh_MD = write(dh_MD, dh_RD, i * plan.rows)
        return write(softmax_M, softmax_R, i * plan.rows), dh_MD, dw_VD

    carry = (
        Softmax(*(zeros(inputs, count) for _ in Softmax._fields)),
        zeros(inputs, count, features, dtype=dh_dtype) if options.wants_hidden else None,
        zeros(inputs, *inputs.weight.shape, dtype=sum_dtype) if options.wants_weight else None,
    )
    # The host would have to wait for the device before each step of a loop whose length is found there.
    one = wave(jnp.int32(0), carry) if one_wave else None
    softmax_M, dh_MD, dw = one or live.over_blocks(plan.rows, wave, carry, options.in_step)
    dh = None if dh_MD is None else jnp.where(inputs.live[:, None], dh_MD[live.place], 0)
    softmax = jax.tree.map(lambda x: x[live.place], softmax_M)
    return softmax, (dh, None if dw is None else dw.astype(dw_dtype))
