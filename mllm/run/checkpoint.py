"""Checkpoints of a run's state: a directory of Orbax's `CheckpointManager`, which plain Orbax opens.

    7/state      a nested dict: `params`, `opt_state`, `step`, with the names that the model has
    7/document   JSON: positions, counts, the configuration, digests, and checksums of arrays and logs
    7/metrics    {"score": x} of a run with `checkpoint.keep_best`

Orbax writes while training goes on, publishes a checkpoint as a whole, and removes old ones and what killed saves have
left. It returns flipped bits as numbers, so the arrays' checksums are compared here. A checkpoint that can't be read,
or isn't what was written, is put aside with a warning, and the next older one is taken. All processes take part.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from mllm.config.load import read
from mllm.config.run import CheckpointConfig
from mllm.errors import UserError, brief
from mllm.model.layout import Params
from mllm.parallel.processes import from_writer, gather_objects, is_writer, raise_everywhere
from mllm.progress import transfer_bar
from mllm.run.metrics import METRICS, TIMINGS
from mllm.run.state import RunState
from mllm.store.checksum import checksums
from mllm.store.files import failing, find_fault
from mllm.store.run_store import CHECKPOINTS, CONFIG, Damaged, RunStore, seal
from mllm.training.step import TrainState

logger = logging.getLogger(__name__)
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of seconds that it waits, and of metrics not given


class Checkpoints:
    """The checkpoints of one run, by step."""

    def __init__(
        self, store: RunStore, config: CheckpointConfig, frozen: Any, digests: Mapping[str, str], begun: bool
    ) -> None:
        """Removes what saves have left that were cut off.

        `frozen` are parameters that are not saved, but known again: the model's below adapters, a reference's or a
        teacher's. `digests` are hashes of everything else outside of the run that it depends on. UserError is raised
        where the run has `begun` and its checkpoints are gone, or something can't be read or written.
        """
        self.store, self.config, self.digests = store, config, digests
        self.frozen = checksums(by_name(frozen)) if frozen else {}
        self.ends: dict[str, int] | None = None
        """Where the logs of the restored checkpoint end."""
        if begun:
            from_writer(partial(check_there, store))
        self.manager = self.open_manager()

    def open_manager(self) -> ocp.CheckpointManager:
        """Orbax's manager of the checkpoints that are there now; it reads nothing of them."""
        with self.store.writing(CHECKPOINTS):
            return ocp.CheckpointManager(
                self.store.checkpoints,
                # It tells a run's empty directory from a disk that is not mounted; a bucket has no directories.
                metadata=None if self.store.in_bucket else {"written_by": "mllm"},
                item_handlers={"state": handler(), "document": ocp.JsonCheckpointHandler()},
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self,
                    best_fn=(lambda metrics: metrics["score"]) if self.config.keep_best else None,
                    cleanup_tmp_directories=True,
                    lightweight_initialize=True,  # a damaged checkpoint must not keep the others from being found
                    async_options=ocp.AsyncOptions(post_finalization_callback=lambda: self.store.check()),
                ),
            )

    def save(self, state: RunState, config: str, score: float | None = None) -> None:
        """Begin to save; returns as soon as the arrays of `state` may be overwritten. `config` is YAML.

        The checkpoint with the highest `score` is the best. The logs are synced before. UserError is raised if the
        checkpoint before can't be written.
        """
        arrays, logs = by_name(state.train), from_writer(self.store.sync)
        document = {**state.document(), "config": config, "score": score, "logs": logs, "digests": self.digests}
        document |= {"frozen": self.frozen, "arrays": checksums(arrays)}
        tree = unflatten_dict(arrays, sep=".")
        items = {"state": ocp.args.PyTreeSave(tree), "document": ocp.args.JsonSave(seal(document))}
        metrics = {"score": score} if self.config.keep_best and score is not None else None
        with self.store.writing(CHECKPOINTS):
            self.manager.wait_until_finished()
            self.manager.save(state.step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def restore(self, like: TrainState) -> RunState | None:
        """The state in the newest undamaged checkpoint, or None if there is no checkpoint at all.

        `like` has the arrays to read as ShapeDtypeStructs, with their shardings. A checkpoint whose lines of the logs
        are missing or have changed counts as damaged: from an older one they are made again. UserError is raised if
        there are checkpoints, and none of them can be read; or a damaged one can't be put aside; or the run depends on
        something that is not what it was.
        """
        steps = from_writer(self.store.steps)[::-1]
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                document = read_document(self.store, step)
                with damaged_everywhere(self.store, step):
                    ends = ends_of_logs(self.store, document["logs"], step) if is_writer() else None
                self.check_dependencies(document)
                state = RunState.from_document(step, read_arrays(self.store, step, like, document), document)
            except Damaged as error:
                damaged[step] = str(error)
                continue
            # Only now: if none can be read the fault may lie elsewhere, and they stay as they are.
            from_writer(partial(self.put_aside, damaged, document["logs"], steps[0]))
            if damaged:  # Orbax's own reload would read the scores of all, and fail at a damaged one
                self.close()
                self.manager = self.open_manager()
            self.ends = ends
            return state
        if steps:
            fault = f"none of its {len(steps)} checkpoints can be read ({damaged[steps[0]]})"
            raise UserError(f"{self.store}/{CHECKPOINTS}: {fault}; put back what is missing, or take another run_dir")
        return None

    def put_aside(self, damaged: Mapping[int, str], marks: Mapping[str, Any], newest: int) -> None:
        """Put damaged checkpoints aside, and copies of logs whose lines will not come again: timings that changed, too.

        `marks` are those of the checkpoint that was restored, the `newest` is the number of the one that was there.
        """
        fault = self.store.compare_log(TIMINGS, marks[TIMINGS]) if TIMINGS in marks else ""
        if fault:
            logger.warning("%s/%s %s since checkpoint %d; it is kept as it is", self.store, TIMINGS, fault, newest)
        for name in marks if damaged else [TIMINGS] if fault else []:
            self.store.keep_log(name, f".until_{newest}")
        for step, reason in damaged.items():
            self.store.put_aside(step, reason)

    def check_dependencies(self, document: Mapping[str, Any]) -> None:
        """UserError where frozen parameters, or anything else outside of the run, are not as at the save."""
        # Only what both know: a change of grpo.beta adds a reference, or takes it away.
        if any(self.frozen.get(name, sums) != sums for name, sums in document["frozen"].items()):
            fault = "belongs to a run with other frozen parameters, or another reference"
            raise UserError(f"model: {self.store} {fault}: give that model, and the same model.lora.source")
        for name, digest in document["digests"].items():
            if self.digests.get(name, digest) != digest:
                raise UserError(
                    f"{name} is not what {self.store} has begun with: put it back, or begin another run_dir"
                )

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's policy: whether each checkpoint stays, as the newest ones do, which come last, and the best one."""
        self.store.check()
        steps = [info.step for info in checkpoints]
        kept = {*steps[-self.config.keep :]}
        if self.config.keep_best:
            own = {info.step: info.metrics["score"] for info in checkpoints if info.metrics}  # saved by this process
            kept.add(self.store.best_step(steps, own))
        return [step in kept for step in steps]

    def wait(self) -> None:
        """Wait until a save that was begun has ended; UserError as `save`."""
        with self.store.writing(CHECKPOINTS):
            self.manager.wait_until_finished()

    def check(self) -> None:
        """Raise UserError if a save has failed: the next `save`, which would say so, may be far away."""
        if not self.manager.is_saving_in_progress():
            self.wait()

    def close(self) -> None:
        with failing(f"{self.store}/{CHECKPOINTS}: can't be written"):
            self.manager.close()


def ends_of_logs(store: RunStore, marks: Mapping[str, Any], step: int) -> dict[str, int]:
    """The bytes of each log that belong to the checkpoint of `step`, by its marks.

    Damaged is raised where lines are missing, or have changed, that are made again from an older one; timings are not.
    """
    for name, mark in marks.items():
        if name != TIMINGS and (fault := store.compare_log(name, mark)):
            raise Damaged(f"{name} {fault}")
    sizes = {name: size for name, (size, _) in marks.items()}
    if TIMINGS in sizes:
        timings = store.read_log(TIMINGS)
        sizes[TIMINGS] = min(sizes[TIMINGS], len(timings))
        # The timings of the step itself, with the seconds of the save, are written after the checkpoint.
        line, end, _ = timings[sizes[TIMINGS] :].partition(b"\n")
        if end and line.startswith(f'{{"step": {step},'.encode()):
            sizes[TIMINGS] += len(line) + 1
    return sizes


def check_there(store: RunStore) -> None:
    """UserError where a run that has begun has lost its checkpoints: an unmounted disk, or a copy of a part."""
    folder, way_out = f"{store}/{CHECKPOINTS}", "put the checkpoints there, or begin another run_dir"
    if not store.in_bucket and not (store.checkpoints / "metadata").exists():
        raise UserError(f"{folder}: what was there when the run began is missing: {way_out}")
    every = (read(store.folder / CONFIG).get("checkpoint") or {}).get("every")  # as it was until now
    lines = store.read_log(METRICS).count(b"\n")  # one a step, and one of step 0 where that was measured
    if every and lines > 2 * every + 1 and not store.steps():
        due = f"{METRICS} has {lines} lines, and checkpoints were due from step {every} on"
        raise UserError(f"{folder}: is empty, but {due}: {way_out}")


def handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler, which reads a gigabyte at a time. zstd would take off a tenth, and every core for some steps."""
    return ocp.PyTreeCheckpointHandler(use_compression=False, restore_concurrent_gb=1)


def read_document(store: RunStore, step: int) -> dict[str, Any]:
    """The document of a checkpoint, as process 0 reads it; Damaged, or UserError, in all processes alike."""
    with damaged_everywhere(store, step):
        document = store.document(step) if is_writer() else {}
    return gather_objects(document)[0]


def read_arrays(store: RunStore, step: int, like: Any, document: Mapping[str, Any], prefix: str = "") -> Any:
    """A tree of arrays of a checkpoint, with the shardings of `like`; `prefix` is where the tree is in the state.

    All processes must call this. Damaged is raised in all of them alike where an array is missing, has another shape or
    dtype, or another checksum than the document says; UserError where a disk or bucket fails.
    """
    path, named = store.checkpoints / str(step) / "state", {f"{prefix}{name}": x for name, x in by_name(like).items()}
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in named.values())
    with damaged_everywhere(store, step), transfer_bar(f"checkpoint {step}", nbytes) as bar:
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
        arrays = {name: arrays[name] for name in named}
        bar.update(bar.total)
    sums, recorded = checksums(arrays), document["arrays"]
    if wrong := [name for name in sums if sums[name] != recorded.get(name)]:
        more = f" and of {len(wrong) - 1} others" if wrong[1:] else ""
        raise Damaged(f"the checksum of {wrong[0]}{more} differs")
    return jax.tree.unflatten(jax.tree.structure(like), arrays.values())


def restore_params(store: RunStore, like: Params, step: int) -> Params:
    """The parameters of a checkpoint; UserError where it can't be read."""
    try:
        return read_arrays(store, step, like, read_document(store, step), "params.")
    except Damaged as error:
        raise UserError(f"{store}/{CHECKPOINTS}/{step}: can't be read ({error}); take an older step") from None


@contextmanager
def damaged_everywhere(store: RunStore, step: int) -> Iterator[None]:
    """Raise damage that one process finds as Damaged in all, and an error of the disk or bucket as a UserError.

    What a file or object holds, or lacks, is damage. An error of the machine is not: too many open files, a disk or
    bucket that does not answer, no memory. The checkpoint may be sound.
    """
    reason = None
    with raise_everywhere():
        try:
            yield
        except Damaged as error:
            reason = str(error)
        except Exception as error:
            fault = find_fault(error)
            missing = isinstance(fault, FileNotFoundError | NotADirectoryError | IsADirectoryError)
            if isinstance(error, MemoryError | UserError) or not (fault is None or missing):
                with store.reading(f"{CHECKPOINTS}/{step}"):
                    raise
            reason = f"{type(error).__name__}: {brief(error)[:200]}"
    if reasons := [reason for reason in gather_objects(reason) if reason is not None]:
        raise Damaged(reasons[0])


def by_name(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The tree's leaves in order, by their dotted path: a layout on disk that no library's node types are part of."""
    return {
        # Some versions of Flax, 0.12.8 among them, show the step into a variable as `.value`.
        re.sub(r"\.value(?=\.|$)", "", jax.tree_util.keystr(path, simple=True, separator=".")): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    }
