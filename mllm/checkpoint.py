"""Checkpoints through Orbax: parameters, optimizer, the data's position, and the configuration.

A checkpoint is written beside the others under a temporary name and renamed when it is whole, in the background while
training goes on. One that can't be read any more is put aside with a warning and the next older one is taken. What
happens between a step and its checkpoint's rename is lost with a crash, and done again. Of several processes each
writes and reads what lies on its devices, in a folder that all of them share; another mesh, or another number of
processes, reads it as well.
"""

import logging
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from mllm.config import CheckpointConfig
from mllm.distributed import everyone, writes
from mllm.errors import UserError
from mllm.train_step import TrainState
from mllm.transfer import transfer_bar

BEST = "eval/greedy_accuracy"
"""The metric by which `keep_best` judges."""

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    step: int
    state: TrainState
    position: dict[str, Any]
    """Where the source of data stood, as JSON."""


class Checkpoints:
    """The checkpoints of one run, by step."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, read_only: bool = False) -> None:
        self.folder = folder.absolute()
        self.config = config
        self.read_only = read_only
        self.manager = self.open_manager()
        self.saving: tuple[int, int] | None = None

    def open_manager(self) -> ocp.CheckpointManager:
        if self.read_only:
            return ocp.CheckpointManager(self.folder, options=ocp.CheckpointManagerOptions(read_only=True))
        keep = [LatestN(self.config.keep)]
        if self.config.keep_best:
            # BestN sorts upwards and keeps the end; a checkpoint without the metric was never judged.
            keep.append(BestN(get_metric_fn=lambda m: m[BEST], n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(keep), cleanup_tmp_directories=True
        )
        return ocp.CheckpointManager(self.folder, options=options)

    def save(
        self, step: int, state: TrainState, position: dict[str, Any], config: str, metrics: dict[str, Any]
    ) -> None:
        """Begin to save; returns as soon as `state` may be overwritten.

        Args:
            step: updates done.
            position: JSON, of the data source.
            config: the run's configuration, as YAML.
            metrics: of this step; the one by which the best is kept is read from it.
        """
        arrays = {name: ocp.args.StandardSave(tree) for name, tree in items(state).items()}
        documents = {"position": ocp.args.JsonSave(position), "config": ocp.args.JsonSave({"yaml": config})}
        best = {BEST: metrics[BEST]} if BEST in metrics else None
        self.saving = step, nbytes(state)
        self.manager.save(step, args=ocp.args.Composite(**arrays, **documents), metrics=best)

    def restore(self, like: TrainState) -> Restored | None:
        """The newest sound checkpoint, or None where there is none at all.

        Args:
            like: the state as ShapeDtypeStructs with shardings: what to read, and where to put it.

        Raises:
            UserError: there are checkpoints, and none of them can be read.
        """
        steps = sorted(self.manager.all_steps(), reverse=True)
        damaged: dict[int, str] = {}
        for step in steps:
            reason = None
            try:
                with transfer_bar(f"checkpoint {step}", nbytes(like)) as bar:
                    position = self.read(step, {}, position=ocp.args.JsonRestore())["position"]
                    arrays: dict[str, Any] = {}
                    for name, tree in items(like).items():
                        arrays |= self.read(step, {name: tree})[name]
                        bar.update(nbytes(tree))
            except Exception as error:  # a damaged file can make Orbax raise nearly anything
                reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
            if reasons := [reason for reason in everyone(reason) if reason is not None]:
                damaged[step] = reasons[0]
                continue
            # Only now: where none can be read the fault may lie elsewhere, and they stay as they are.
            for number, reason in damaged.items():
                aside = self.put_aside(number)
                if writes():
                    logger.warning("checkpoint %d can't be read (%s); put aside as %s", number, reason, aside)
            state = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in by_name(like)])
            return Restored(step, state, position)
        if steps:
            raise UserError(
                f"{self.folder}: none of its {len(steps)} checkpoints can be read ({damaged[steps[0]]}); "
                "take another run_dir"
            )
        return None

    def restore_params(self, like: Any, step: int | None) -> tuple[int, Any]:
        """The parameters of a step, or of the newest, and the step. `like` as in `restore`, the parameters alone."""
        steps = sorted(self.manager.all_steps())
        if not steps or (step is not None and step not in steps):
            raise UserError(f"{self.folder}: no checkpoint{'' if step is None else f' {step}'}; there are {steps}")
        step = steps[-1] if step is None else step
        wanted = {f"params.{name}": leaf for name, leaf in by_name(like).items()}
        try:
            found = self.read(step, {"params": wanted})["params"]
        except Exception as error:  # as above
            raise UserError(f"{self.folder / str(step)}: can't be read ({error}); --step takes an older one") from None
        return step, jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])

    def read(self, step: int, arrays: dict[str, Any], **documents: Any) -> Any:
        wanted = {name: ocp.args.StandardRestore(tree) for name, tree in arrays.items()}
        return self.manager.restore(step, args=ocp.args.Composite(**wanted, **documents))

    def put_aside(self, step: int) -> Path:
        """Rename a checkpoint so that it is never taken for one again; nothing is deleted."""
        self.manager.close()
        everyone(None)  # has closed it
        aside = self.folder / f"damaged_{step}"
        number = 1
        while aside.exists():
            number += 1
            aside = self.folder / f"damaged_{step}_{number}"
        everyone(None)  # has found the same name
        if writes():
            (self.folder / str(step)).rename(aside)
        everyone(None)  # sees it renamed
        self.manager = self.open_manager()
        return aside

    def wait(self) -> None:
        """Until what was begun is on disk, with a bar of it."""
        if self.saving is not None:
            step, size = self.saving
            with transfer_bar(f"saving checkpoint {step}", size) as bar:
                bar.initial = written = min(size, self.written(step))
                while self.manager.is_saving_in_progress():
                    time.sleep(0.1)
                    before, written = written, min(size, max(written, self.written(step)))
                    bar.update(written - before)
        self.manager.wait_until_finished()

    def written(self, step: int) -> int:
        """Bytes of an unfinished checkpoint so far, by all processes."""
        found = 0
        for unfinished in self.folder.glob(f"{step}.*"):
            # Its folders are renamed meanwhile; `os.walk` passes over what is no longer there.
            for folder, _, names in os.walk(unfinished):
                for name in names:
                    with suppress(FileNotFoundError):
                        found += Path(folder, name).stat().st_size
        return found

    def close(self) -> None:
        self.manager.close()


def items(state: TrainState) -> dict[str, dict[str, Any]]:
    """What is stored of a state, in two parts: the parameters can be read without the optimizer."""
    arrays = by_name(state)
    params = {name: leaf for name, leaf in arrays.items() if name.startswith("params.")}
    return {
        "params": params,
        "optimizer": {name: leaf for name, leaf in arrays.items() if name not in params},
    }


def nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def by_name(tree: Any) -> dict[str, Any]:
    """The tree's leaves in order, by their dotted path: a layout on disk that no library's node types are part of."""
    return {
        # Some versions of Flax show the step into a variable as `.value`.
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
