"""Checkpoints through Orbax: parameters, optimizer, the data's position, and the configuration.

A checkpoint is written beside the others under a temporary name and renamed when it is whole, in the background while
training goes on; only then are older ones deleted. A document in it holds checksums of everything. One that can't be
read any more, or isn't what was written, is put aside with a warning and the next older one is taken. What happens
between a step and its checkpoint's rename is lost with a crash, and done again. Of several processes each writes and
reads what lies on its devices, in a folder that all of them share; another mesh, or another number of processes, reads
it as well.
"""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from mllm.config.schema import CheckpointConfig
from mllm.errors import UserError
from mllm.parallel.processes import gather_objects, is_writer, raise_everywhere
from mllm.progress import transfer_bar
from mllm.run.checksum import Damaged, checksums, seal, unseal
from mllm.run.quiet_orbax import silence
from mllm.run.storage import fault, unwritable
from mllm.train.step import TrainState

BEST = "eval/greedy_accuracy"
"""The metric by which `keep_best` judges."""
DOCUMENT = "document"
"""What is stored beside the arrays: JSON, with a checksum of itself."""

logger = logging.getLogger(__name__)
silence()


class Restored(NamedTuple):
    step: int
    state: TrainState
    position: Any
    """What was passed to `save`: where the source of data stood, as JSON."""


