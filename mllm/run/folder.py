"""A run's place belongs to one configuration, and to one run of processes at a time.

Which settings may differ when the run goes on: always, with `--change`, or never.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mllm.config.load import differences, dump, read
from mllm.config.model import LoraConfig
from mllm.config.run import Change, RunConfig
from mllm.errors import UserError
from mllm.model.folder import EXPORTED
from mllm.parallel.processes import from_writer, is_writer, raise_everywhere
from mllm.store.holder import hold
from mllm.store.run_store import CHECKPOINTS, CONFIG, LOCK, UNFINISHED, RunStore

FREE = {
    *("run_dir", "mesh", "micro_batch_size", "head", "checkpoint", "log", "changes"),
    *("grpo.row_length", "optimizer.max_skipped"),
    *("task.reward_workers", "data.cache"),
}
"""Sections and settings that say how a run is carried out and when it gives up, not what it computes."""

PLACES = {
    **dict.fromkeys(("model.source", "model.tokenizer"), "digests"),
    **dict.fromkeys(("task.train", "task.test", "task.path"), "digests"),
    **dict.fromkeys(("data.source", "data.validation.source"), "position"),
    "teacher.source": "frozen",
}
"""Settings that say where data are, and the part of a checkpoint's document by which a resume knows that the same data
are there; so they may be elsewhere then."""

CHANGEABLE = {
    "steps",
    *(f"optimizer.{name}" for name in ("learning_rate", "schedule", "warmup_steps", "final_fraction")),
    *(f"optimizer.{name}" for name in ("b1", "b2", "eps", "weight_decay", "max_grad_norm")),
    *("model.remat", "model.attention"),
    *("data.epochs", "data.validation.every", "data.validation.patience", "eval.every", "eval.test"),
    *(f"rollout.{name}" for name in ("max_completion_length", "temperature", "top_p", "top_k", "min_p")),
    *("rollout.weights", "rollout.max_slots"),
    *(f"grpo.{name}" for name in ("loss_type", "epsilon", "epsilon_high", "dual_clip", "beta", "reference")),
    *(f"grpo.{name}" for name in ("entropy_coef", "scale_rewards", "importance_sampling", "importance_cap")),
    *(f"dpo.{name}" for name in ("loss_type", "beta", "label_smoothing", "gamma")),
    *("dpo.desirable_weight", "dpo.undesirable_weight"),
    *("grpo.baseline", "grpo.dynamic_sampling", "grpo.mask_truncated_completions"),
    *("task.rewards", "task.reward_timeout", "task.environment", "task.tools"),
    *("rollout.max_turns", "rollout.max_total_length"),
    *("distill.kind", "distill.beta", "distill.label_coef"),
}
"""Settings of what a step computes from its parameters, moments and position alone, which stay what they were."""


@contextmanager
def claim(config: RunConfig, change: bool = False) -> Iterator[tuple[RunStore, RunConfig]]:
    """Hold the place of a run; yields it, and the configuration to go on or begin with, with the record of its changes.

    All processes must enter this. `change` permits settings to differ as `check_changes` says. UserError is raised if
    the place holds a run of another configuration, or something that is no run.
    """
    store = RunStore(config.run_dir)
    with hold(store):
        with raise_everywhere():
            if (existing := from_writer(partial(look, store))) is not None:
                config = check_changes(store, config, change, *existing)
            elif change:
                raise UserError(f"--change: {store} holds no run; leave it out to begin one")
            else:
                config = config.model_copy(update={"changes": ()})
        yield store, config


def look(store: RunStore) -> tuple[dict[str, Any], int] | None:
    """The configuration of the run that is there and its newest checkpoint's step; None in an empty place."""
    entries = store.entries()
    if CONFIG in entries:
        return read(store.folder / CONFIG), max(store.steps(), default=0)
    # A run that was killed before it began leaves these.
    leftover = {name for name in entries if EXPORTED.fullmatch(name.removesuffix(UNFINISHED))}
    if {*entries} - leftover - {CONFIG + UNFINISHED, LOCK, CHECKPOINTS} or store.steps():
        raise UserError(f"run_dir: {store} holds other files and no config.yaml; give an empty or new folder")
    return None


def write(store: RunStore, config: RunConfig, write_model: Callable[[Path], None] | None = None) -> None:
    """Write the run's config.yaml, in the first of several processes; UserError where it can't be written.

    `write_model` writes the files of a model's folder, which come first: where config.yaml is, a run has begun.
    """
    if not is_writer():
        return
    if write_model:
        with TemporaryDirectory() as made:
            write_model(Path(made))
            for path in sorted(path for path in Path(made).rglob("*") if path.is_file()):
                store.write(str(path.relative_to(made)), path.read_bytes())
    store.write(CONFIG, dump(config).encode())


def check_changes(run: object, config: RunConfig, permitted: bool, old: dict[str, Any], newest: int) -> RunConfig:
    """The configuration with the record of all changes of a run, also the ones from its `old` settings.

    Changes take effect after its `newest` checkpoint. UserError, in which `run` is named, is raised for a setting that
    may not differ: one of `CHANGEABLE` may if it is `permitted`.
    """
    for name in ("model", "teacher"):
        section, begun = getattr(config, name, None), old.get(name) or {}
        if section and section.step in (None, "newest", "best"):  # the run began with the step of this number
            section = section.model_copy(update={"step": begun.get("step")})
        if section and not re.fullmatch("[0-9a-f]{40}", section.revision or ""):  # the commit of this branch
            section = section.model_copy(update={"revision": begun.get("revision")})
        config = config.model_copy(update={name: section} if section else {})
    if (lora := config.model.lora) and lora.source:  # what the source had when the run began
        begun = old["model"].get("lora") or {}
        known = {name: begun.get(name) for name in ("rank", "alpha", "rslora", "targets")}
        known |= {name: value for name, value in lora if value is not None}
        model = config.model.model_copy(update={"lora": LoraConfig.model_validate(known)})
        config = config.model_copy(update={"model": model})
    changes = [Change.model_validate(change) for change in old.get("changes") or ()]
    # A run that is older than the setting lacks it.
    for key, before, after in differences({"chat_template": "auto"} | old, config.model_dump(mode="json")):
        # A checkpoint has the adapters of model.lora.source.
        moved = key in {*PLACES, "model.lora.source"} and None not in (before, after) and before != "task"
        if moved or {key, key.split(".")[0]} & FREE:
            continue
        # With a constant learning rate the steps so far are the same in a longer run.
        extends = key == "steps" and isinstance(before, int) and (config.steps or 0) > before
        if extends and config.optimizer.schedule == "constant" and not permitted:
            continue
        changeable = key in CHANGEABLE and not (key == "optimizer.max_grad_norm" and None in (before, after))
        if not (changeable and permitted):
            fixed = "it can't change, since the steps so far, or the position in the data, depend on it"
            way_out = "--change goes on with the new value" if changeable else fixed
            problem = f"{key}: {run} belongs to a run with {before!r}, not {after!r}"
            raise UserError(f"{problem}; {way_out}; else give another run_dir, or the old value")
        if key == "steps" and config.steps is not None and config.steps <= newest:
            raise UserError(f"steps: {run} has done {newest} already; give more, or another run_dir")
        for earlier in [change for change in changes if (change.step, change.key) == (newest, key)]:
            changes.remove(earlier)  # no step was made with it
            before = earlier.old
        if before != after:
            changes.append(Change(step=newest, key=key, old=before, new=after))
    return config.model_copy(update={"changes": tuple(changes)})
