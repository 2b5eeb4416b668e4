"""Which of a run's settings may differ when it goes on: always, with `--change`, or never, and why."""

from collections.abc import Iterator
from typing import Any

from mllm.config.schema import Change, Config
from mllm.errors import UserError

FREE = {
    *("run_dir", "mesh", "micro_batch_size", "head", "checkpoint", "log", "changes"),
    *("grpo.row_length", "optimizer.max_skipped"),
    *("task.reward_workers", "data.cache"),
}
"""Sections and settings that say how a run is carried out and when it gives up, not what it computes."""

PLACES = {"data.source", "data.validation.source", "task.train", "task.test", "task.path"}
"""Settings that say where data are. The same data may be elsewhere: their content is compared when they are read."""

CHANGEABLE = {
    "steps",
    *(f"optimizer.{name}" for name in ("learning_rate", "schedule", "warmup_steps", "final_fraction")),
    *(f"optimizer.{name}" for name in ("b1", "b2", "eps", "weight_decay", "max_grad_norm")),
    *("model.remat", "model.attention"),
    *("data.epochs", "data.validation.every", "data.validation.patience", "eval.every", "eval.test"),
    *(f"rollout.{name}" for name in ("max_completion_length", "temperature", "top_p", "top_k", "max_slots")),
    *(f"grpo.{name}" for name in ("loss_type", "epsilon", "epsilon_high", "dual_clip", "beta", "reference")),
    *(f"grpo.{name}" for name in ("entropy_coef", "scale_rewards", "importance_sampling", "importance_cap")),
    *("grpo.dynamic_sampling", "grpo.mask_truncated_completions", "task.rewards", "task.reward_timeout"),
}
"""What a step computes from its parameters, moments and position alone: these stay what they were."""

SAME_EXAMPLES = "the position in the data would be that of other examples"
FIXED = {
    "algorithm": "the source of the data is another",
    "seed": "every random number is made from it",
    "batch_size": "the position in the data counts batches of that size",
    "model": "the checkpoint holds the parameters of that model, computed with these dtypes",
    "optimizer.moment_dtype": "the checkpoint holds moments of that dtype",
    "optimizer.max_grad_norm": "the optimizer's state differs with clipping and without",
    "data.validation": "the losses would not be comparable",
    "data": SAME_EXAMPLES,
    "task": SAME_EXAMPLES,
    "rollout.stop": "the completions' ends would differ from those of its evaluations",
    "rollout": SAME_EXAMPLES,
    "grpo": "the position in the data counts rollouts of that size",
    "eval": "its evaluations would not be comparable",
}
"""Why a section or a setting may never change; of several that apply the first."""


def check_changes(run: object, old: dict[str, Any], config: Config, newest: int, permitted: bool) -> Config:
    """The configuration with the record of all of the run's changes, those from its `old` settings among them.

    Args:
        run: its name, for messages.
        newest: the step of its newest checkpoint, after which changes take effect.
        permitted: whether `CHANGEABLE` settings may differ.

    UserError is raised for a setting that may not differ.
    """
    step = (old.get("model") or {}).get("step")
    if config.model.step in (None, "newest", "best"):  # the run began with the one that has this number
        config = config.model_copy(update={"model": config.model.model_copy(update={"step": step})})
    recorded = [Change.model_validate(change) for change in old.get("changes") or ()]
    for key, before, after in differences(old, config.model_dump(mode="json")):
        moved = key in PLACES and None not in (before, after) and before != "task"
        if moved or {key, key.split(".")[0]} & FREE:
            continue
        if key == "steps" and not permitted and is_extension(config, before):
            continue
        problem = f"{key}: {run} belongs to a run with {before!r}, not {after!r}"
        fixed = why_fixed(key, before, after)
        if fixed or not permitted:
            way_out = f"it can't change ({fixed})" if fixed else "--change goes on with the new value"
            raise UserError(f"{problem}; {way_out}; else give another run_dir, or the old value")
        if key == "steps" and config.steps is not None and config.steps <= newest:
            raise UserError(f"steps: {run} has done {newest} already; give more, or another run_dir")
        for earlier in [change for change in recorded if (change.step, change.key) == (newest, key)]:
            recorded.remove(earlier)  # no step was done with its value
            before = earlier.old
        if before != after:
            recorded.append(Change(step=newest, key=key, old=before, new=after))
    return config.model_copy(update={"changes": tuple(recorded)})


def why_fixed(key: str, old: Any, new: Any) -> str | None:
    """Why the setting may not change from the old to the new value; None if it may."""
    if key in CHANGEABLE and not (key == "optimizer.max_grad_norm" and None in (old, new)):
        return None
    reasons = (reason for name, reason in FIXED.items() if f"{key}.".startswith(f"{name}."))
    return next(reasons, "its steps so far depend on it")


def is_extension(config: Config, steps: Any) -> bool:
    """Whether the run only goes on past its old `steps`: with a constant learning rate those are the same."""
    return config.optimizer.schedule == "constant" and isinstance(steps, int) and (config.steps or 0) > steps


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The settings in which two configurations differ: dotted key, old value, new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new