class Checkpoints:
    """The checkpoints of one run, by step."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, read_only: bool = False) -> None:
        """Raises UserError where the folder can't be made."""
        self.folder = folder.absolute()
        self.config = config
        self.read_only = read_only
        self.saving: tuple[int, int] | None = None
        self.ended: dict[str, float] = {}
        self.failed = False
        with self.storing(self.folder):
            self.manager = self.open_manager()

    def open_manager(self) -> ocp.CheckpointManager:
        # Without reading them, since any may be damaged.
        options = {"read_only": True} if self.read_only else {"preservation_policy": Kept(self)}
        return ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                lightweight_initialize=True,
                cleanup_tmp_directories=not self.read_only,
                # Otherwise threads wait for a folder that can't be made, and the process for them: five minutes.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                **options,
            ),
        )

    def save(self, step: int, state: TrainState, position: Any, config: str, metrics: dict[str, Any]) -> None:
        """Begin to save; returns as soon as `state` may be overwritten.

        Args:
            step: updates done.
            position: JSON, of the data source.
            config: the run's configuration, as YAML.
            metrics: of this step; the one by which the best is kept is read from it.

        Raises:
            UserError: this checkpoint, or the one before, can't be written.
        """
        self.finish()
        document = {
            "position": position,
            "config": config,
            "best": metrics.get(BEST),
            "arrays": checksums(by_name(state)),
        }
        arrays = {name: ocp.args.StandardSave(tree) for name, tree in items(state).items()}
        arguments = ocp.args.Composite(**arrays, **{DOCUMENT: ocp.args.JsonSave(seal(document))})
        self.saving = step, nbytes(state)
        with self.storing(self.folder / str(step)):
            self.manager.save(step, args=arguments, metrics={BEST: metrics.get(BEST)})

    def restore(self, like: TrainState) -> Restored | None:
        """The newest sound checkpoint, or None where there is none at all.

        Args:
            like: the state as ShapeDtypeStructs with shardings: what to read, and where to put it.

        Raises:
            UserError: there are checkpoints, and none of them can be read; or a damaged one can't be put aside.
        """
        steps = sorted(self.manager.all_steps(), reverse=True)
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                arrays, document = self.read(step, items(like))
            except Damaged as error:
                damaged[step] = str(error)
                continue
            # Only now: where none can be read the fault may lie elsewhere, and they stay as they are.
            for number, reason in damaged.items():
                self.put_aside(number, reason)
            state = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in by_name(like)])
            return Restored(step, state, document["position"])
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
            arrays, _ = self.read(step, {"params": wanted})
        except Damaged as error:
            raise UserError(f"{self.folder / str(step)}: can't be read ({error}); --step takes an older one") from None
        return step, jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])

    def read(self, step: int, parts: dict[str, dict[str, Any]]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """Arrays of a checkpoint, and its document.

        Args:
            parts: of `items`, those that are wanted.

        Raises:
            Damaged: in one of the processes, and then in all.
        """
        reason = None
        arrays: dict[str, jax.Array] = {}
        document: dict[str, Any] = {}
        try:
            with transfer_bar(f"checkpoint {step}", nbytes(parts)) as bar:
                document = self.document(step)
                for name, tree in parts.items():
                    # Not by the manager, which waits for all processes: one of them may be unable to read its part.
                    reader = ocp.StandardCheckpointHandler()
                    arrays |= reader.restore(self.folder / str(step) / name, args=ocp.args.StandardRestore(tree))
                    bar.update(nbytes(tree))
        except Damaged as error:
            reason = str(error)
        except Exception as error:  # a damaged file can make Orbax raise nearly anything
            reason = first_cause(error)
        if reasons := [reason for reason in gather_objects(reason) if reason is not None]:
            raise Damaged(reasons[0])
        if "arrays" not in document:
            if is_writer():
                logger.warning("checkpoint %d is of before checksums were stored: it's taken as it is", step)
            return arrays, document
        found, stored = checksums(arrays), document["arrays"]
        if wrong := [name for name in found if found[name] != stored.get(name)]:
            more = f" and of {len(wrong) - 1} others" if wrong[1:] else ""
            raise Damaged(f"the checksum of {wrong[0]}{more} differs")
        return arrays, document

    def document(self, step: int) -> dict[str, Any]:
        """What is stored beside the arrays. Of a checkpoint of before there were checksums only the position.

        Raises:
            Damaged, or what a damaged file makes Orbax raise.
        """
        folder, reader = self.folder / str(step), ocp.JsonCheckpointHandler()
        if (folder / "position").exists():
            return {"position": reader.restore(folder / "position")}
        return unseal(reader.restore(folder / DOCUMENT))

    def put_aside(self, step: int, reason: str) -> None:
        """Rename a damaged checkpoint so that it is never taken for one again; nothing is deleted."""
        if self.read_only:
            logger.warning("checkpoint %d can't be read (%s)", step, reason)
            return
        self.manager.close()
        gather_objects(None)  # has closed it
        with raise_everywhere():
            if is_writer():
                path, aside = self.folder / str(step), self.folder / f"damaged_{step}"
                number = 1
                while aside.exists():
                    number += 1
                    aside = self.folder / f"damaged_{step}_{number}"
                try:
                    path.rename(aside)
                except OSError as error:
                    raise UserError(
                        f"{path}: can't be read ({reason}), nor put aside as {aside.name} ({error.strerror}); "
                        "rename or remove it"
                    ) from None
                logger.warning("checkpoint %d can't be read (%s); put aside as %s", step, reason, aside)
        self.manager = self.open_manager()

    def wait(self) -> None:
        """Until what was begun is on disk, with a bar of it.

        Raises:
            UserError: it can't be written.
        """
        if self.saving is not None:
            step, size = self.saving
            with transfer_bar(f"saving checkpoint {step}", size) as bar:
                bar.initial = written = min(size, self.written(step))
                while self.manager.is_saving_in_progress():
                    time.sleep(0.1)
                    before, written = written, min(size, max(written, self.written(step)))
                    bar.update(written - before)
        self.finish()

    def poll(self) -> None:
        """Raises UserError where what was begun has turned out not to be writable: the next `save` may be far away."""
        if not self.manager.is_saving_in_progress():
            self.finish()

    def timings(self) -> dict[str, float]:
        """How fast a save was, by all processes, if one has ended since this was asked before. Raises as `poll`."""
        self.poll()
        told, self.ended = self.ended, {}
        return told

    def finish(self) -> None:
        """As `wait`, in silence."""
        if self.saving is not None:
            step, size = self.saving
            with self.storing(self.folder / str(step)):
                self.manager.wait_until_finished()
            self.saving = None
            with suppress(OSError, ValueError, KeyError):  # where Orbax notes no times
                noted = json.loads((self.folder / str(step) / "_CHECKPOINT_METADATA").read_text())
                # In billionths of a second; bytes in one are GB/s.
                took = noted["commit_timestamp_nsecs"] - noted["init_timestamp_nsecs"]
                self.ended = {"save/gb_per_second": size / max(took, 1)}

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

    @contextmanager
    def storing(self, path: Path) -> Iterator[None]:
        """What the operating system refuses inside becomes a UserError, and what was written of `path` is removed."""
        try:
            yield
        except Exception as error:  # Orbax and tensorstore wrap it in their own
            refused = fault(error)
            if refused is None:
                raise
            self.saving, self.failed = None, True
            if is_writer():
                self.discard(path)
            raise unwritable(path, refused, self.folder) from None

    def discard(self, path: Path) -> None:
        """Remove what there is of an unfinished checkpoint; what can't be is removed by the next manager."""
        for _ in range(10):  # writes that were begun may end only now
            found = [*self.folder.glob(f"{path.name}.*")]
            for unfinished in found:
                shutil.rmtree(unfinished, ignore_errors=True)
            if not found:
                break
            time.sleep(0.1)

    def close(self) -> None:
        self.finish()
        # What could not be written was said; closing would say it again.
        with suppress(Exception) if self.failed else self.storing(self.folder):
            self.manager.close()


class Kept(PreservationPolicy):
    """Which checkpoints stay: the newest `keep`, and with `keep_best` the best; one that was never judged isn't."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        config = self.checkpoints.config
        kept = {info.step for info in checkpoints[-config.keep :]}
        if config.keep_best:
            scores = {info.step: self.score(info) for info in checkpoints}
            judged = {step: score for step, score in scores.items() if score is not None}
            kept |= set(sorted(judged, key=lambda step: (judged[step], step))[-1:])
        return [info.step in kept for info in checkpoints]

    def score(self, info: Any) -> float | None:
        if info.metrics is not None:
            return info.metrics[BEST]  # saved by this process, and perhaps not on disk yet
        with suppress(Exception):  # a damaged one is not the best
            return self.checkpoints.document(info.step).get("best")
        return None


def first_cause(error: BaseException) -> str:
    """What an error came from, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


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
