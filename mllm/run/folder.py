"""Opens a run's folder: locks it, and compares the configuration with the run's earlier configuration.

Settings may differ at a resume always (`FREE`), never (`FIXED`), or with `--change` (all other settings).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mllm.config.load import differences, dump, read
from mllm.config.model import LoraConfig
from mllm.config.places import PLACES
from mllm.config.run import Change, RunConfig
from mllm.errors import UserError
from mllm.parallel.processes import from_writer, is_writer
from mllm.run.metrics import METRICS
from mllm.run.store import CONFIG, Damaged, RunStore, lock_run

FREE = {
    *("run_dir", "mesh", "micro_batch_size", "model.remat", "head", "checkpoint", "log", "changes"),
    *("grpo.row_length", "optimizer.max_skipped"),
    *("task.reward_workers", "data.cache"),
}
"""Sections and settings that may always differ: they change the results of a run at most by rounding."""

FIXED = {
    *("algorithm", "seed", "batch_size", "chat_template"),
    *(f"model.{name}" for name in ("source", "step", "revision", "init", "architecture", "tokenizer", "param_dtype")),
    *("model.lora", "optimizer.moment_dtype"),
    *(f"data.{name}" for name in ("source", "mix", "subset", "split", "columns", "max_length", "packing", "shuffle")),
    *(f"data.validation.{name}" for name in ("source", "split", "share")),
    *(f"task.{name}" for name in ("name", "train", "test", "id", "subset", "columns", "arithmetic", "path", "heldout")),
    *(f"grpo.{name}" for name in ("num_generations", "updates_per_generation", "num_iterations")),
}
"""Settings that may never differ: a checkpoint's arrays and data position depend on them."""


@contextmanager
def open_run(config: RunConfig, change: bool = False) -> Iterator[tuple[RunStore, RunConfig]]:
    """Lock a run's folder; yields its store, and the configuration with the record of changes.

    All processes must enter this. `change` permits settings to differ, as in `check_changes`. UserError is raised if
    the folder has a run of another configuration that has begun, or checkpoints or weights without a config.yaml.
    """
    store = RunStore(config.run_dir)
    with ExitStack() as stack:
        if is_writer():
            stack.enter_context(lock_run(store))
        if (existing := from_writer(partial(read_run, store))) is not None:
            try:
                config = check_changes(store, config, change, *existing)
            except UserError:
                if from_writer(partial(has_begun, store)):
                    raise
                config = config.model_copy(update={"changes": ()})
        elif change:
            raise UserError(f"--change: {store} holds no run; leave it out to begin one")
        else:
            config = config.model_copy(update={"changes": ()})
        yield store, config


def read_run(store: RunStore) -> tuple[dict[str, Any], int, list[dict[str, Any]]] | None:
    """(settings, step, changes) of an existing run: settings and step of its newest checkpoint, and the changes that
    config.yaml records. None if no run has begun."""
    entries = store.entries()
    if CONFIG in entries:
        settings = read(store.folder / CONFIG)
        changes = settings.get("changes") or []
        for step in reversed(store.steps()):
            with suppress(Damaged):
                return store.document(step)["config"], step, changes
        return settings, 0, changes
    if store.steps() or any(name.endswith(".safetensors") for name in entries):
        raise UserError(f"run_dir: {store} holds checkpoints or weights and no config.yaml; give another folder")
    return None


def has_begun(store: RunStore) -> bool:
    """Whether a run has metrics or checkpoints. A start that failed before the first step leaves no metrics."""
    return bool(store.steps() or store.read(METRICS))


def write(store: RunStore, config: RunConfig, write_model: Callable[[Path], None] | None = None) -> None:
    """Write the run's config.yaml, in process 0; UserError if it can't be written.

    `write_model` writes the files of a model's folder. They come first, since config.yaml marks a folder as a run.
    """
    if not is_writer():
        return
    if write_model:
        with TemporaryDirectory() as made:
            write_model(Path(made))
            for path in sorted(path for path in Path(made).rglob("*") if path.is_file()):
                store.write(str(path.relative_to(made)), path.read_bytes())
    store.write(CONFIG, dump(config).encode())


