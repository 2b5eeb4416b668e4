"""Checkpoints of a run's state and configuration, through Orbax.

A checkpoint is written in the background under a temporary name and renamed when it is complete; only then are older
ones deleted. A JSON document in it holds checksums of everything. A checkpoint that can't be read, or isn't what was
written, is put aside with a warning, and the next older one is taken. Each process writes and reads what lies on its
devices; any mesh of any number of processes can read it.
"""

import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from mllm.bucket import stands_for_bucket
from mllm.config.schema import CheckpointConfig
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.parallel.processes import gather_objects, is_writer, raise_everywhere
from mllm.progress import transfer_bar
from mllm.run.checksum import Damaged, checksums, seal, unseal
from mllm.run.chunks import CHUNK_BYTES, open_arrays, read_arrays, release_freed_memory
from mllm.run.quiet_orbax import silence
from mllm.run.remote import SENDING, RemoteFiles
from mllm.run.state import RunState
from mllm.run.storage import find_fault, saved_steps, write_error
from mllm.train.step import TrainState

DOCUMENT = "document"
UNFINISHED = ".orbax-checkpoint-tmp"
ARRAYS = ("params", "optimizer")
"""The items that hold arrays: the parameters can be read without the optimizer."""

logger = logging.getLogger(__name__)
silence()


