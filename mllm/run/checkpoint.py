"""Checkpoints of a run's state, in a directory of Orbax's `CheckpointManager` that plain Orbax can open.

    7/state      a nested dict: `params`, `opt_state`, `step`, with the names that the model has
    7/document   JSON: step, positions, counts, configuration, dependencies, checksums, lengths of logs
    7/metrics    {"score": x} of a run with `checkpoint.keep_best`

Orbax writes while training goes on, publishes a checkpoint as a whole, and removes old checkpoints and the remains of
killed saves. Orbax returns flipped bits as numbers, so the arrays' checksums are compared here. A damaged checkpoint is
renamed with a warning, and the next older checkpoint is taken. All processes take part.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from mllm.config.run import CheckpointConfig
from mllm.errors import UserError, brief
from mllm.model.layout import Params
from mllm.model.weights import is_finite
from mllm.parallel.processes import from_writer, gather_objects, raise_everywhere
from mllm.progress import transfer_bar
from mllm.run.checksum import checksums
from mllm.run.metrics import TIMINGS
from mllm.run.state import RunState
from mllm.run.store import CHECKPOINTS, Damaged, RunStore
from mllm.storage import failing, is_of_storage
from mllm.training.step import TrainState

# Orbax warns of waits of seconds, and its threads and asyncio each log the traceback of a failed save.
for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)

report_unraisable = sys.unraisablehook


def report_others(unraisable: Any) -> None:
    """Suppress asyncio's report of a request that tensorstore dropped after another request had failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        report_unraisable(unraisable)


sys.unraisablehook = report_others


@dataclass(frozen=True)
class Best:
    """Orbax's policy that preserves the best checkpoint. Unlike BestN, it reads the scores of earlier processes."""

    store: RunStore

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        own = {info.step: info.metrics["score"] for info in checkpoints if info.metrics}
        best = self.store.best_step([info.step for info in checkpoints], own)
        return [info.step == best for info in checkpoints]


