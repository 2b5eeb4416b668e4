"""The optimizer: clipping, AdamW (Loshchilov and Hutter 2019), and a schedule."""

import jax
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from mllm.config.model import OptimizerConfig
from mllm.model.layout import Params, parameter_name


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The transformation of gradients to updates in a run of `steps` steps; its `update` needs the parameters, too."""
    schedule = make_schedule(config, steps)
    update = optax.adamw(schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decays)
    if config.moment_dtype is not None:
        update = narrow_moments(update, config.moment_dtype)
    if config.max_grad_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), update)


def narrow_moments(
    optimizer: optax.GradientTransformationExtraArgs, dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with moments that begin with `dtype`; `rounding.updated` returns them with the dtype they had."""

    def init(params: Params) -> optax.OptState:
        return optax.tree.map_params(optimizer, lambda moment: moment.astype(dtype), optimizer.init(params))

    return optax.GradientTransformationExtraArgs(init, optimizer.update)


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the update's number: up over the warm-up, then down to `final_fraction`."""
    peak, rest = config.learning_rate, max(steps - config.warmup_steps, 1)
    match config.schedule:
        case "constant":
            body = optax.constant_schedule(peak)
        case "linear":
            body = optax.linear_schedule(peak, peak * config.final_fraction, rest)
        case "cosine":
            body = optax.cosine_decay_schedule(peak, rest, config.final_fraction)
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
    """True for the parameters to which weight decay applies: all but norms and biases, by their names."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not parameter_name(path).endswith(("norm", "bias")), params)