class Checkpoints:
    """The checkpoints of one run, by step."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, frozen: Params | None = None, *, read_only: bool = False
    ) -> None:
        """Raises UserError if the folder can't be made.

        `frozen` are parameters that are not saved, but known again: those below adapters, or of a reference.
        """
        self.folder = folder.absolute()
        self.config = config
        self.read_only = read_only
        self.frozen = checksums(by_name(frozen)) if frozen else {}
        self.saving: tuple[int, int] | None = None
        """Step and bytes of the checkpoint that is being written."""
        self.save_timings: dict[str, float] = {}
        self.scores: dict[int, float | None] = {}
        """Evaluations of the checkpoints that this process has saved, which may not be on disk yet."""
        self.failed = False
        self.write_failed = False
        """Whether a background thread has failed; set by that thread."""
        self.apart = stands_for_bucket(self.folder)
        """Whether each process has a folder of its own, and the files of all together are a checkpoint in a bucket."""
        with self.report_faults(self.folder):
            self.manager = self.open_manager()

    def open_manager(self) -> ocp.CheckpointManager:
        """Open the folder without reading the checkpoints, since any of them may be damaged."""
        options = ocp.CheckpointManagerOptions(
            read_only=self.read_only,
            lightweight_initialize=True,
            cleanup_tmp_directories=not self.read_only,
            preservation_policy=None if self.read_only else KeepNewestAndBest(self),
            # Otherwise threads wait for a folder that can't be made, and the process for them: five minutes.
            async_options=ocp.AsyncOptions(
                create_directories_asynchronously=False,
                barrier_sync_fn=self.wait_for_processes if jax.process_count() > 1 else None,
            ),
        )
        # Orbax compares what all processes have noted of the arrays, in the one folder that it expects.
        unchecked = {"array_metadata_validator": Unchecked()} if self.apart else {}
        # zstd would take a tenth off the size, and every core for several steps, which then wait for theirs.
        handlers: dict[str, ocp.CheckpointHandler] = {
            # OCDBT's files would have to be merged where all of them are seen, and to be read whole from a bucket.
            name: ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=not self.apart, **unchecked)
            for name in ARRAYS
        }
        handlers[DOCUMENT] = ocp.JsonCheckpointHandler()
        return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def wait_for_processes(self, *, key: str, timeout_ms: int) -> None:
        """Wait until the background threads of all processes are here, unless this one's has failed to write its part.

        Orbax calls it while it unwinds, too, and would keep the error until the others have waited for 20 minutes.
        """
        if error := sys.exc_info()[1]:
            self.write_failed = True
            raise error
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def save(self, state: RunState, config: str, score: float | None = None) -> None:
        """Begin to save; returns as soon as the arrays of `state` may be overwritten. `config` is YAML.

        The checkpoint with the highest `score` is the best. UserError is raised if this checkpoint, or the one
        before, can't be written.
        """
        self.finish()
        self.scores[state.step] = score
        document = {
            **state.document(),
            "config": config,
            "best": score,
            "arrays": checksums(by_name(state.train)),
            "frozen": self.frozen,
        }
        chunked = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
        arrays = {
            name: ocp.args.PyTreeSave(tree, save_args=dict.fromkeys(tree, chunked))
            for name, tree in items(state.train).items()
        }
        arguments = ocp.args.Composite(**arrays, **{DOCUMENT: ocp.args.JsonSave(seal(document))})
        self.saving = state.step, nbytes(state.train)
        with self.report_faults(self.folder / str(state.step)):
            for name in ARRAYS if self.apart and not is_writer() else ():  # which Orbax leaves to the first process
                folder = self.folder / f"{state.step}{UNFINISHED}" / f"{name}{UNFINISHED}"
                (folder / "array_metadatas").mkdir(parents=True)
            self.manager.save(state.step, args=arguments)

    def finish_apart(self, step: int) -> None:
        """Let another folder have a checkpoint as well, for the thread that sends it: Orbax may soon remove this one.

        In other processes than the first, what was written has its unfinished name until now.
        """
        if self.apart:
            for pattern in (f"*/*{UNFINISHED}", f"*{UNFINISHED}") if not is_writer() else ():
                for path in self.folder.glob(pattern):
                    path.rename(path.with_name(path.name.removesuffix(UNFINISHED)))
            sending = self.folder.with_name(SENDING) / str(step)
            shutil.copytree(self.folder / sending.name, sending.with_suffix(".tmp"), copy_function=os.link)
            sending.with_suffix(".tmp").rename(sending)

    def restore(self, like: TrainState) -> RunState | None:
        """The state in the newest undamaged checkpoint, or None if there is no checkpoint at all.

        `like` has the arrays to read as ShapeDtypeStructs, with their shardings. UserError is raised if there
        are checkpoints, and none of them can be read; or a damaged one can't be put aside.
        """
        steps = saved_steps(self.folder)[::-1]
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                arrays, document = self.read(step, items(like))
            except Damaged as error:
                damaged[step] = str(error)
                continue
            # Only what both know: a change of grpo.beta adds a reference, or takes it away.
            if any(self.frozen.get(name, sums) != sums for name, sums in document.get("frozen", {}).items()):
                raise UserError(
                    f"model: {self.folder} belongs to a run with other frozen parameters, or another reference: "
                    "give that model, and the same model.lora.source"
                )
            # Only now: if none can be read the fault may lie elsewhere, and they stay as they are.
            for number, reason in damaged.items():
                self.put_aside(number, reason)
            train = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in by_name(like)])
            return RunState.from_document(step, train, document)
        if steps:
            raise UserError(
                f"{self.folder}: none of its {len(steps)} checkpoints can be read ({damaged[steps[0]]}); "
                "take another run_dir"
            )
        return None

    def restore_params(self, like: Params, step: int | None) -> tuple[int, Params]:
        """The step and parameters of a checkpoint, that of `step` or the newest; UserError where it can't be read."""
        steps = saved_steps(self.folder)
        if not steps or (step is not None and step not in steps):
            raise UserError(f"{self.folder}: no checkpoint{'' if step is None else f' {step}'}; there are {steps}")
        step = steps[-1] if step is None else step
        wanted = {f"params.{name}": leaf for name, leaf in by_name(like).items()}
        try:
            arrays, _ = self.read(step, {"params": wanted})
        except Damaged as error:
            raise UserError(f"{self.folder / str(step)}: can't be read ({error}); take an older step") from None
        return step, jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])

    def best_step(self, steps: Iterable[int]) -> int | None:
        """The step of the best of these checkpoints; None if none has a score."""
        scores = {step: score for step in steps if (score := self.score(step)) is not None}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def score(self, step: int) -> float | None:
        """What a checkpoint is compared by; None if it has no score, or is damaged."""
        if step in self.scores:
            return self.scores[step]
        with suppress(Exception):
            return self.read_document(step).get("best")
        return None

    def read(self, step: int, parts: dict[str, dict[str, Any]]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """The arrays of the wanted `parts` of `items`, by name, and the document; Damaged in all processes alike."""
        with transfer_bar(f"checkpoint {step}", nbytes(parts)) as bar:
            stores, wanted = dict[str, Any](), dict[str, Any]()
            with damaged_everywhere():
                files = RemoteFiles(self.folder / str(step))
                document = self.read_document(step)
                for name, like in parts.items():
                    stores |= open_arrays(self.folder / str(step) / name, like)
                    wanted |= like
            with damaged_everywhere():
                arrays = read_arrays(stores, wanted, bar.update, files.fetch_chunk)
        found, stored = checksums(arrays), document["arrays"]
        if wrong := [name for name in found if found[name] != stored.get(name)]:
            more = f" and of {len(wrong) - 1} others" if wrong[1:] else ""
            raise Damaged(f"the checksum of {wrong[0]}{more} differs")
        return arrays, document

    def read_document(self, step: int) -> dict[str, Any]:
        """The JSON of a checkpoint. Raises Damaged, or whatever a damaged file makes Orbax raise."""
        RemoteFiles(self.folder / str(step)).fetch_documents()
        return unseal(ocp.JsonCheckpointHandler().restore(self.folder / str(step) / DOCUMENT))

    def put_aside(self, step: int, reason: str) -> None:
        """Rename a damaged checkpoint so that nothing takes it for one again; nothing is deleted."""
        if self.read_only:
            logger.warning("checkpoint %d can't be read (%s)", step, reason)
            return
        self.manager.close()
        gather_objects(None)  # all processes have closed it
        with raise_everywhere():
            if is_writer() or self.apart:
                path, aside = self.folder / str(step), self.folder / f"damaged_{step}"
                while aside.exists():
                    aside = aside.with_name(f"{aside.name}_again")
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
        """Wait, with a progress bar, until the save that was begun is on disk; UserError where it can't be written."""
        if self.saving is not None:
            step, size = self.saving
            with transfer_bar(f"saving checkpoint {step}", size) as bar:
                bar.initial = written = min(size, self.bytes_written(step))
                while self.manager.is_saving_in_progress() and not self.write_failed:
                    time.sleep(0.1)
                    before, written = written, min(size, max(written, self.bytes_written(step)))
                    bar.update(written - before)
        self.finish()

    def timings(self) -> dict[str, float]:
        """The speed of a save that has ended since the last call, summed over processes.

        UserError is raised if it couldn't be written: the next `save`, which would say so, may be far away.
        """
        if self.write_failed or not self.manager.is_saving_in_progress():
            self.finish()
        timings, self.save_timings = self.save_timings, {}
        return timings

    def finish(self) -> None:
        """Wait as `wait` does, without a bar."""
        if self.saving is not None:
            step, size = self.saving
            with self.report_faults(self.folder / str(step)):
                self.manager.wait_until_finished()
                self.finish_apart(step)
            self.saving = None
            release_freed_memory()
            with suppress(OSError, ValueError, KeyError):  # Orbax may not have noted the times
                times = json.loads((self.folder / str(step) / "_CHECKPOINT_METADATA").read_text())
                nanoseconds = times["commit_timestamp_nsecs"] - times["init_timestamp_nsecs"]
                self.save_timings = {"save/gb_per_second": size / max(nanoseconds, 1)}

    def bytes_written(self, step: int) -> int:
        """Bytes of an unfinished checkpoint so far, by all processes."""
        with suppress(FileNotFoundError):  # its folders are renamed meanwhile
            return sum(path.stat().st_size for path in self.folder.glob(f"{step}.*/**/*"))
        return 0

    @contextmanager
    def report_faults(self, path: Path) -> Iterator[None]:
        """Turn an error of the operating system into a UserError, and remove what there is of `path`, half-written."""
        try:
            yield
        except Exception as error:  # Orbax and tensorstore wrap it in their own
            fault = find_fault(error)
            if fault is None:
                raise
            self.saving, self.failed = None, True
            if is_writer():
                self.discard(path)
            raise write_error(path, fault, self.folder) from None

    def discard(self, path: Path) -> None:
        """Remove an unfinished checkpoint; what can't be removed now is removed when the folder is opened again."""
        for _ in range(10):  # writes that were begun may end only now
            if not (found := [*self.folder.glob(f"{path.name}.*")]):
                break
            for unfinished in found:
                shutil.rmtree(unfinished, ignore_errors=True)
            time.sleep(0.1)

    def close(self) -> None:
        """Wait for a save that was begun, and let the folder go. Raises as `wait` does."""
        self.finish()
        # A fault was reported when it happened; closing would report it again.
        with suppress(Exception) if self.failed else self.report_faults(self.folder):
            self.manager.close()


class Unchecked:
    """Stands in for Orbax's comparison of arrays between processes, which restoring does by checksums."""

    def validate_all_array_metadatas(self, array_metadatas: Any) -> None:
        pass


class KeepNewestAndBest(PreservationPolicy):
    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        config, steps = self.checkpoints.config, [checkpoint.step for checkpoint in checkpoints]
        kept: set[int | None] = {*steps[-config.keep :]}
        if config.keep_best:
            kept |= {self.checkpoints.best_step(steps)}
        return [step in kept for step in steps]


@contextmanager
def damaged_everywhere() -> Iterator[None]:
    """What one process raises inside, Damaged or anything that a damaged file may cause, is Damaged in all.

    A UserError, of a bucket that fails, remains one: the checkpoint may be sound.
    """
    reason = None
    with raise_everywhere():
        try:
            yield
        except UserError:
            raise
        except Damaged as error:
            reason = str(error)
        except Exception as error:
            reason = first_cause(error)
    if reasons := [reason for reason in gather_objects(reason) if reason is not None]:
        raise Damaged(reasons[0])


def first_cause(error: BaseException) -> str:
    """The error that all others came from, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


def items(state: TrainState) -> dict[str, dict[str, Any]]:
    """The arrays of a state by name, in the items `ARRAYS`."""
    arrays = by_name(state)
    params = {name: leaf for name, leaf in arrays.items() if name.startswith("params.")}
    return dict(zip(ARRAYS, (params, {name: leaf for name, leaf in arrays.items() if name not in params}), strict=True))


def nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def by_name(tree: Any) -> dict[str, Any]:
    """The tree's leaves in order, by their dotted path: a layout on disk that no library's node types are part of."""
    return {
        # Some versions of Flax show the step into a variable as `.value`.
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