class Checkpoints:
    """The checkpoints of one run, by step."""

    def __init__(self, store: RunStore, config: CheckpointConfig, frozen: Any, known: Mapping[str, Any]) -> None:
        """Removes the remains of unfinished saves.

        Only checksums of the parameters `frozen` are saved: the base of adapters, a reference or a teacher. `known` is
        JSON: the run's other dependencies, by their names for the user.
        """
        self.store, self.config, self.known = store, config, json.loads(json.dumps(known))
        self.frozen = checksums(by_name(frozen)) if frozen else {}
        self.ends: dict[str, int] | None = None
        """The lengths of the logs, in bytes, at the restored checkpoint."""
        self.manager = self.open_manager()

    def open_manager(self) -> ocp.CheckpointManager:
        """Orbax's manager of the present checkpoints; it reads none of them."""
        best = [Best(self.store)] if self.config.keep_best else []
        with self.store.writing(CHECKPOINTS):
            return ocp.CheckpointManager(
                self.store.checkpoints,
                item_handlers={"state": handler(), "document": ocp.JsonCheckpointHandler()},
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=AnyPreservationPolicy([LatestN(self.config.keep), *best]),
                    best_fn=(lambda metrics: metrics["score"]) if best else None,
                    cleanup_tmp_directories=True,
                    lightweight_initialize=True,  # a damaged checkpoint must not keep the others from being found
                ),
            )

    def save(
        self, state: RunState, config: Mapping[str, Any], logs: Mapping[str, int], score: float | None = None
    ) -> None:
        """Begin to save; returns as soon as the arrays of `state` may be overwritten. `config` is JSON.

        `logs` are the lengths of the logs on the disk. The checkpoint with the highest `score` is the best. UserError
        is raised if the previous checkpoint can't be written.
        """
        arrays = by_name(state.train)
        document = {"step": state.step, **state.document(), "config": config, "score": score, "logs": logs}
        document |= {"known": self.known, "frozen": self.frozen, "arrays": checksums(arrays)}
        tree = unflatten_dict(arrays, sep=".")
        items = {"state": ocp.args.PyTreeSave(tree), "document": ocp.args.JsonSave(document)}
        metrics = {"score": score} if self.config.keep_best and score is not None else None
        with self.store.writing(CHECKPOINTS):
            self.manager.wait_until_finished()
            self.manager.save(state.step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def restore(self, like: TrainState) -> RunState | None:
        """The state in the newest undamaged checkpoint; None if there is no checkpoint.

        `like` has the arrays to read as ShapeDtypeStructs, with their shardings. UserError is raised if no
        checkpoint can be read, a damaged checkpoint can't be renamed, or a dependency of the run has changed.
        """
        damaged: dict[int, str] = {}
        for step in reversed(from_writer(self.store.steps)):
            try:
                document, train = read_checkpoint(self.store, step, like, self.check_dependencies)
            except Damaged as error:
                damaged[step] = str(error)
                continue
            # Only now: if no checkpoint can be read, the fault may lie elsewhere, and all stay as they are.
            for number, reason in damaged.items():
                from_writer(partial(self.store.put_aside, number, reason))
            if damaged:  # Orbax's own reload would read all scores, and fail at a damaged checkpoint
                self.close()
                self.manager = self.open_manager()
            self.ends = ends_of_logs(self.store, document["logs"], step)
            return RunState.from_document(step, train, document)
        if damaged:
            fault = f"none of its {len(damaged)} checkpoints can be read ({damaged[max(damaged)]})"
            raise UserError(f"{self.store}/{CHECKPOINTS}: {fault}; put back what is missing, or take another run_dir")
        return None

    def check_dependencies(self, document: Mapping[str, Any]) -> None:
        """UserError if frozen parameters or other dependencies have changed since the save.

        Only entries on both sides are compared. A change of the loss may add or remove a reference, and another version
        of this program may record more about a model.
        """
        if any(self.frozen.get(name, sums) != sums for name, sums in document["frozen"].items()):
            fault = "belongs to a run with other frozen parameters, or another reference"
            raise UserError(f"model: {self.store} {fault}: give that model, and the same model.lora.source")
        for name, value in (document.get("known") or {}).items():
            if differ(value, self.known.get(name, value)):
                way_out = "put it back, or begin another run_dir"
                raise UserError(f"{name} is not what {self.store} has begun with: {way_out}")

    def wait(self) -> None:
        """Wait until the current save has ended; UserError as `save`."""
        with self.store.writing(CHECKPOINTS):
            self.manager.wait_until_finished()

    def check(self) -> None:
        """Raise UserError if a save has failed, instead of at the next `save`."""
        if not self.manager.is_saving_in_progress():
            self.wait()

    def close(self) -> None:
        with failing(f"{self.store}/{CHECKPOINTS}: can't be written"):
            self.manager.close()


def differ(old: Any, new: Any) -> bool:
    """Whether two JSON values differ; of mappings only common keys are compared."""
    if isinstance(old, dict) and isinstance(new, dict):
        return any(differ(old[key], new[key]) for key in old.keys() & new.keys())
    return bool(old != new)


def ends_of_logs(store: RunStore, sizes: Mapping[str, int], step: int) -> dict[str, int]:
    """The length in bytes of each log at the checkpoint of `step`; its document has `sizes`.

    The step's own line of timings, with the seconds of the save, is written after the checkpoint and included here.
    """
    line, end, _ = store.read(TIMINGS)[sizes.get(TIMINGS, 0) :].partition(b"\n")
    own = end and line.startswith(f'{{"step": {step},'.encode())
    return {**sizes, TIMINGS: sizes.get(TIMINGS, 0) + (len(line) + 1 if own else 0)}


def handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler, reading a gigabyte at a time. zstd would save a tenth of the bytes and busy all cores."""
    return ocp.PyTreeCheckpointHandler(use_compression=False, restore_concurrent_gb=1)


def read_checkpoint(
    store: RunStore, step: int, like: Any, check: Callable[[dict[str, Any]], None] = lambda document: None, at: str = ""
) -> tuple[dict[str, Any], Any]:
    """The document of a checkpoint, after `check`, and the tree of its arrays (or of its part `at`), sharded as `like`.

    All processes must call this. Damaged is raised in all processes if a part is missing, unreadable, or has the wrong
    shape, dtype or checksum. UserError is raised if the disk or bucket does not answer, or this machine lacks memory or
    open files: the checkpoint may then be sound.
    """
    reason, document, arrays = "", dict[str, Any](), dict[str, Any]()
    with raise_everywhere(), store.reading(f"{CHECKPOINTS}/{step}"):
        try:
            document = store.document(step)
            check(document)
            arrays = read_arrays(store.checkpoints / str(step) / "state", like, at)
        except Damaged as error:
            reason = str(error)
        except Exception as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
            if isinstance(error, MemoryError | UserError) or (is_of_storage(error) and not missing):
                raise
            reason = f"{type(error).__name__}: {brief(error)[:200]}"
    if reasons := [reason for reason in gather_objects(reason) if reason]:
        raise Damaged(reasons[0])
    sums = checksums(arrays)
    if wrong := [name for name in sums if sums[name] != document["arrays"].get(name)]:
        more = f" and of {len(wrong) - 1} others" if wrong[1:] else ""
        raise Damaged(f"the checksum of {wrong[0]}{more} differs")
    return document, jax.tree.unflatten(jax.tree.structure(like), arrays.values())


def read_arrays(path: Any, like: Any, at: str) -> dict[str, Any]:
    """The arrays of `like` by their names in a state; `at` is the prefix of these names."""
    named = {f"{at}{name}": leaf for name, leaf in by_name(like).items()}
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in named.values())
    with transfer_bar(f"checkpoint {path.parent.name}", nbytes) as bar:
        stored = by_name(handler().metadata(path).tree)
        for name, leaf in named.items():
            if name not in stored:
                raise Damaged(f"it lacks {name}")
            actual, wanted = (f"{x.dtype}{list(x.shape)}" for x in (stored[name], leaf))
            if actual != wanted:
                raise Damaged(f"{name} is {actual}, not {wanted}")
        tree = unflatten_dict(named, sep=".")
        restore = ocp.checkpoint_utils.construct_restore_args(tree)
        args = ocp.args.PyTreeRestore(item=tree, restore_args=restore, partial_restore=True)
        arrays = by_name(handler().restore(path, args=args))
        bar.update(bar.total)
    return {name: arrays[name] for name in named}


def restore_params(store: RunStore, like: Params, step: int) -> Params:
    """The parameters of a checkpoint; UserError if it can't be read or a number is not finite."""
    try:
        params: Params = read_checkpoint(store, step, like, at="params.")[1]
        for name, array in by_name(params).items():
            if not is_finite(array):
                raise Damaged(f"{name} has numbers that are not finite")
    except Damaged as error:
        raise UserError(f"{store}/{CHECKPOINTS}/{step}: can't be read ({error}); name an older step") from None
    return params


def by_name(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The tree's leaves in order, by dotted path, so that the layout on disk does not depend on a library's types."""
    return {
        # Some versions of Flax, such as 0.12.8, add `.value` to the path of a variable.
        re.sub(r"\.value(?=\.|$)", "", jax.tree_util.keystr(path, simple=True, separator=".")): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    }