def check_changes(
    run: object, config: RunConfig, permitted: bool, old: dict[str, Any], newest: int, recorded: list[dict[str, Any]]
) -> RunConfig:
    """The configuration with the record of all changes of a run, including new changes from its `old` settings.

    Changes take effect after the step `newest`, the newest checkpoint. UserError, which names `run`, is raised for
    settings that may not differ. Settings outside `FIXED` may differ if `permitted`, or if `recorded` earlier.
    """
    config = with_pins(config, old)
    changes = [Change.model_validate(change) for change in old.get("changes") or ()]
    known = {change["key"]: change["new"] for change in recorded}
    refused = []
    for key, before, after in differences(old, config.model_dump(mode="json")):
        # The checkpoint's document shows whether the files are the same.
        moved = key in PLACES and None not in (before, after) and before != "task"
        if moved or {key, key.split(".")[0]} & FREE:
            continue
        if fixed(key, before, after):
            why = "it can't change, since the state or the position in the data depends on it"
            problem = f"{key}: {run} belongs to a run with {before!r}, not {after!r}; {why}"
            raise UserError(f"{problem}: give another run_dir, or the old value")
        if key == "steps" and config.steps is not None and config.steps <= newest:
            raise UserError(f"steps: {run} has done {newest} already; give more, or another run_dir")
        # With a constant learning rate the steps so far are the same in a longer run.
        extends = key == "steps" and isinstance(before, int) and (config.steps or 0) > before
        if not (permitted or (key in known and known[key] == after)):
            if extends and config.optimizer.schedule == "constant":
                continue
            refused.append(f"{key} {before!r}, not {after!r}")
        changes.append(Change(step=newest, key=key, old=before, new=after))
    if refused:
        keys = ", ".join(problem.split(" ")[0] for problem in refused)
        way_out = "--change goes on with the new values; else give another run_dir, or the old ones"
        raise UserError(f"{keys}: {run} belongs to a run with {'; '.join(refused)}; {way_out}")
    return config.model_copy(update={"changes": tuple(changes)})


def fixed(key: str, before: Any, after: Any) -> bool:
    """Whether a setting may never change: `FIXED`, a section's existence, and whether `max_grad_norm` is null."""
    section = key != "task.template_args" and (isinstance(before, dict) or isinstance(after, dict))
    clips = key == "optimizer.max_grad_norm" and None in (before, after)  # other arrays
    return section or clips or any(f"{key}.".startswith(f"{name}.") for name in FIXED)


def with_pins(config: RunConfig, old: dict[str, Any]) -> RunConfig:
    """The configuration with the run's step, commit, adapters, micro-batch and `remat` in place of open settings."""
    micro = old.get("micro_batch_size")
    if config.micro_batch_size is None and micro and micro % config.shards == 0:
        config = config.model_copy(update={"micro_batch_size": micro})
    if config.model.remat == "auto" and (remat := old["model"].get("remat")) in ("products", "full"):
        config = config.model_copy(update={"model": config.model.model_copy(update={"remat": remat})})
    for name in ("model", "teacher"):
        section, old_section = getattr(config, name, None), old.get(name) or {}
        if section and section.step in (None, "newest", "best"):  # the run began with the step of this number
            section = section.model_copy(update={"step": old_section.get("step")})
        if section and not re.fullmatch("[0-9a-f]{40}", section.revision or ""):  # the commit of this branch
            section = section.model_copy(update={"revision": old_section.get("revision")})
        config = config.model_copy(update={name: section} if section else {})
    if (lora := config.model.lora) and lora.source:  # as the source was when the run began
        old_lora = old["model"].get("lora") or {}
        known = {name: old_lora.get(name) for name in ("rank", "alpha", "rslora", "targets")}
        known |= {name: value for name, value in lora if value is not None}
        model = config.model.model_copy(update={"lora": LoraConfig.model_validate(known)})
        config = config.model_copy(update={"model": model})
    return config
