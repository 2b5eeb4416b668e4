"""Checkpoints of a run's state and configuration.

A checkpoint that can't be read, or isn't what was written, is put aside with a warning, and the next older one is
taken.
"""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mllm.config.schema import CheckpointConfig
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.parallel.processes import gather_objects, is_writer, raise_everywhere
from mllm.progress import transfer_bar
from mllm.run.state import RunState
from mllm.store.checkpoints import Saving, load
from mllm.store.checksum import checksums
from mllm.store.run_store import CHECKPOINTS, Damaged, RunStore
from mllm.train.step import TrainState


class Checkpoints:
    """The checkpoints of one run, by step."""

    def __init__(self, store: RunStore, config: CheckpointConfig, frozen: Any = None) -> None:
        """Removes what saves have left that were cut off; UserError where it can't.

        `frozen` are parameters that are not saved, but known again: those below adapters, of a reference or a teacher.
        """
        self.store, self.config = store, config
        self.frozen = checksums(by_name(frozen)) if frozen else {}
        self.saving: Saving | None = None
        self.save_timings: dict[str, float] = {}
        if is_writer():
            store.remove_unpublished()

    def save(self, state: RunState, config: str, score: float | None = None) -> None:
        """Begin to save; returns as soon as the arrays of `state` may be overwritten. `config` is YAML.

        The checkpoint with the highest `score` is the best. UserError is raised if the checkpoint before can't be
        written.
        """
        self.end_saving()
        document = {**state.document(), "config": config, "best": score, "frozen": self.frozen}
        keep, keep_best = self.config.keep, self.config.keep_best
        self.saving = Saving(self.store, state.step, by_name(state.train), document, keep=keep, keep_best=keep_best)

    def restore(self, like: TrainState, logged: int | None = None) -> RunState | None:
        """The state in the newest undamaged checkpoint, or None if there is no checkpoint at all.

        `like` has the arrays to read as ShapeDtypeStructs, with their shardings; `logged` is the last step of the log.
        If it is given, a checkpoint that lacks lines of the log counts as damaged: from an older one they are made
        again. UserError is raised if there are checkpoints, and none of them can be read; or a damaged one can't be
        put aside.
        """
        steps = common_steps(self.store)[::-1]
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                arrays, document = load(self.store, step, by_name(like))
                state = RunState.from_document(step, with_leaves(like, arrays), document)
                if logged is not None and state.logged_step > logged:
                    raise Damaged(f"metrics.jsonl lacks lines after step {max(0, logged)}, of {state.logged_step}")
            except Damaged as error:
                damaged[step] = str(error)
                continue
            # Only what both know: a change of grpo.beta adds a reference, or takes it away.
            if any(self.frozen.get(name, sums) != sums for name, sums in document["frozen"].items()):
                fault = "belongs to a run with other frozen parameters, or another reference"
                raise UserError(f"model: {self.store} {fault}: give that model, and the same model.lora.source")
            # Only now: if none can be read the fault may lie elsewhere, and they stay as they are.
            with raise_everywhere():
                for number, reason in damaged.items() if is_writer() else ():
                    self.store.put_aside(number, reason)
            return state
        if steps:
            fault = f"none of its {len(steps)} checkpoints can be read ({damaged[steps[0]]})"
            raise UserError(f"{self.store}/{CHECKPOINTS}: {fault}; put back what is missing, or take another run_dir")
        return None

    def wait(self) -> None:
        """Wait, with a progress bar, until a save that was begun has ended; UserError where it can't be written."""
        if saving := self.saving:
            with transfer_bar(f"saving checkpoint {saving.step}", saving.nbytes) as bar:
                while not saving.done:
                    time.sleep(0.1)
                    bar.update(saving.written - bar.n)
        self.end_saving()

    def timings(self) -> dict[str, float]:
        """The speed of a save that has ended since the last call, summed over processes.

        UserError is raised if it couldn't be written: the next `save`, which would say so, may be far away.
        """
        if self.saving and self.saving.done:
            self.end_saving()
        timings, self.save_timings = self.save_timings, {}
        return timings

    def end_saving(self) -> None:
        """Wait as `wait` does, without a bar."""
        if saving := self.saving:
            self.saving = None
            saving.wait()
            self.save_timings = {"save/gb_per_second": saving.nbytes / 1e9 / max(saving.seconds, 1e-9)}

    close = end_saving


def common_steps(store: RunStore) -> list[int]:
    """The steps of the checkpoints that process 0 sees, ascending; all processes must call this."""
    with raise_everywhere():
        return gather_objects(store.steps() if is_writer() else [])[0]


def restore_params(store: RunStore, like: Params, step: int | None = None) -> tuple[int, Params]:
    """The step and parameters of a run's checkpoint, that of `step` or the newest; UserError where it can't be read.

    All processes must call this.
    """
    steps = common_steps(store)
    if not steps or (step is not None and step not in steps):
        raise UserError(f"{store}: no checkpoint{'' if step is None else f' {step}'}; there are {steps}")
    step = steps[-1] if step is None else step
    try:
        arrays, _ = load(store, step, {f"params.{name}": leaf for name, leaf in by_name(like).items()})
    except Damaged as error:
        raise UserError(f"{store}/{CHECKPOINTS}/{step}: can't be read ({error}); take an older step") from None
    return step, with_leaves(like, arrays)


def with_leaves(like: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """The tree `like` with other leaves, in their order."""
    return jax.tree.unflatten(jax.tree.structure(like), arrays.values())


def by_name(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The tree's leaves in order, by their dotted path: a layout on disk that no library's node types are part of."""
    return {
        # Some versions of Flax, 0.12.8 among them, show the step into a variable as `.value`.
        re.sub(r"\.value(?=\.|$)", "", jax.tree_util.keystr(path, simple=True, separator=".")): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    }
