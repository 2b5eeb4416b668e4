"""The optimizer: clipping, AdamW (Loshchilov and Hutter 2019), a schedule, and updates of bfloat16 numbers.

Updates of bfloat16 numbers are computed in float32 and rounded up or down at random, so that their mean is exact. A
learning rate of 1e-6 moves a weight by much less than half the distance of two bfloat16 numbers. With rounding to
nearest the weight would never move. The optimizer's moments, which would stall with b2 near 1, are rounded in the same
way. docs/log.md has the figures.

Stochastic rounding: Gupta et al. 2015, Deep learning with limited numerical precision, section 3.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, keystr
from jaxtyping import Array, Int, Key

from mllm.config.model import OptimizerConfig
from mllm.model.compute_copy import dither
from mllm.model.layout import Params, parameter_name


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The transformation of gradients to updates in a run of `steps` steps; its `update` needs the parameters."""
    schedule = make_schedule(config, steps)
    update = optax.adamw(schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decays)
    if (dtype := config.moment_dtype) is not None:
        wide = update

        def init(params: Params) -> optax.OptState:
            """The moments begin with `dtype`; `updated` returns them with the dtype that they had."""
            return optax.tree.map_params(wide, lambda moment: moment.astype(dtype), wide.init(params))

        update = optax.GradientTransformationExtraArgs(init, wide.update)
    if config.max_grad_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), update)


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the update's number: up over the warm-up, then down to `final_fraction`."""
    peak, decay_steps = config.learning_rate, max(steps - config.warmup_steps, 1)
    match config.schedule:
        case "constant":
            body = optax.constant_schedule(peak)
        case "linear":
            body = optax.linear_schedule(peak, peak * config.final_fraction, decay_steps)
        case "cosine":
            body = optax.cosine_decay_schedule(peak, decay_steps, config.final_fraction)
    if config.warmup_steps == 0:
        return body
    # The first update already has a rate: a warm-up that begins at 0 would waste it.
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, body], [config.warmup_steps])


def update_count(opt_state: optax.OptState) -> Int[Array, ""]:
    """The number of updates that the optimizer has made: skipped ones don't count. The schedule's next argument."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda leaf: isinstance(leaf, optax.ScaleByScheduleState))
    (count,) = (state.count for state in states if isinstance(state, optax.ScaleByScheduleState))
    return count


def decays(params: Params) -> Params:
    """True for the parameters with weight decay: every parameter but norms, biases and rates, by name."""
    vectors = ("norm", "bias", "decay_log")
    return jax.tree_util.tree_map_with_path(lambda path, _: not parameter_name(path).endswith(vectors), params)


def updated(
    optimizer: optax.GradientTransformation,
    gradients: Params,
    params: Params,
    opt_state: optax.OptState,
    key: Key[Array, ""],
) -> tuple[Params, optax.OptState]:
    """Parameters and optimizer state after an update, with unchanged dtypes; `key` is the update's random key."""
    wide = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,  # not counts
        (gradients, opt_state, params),
    )
    updates, state = optimizer.update(*wide)
    results = optax.apply_updates(wide[2], updates), state

    def narrow(path: KeyPath, value: Any, old: Any) -> Any:
        if value.dtype == old.dtype:
            return value
        bits = jax.random.bits(jax.random.fold_in(key, zlib.crc32(keystr(path).encode())), value.shape, jnp.uint16)
        return dither(value, bits.astype(jnp.uint32))  # with random bits: rounded at random

    return jax.tree_util.tree_map_with_path(narrow, results, (params, opt_state))


def update_key(seed: int, step: Any) -> Key[Array, ""]:
    """The random key of an update; no token is sampled with it."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(b"rounding"))
    return jax.random.fold_in(key, step)
