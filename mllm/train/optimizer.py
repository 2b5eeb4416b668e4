"""The optimizer: an optax chain of clipping, AdamW or Lion, and a schedule with warm-up.

AdamW is Loshchilov and Hutter 2019, Lion is Chen et al. 2023. The moments have the parameters' dtype and layout.
"""

from typing import Any

import jax
import optax

from mllm.config.schema import OptimizerConfig
from mllm.model.decoder import parameter_name


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The chain for a run of `steps` updates; it maps gradients to updates, and is fed the parameters for the decay."""
    schedule = make_schedule(config, steps)
    decay = {"weight_decay": config.weight_decay, "mask": decays}
    if config.name == "adamw":
        update = optax.adamw(schedule, config.b1, config.b2, config.eps, **decay)
    else:
        update = optax.lion(schedule, config.b1, config.b2, **decay)
    if config.max_grad_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), update)


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Step -> learning rate: linearly up over the warm-up, then down to `final_fraction` at `steps`."""
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
    # Step 0 already moves: a warm-up that begins at 0 would waste the first update.
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, body], [config.warmup_steps])


def decays(params: Any) -> Any:
    """A tree of booleans, True where weight decay applies: not to biases and norms.

    Layers are stacked, so a norm's scales and the biases are matrices too: the name decides, not the rank.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: not parameter_name(path).endswith(("norm", "bias")), params)
