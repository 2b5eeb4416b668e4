"""The log of a run: metrics.jsonl, timings.jsonl, samples.jsonl, TensorBoard, Weights & Biases, and the terminal.

metrics.jsonl and samples.jsonl are byte-identical however often the run was killed and resumed. Machine-dependent
numbers are in timings.jsonl. Process 0 writes all files: metrics, samples and tokens/s are of all processes, seconds
and memory of process 0. A line that can't be written is a UserError.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from io import FileIO
from statistics import fmean, harmonic_mean
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from lm_head import EngineChoice
from mllm.config.run import RunConfig
from mllm.model.layout import count
from mllm.model.load import Policy
from mllm.parallel.processes import is_writer
from mllm.run.events import open_events, optional, wandb_run, write_numbers
from mllm.run.state import RunState
from mllm.run.store import RunStore

METRICS, TIMINGS, SAMPLES = RECORDS = ("metrics.jsonl", "timings.jsonl", "samples.jsonl")
EVENTS = "tensorboard"
Scalars = Mapping[str, float | int]
logger = logging.getLogger(__name__)
MEASURED = (
    *("eval/reward", "eval/greedy_accuracy", "validation/loss", "validation/rewards/accuracies"),
    *("test/reward", "test/greedy_accuracy"),
)
"""Evaluation metrics that the terminal shows."""


class RunLog:
    """The log files of a run, which grow with every step. Only process 0 has files."""

    def __init__(
        self,
        store: RunStore,
        last_step: int,
        steps: int,
        config: RunConfig | None = None,
        progress: Mapping[str, str] | None = None,
        ends: Mapping[str, int] | None = None,
    ) -> None:
        """Open the files, and cut them to the `ends` of the checkpoint that the run resumes from.

        `last_step` is the last step with lines in the files, -1 for a new run; `steps` is the run's last step. The
        first line of metrics.jsonl after a change in `config.changes` has it under `changed`. Without `config` there
        are no changes and no W&B. `progress` maps printed names to the metrics to print.
        """
        self.changes: dict[int, dict[str, Any]] = {}
        for change in config.changes if config else ():
            self.changes.setdefault(change.step + 1, {})[change.key] = change.new
        self.store, self.events, self.stack = store, None, ExitStack()
        self.files: dict[str, FileIO] = {}
        self.steps, self.last_print, self.progress = steps, -1.0, progress or {"loss": "loss"}
        self.first: tuple[int, float] | None = None  # the first step of this process and when it ended
        if is_writer():
            for name in RECORDS:
                self.files[name] = self.stack.enter_context(self.open(name, ends[name] if ends else 0))
            self.stack.callback(self.sync)
            if config and config.log.wandb:
                self.stack.enter_context(wandb_run(store, config))
            with optional("TensorBoard's events"):
                self.events = self.stack.enter_context(closing(open_events(store.folder / EVENTS, last_step + 1)))

    def open(self, name: str, size: int) -> FileIO:
        """An unbuffered log, cut to `size` bytes, to append to; a shorter log is kept, with a warning."""
        with self.store.writing(name):
            file = FileIO(self.store.folder / name, "a+")
            if file.tell() < size:
                logger.warning("%s/%s lacks %d bytes from before this checkpoint", self.store, name, size - file.tell())
            else:
                file.truncate(size)
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                file.write(b"\n")  # the log was edited by hand: begin a new line
            return file

    def sync(self) -> dict[str, int]:
        """Flush the logs to the disk, or to the bucket; returns their lengths in bytes."""
        if not self.files:
            return {}
        for name, file in self.files.items():
            with self.store.writing(name):
                os.fsync(file.fileno())
        events = sorted(self.store.folder.glob(f"{EVENTS}/*"))[-1:]
        self.store.send(*self.files, *(f"{EVENTS}/{path.name}" for path in events))
        return {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}

    def write(self, step: int, metrics: Scalars, samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Append a step's lines. The metrics line comes last, so a step with metrics has all its samples."""
        for sample in samples:
            self.append("samples.jsonl", step, sample)
        changed = {"changed": self.changes[step]} if step in self.changes else {}
        self.append("metrics.jsonl", step, {**metrics, **changed})
        self.say(step, [f"{key} {number(metrics, key)}" for key in measured(metrics)])

    def write_timings(self, step: int, timings: Scalars, metrics: Scalars) -> None:
        """Append the step's timings; at most every second, print some of the `metrics` and the remaining time."""
        self.append("timings.jsonl", step, timings)
        now = time.monotonic()
        self.first = self.first or (step, now)
        if now < self.last_print + 1 and step != self.steps:
            return
        self.last_print = now
        shown = {name: metrics[key] for name, key in self.progress.items() if metrics.get(key) is not None}
        # An update without counted tokens has no entropy; a NaN loss must be shown.
        words = [f"{name} {x:.3f}" for name, x in shown.items() if name == "loss" or math.isfinite(x)]
        words.append(f"{timings['tokens_per_second']:,.0f} tok/s")
        if step > self.first[0]:  # the first step compiles, and its pace is not typical
            pace = (now - self.first[1]) / (step - self.first[0])
            words.append(f"ETA {tqdm.format_interval(pace * (self.steps - step))}")
        self.say(step, words)

    def say(self, step: int, words: Sequence[str]) -> None:
        """Print a line of the step, if there are words for it."""
        if self.files and words:
            print("  ".join([f"step {step} of {self.steps}", *words]), file=sys.stderr, flush=True)

    def append(self, name: str, step: int, record: Mapping[str, Any]) -> None:
        """Append a line to a file; numbers of metrics and timings also go to TensorBoard."""
        if not self.files:
            return
        # NaN and Infinity are no JSON; a reader in another language would refuse the file.
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        left = (json.dumps({"step": step, **finite}, ensure_ascii=False) + "\n").encode()
        with self.store.writing(name):
            while left:
                left = left[self.files[name].write(left) :]
        if name != SAMPLES and self.events:
            numbers = {key: value for key, value in finite.items() if value is not None and key != "changed"}
            write_numbers(self.events, step, numbers)

    def close(self) -> None:
        self.stack.close()


def measured(record: Mapping[str, Any]) -> list[str]:
    """The names of a step's evaluation metrics, in their order on the terminal."""
    keys = (*MEASURED, *rewards_of(record, "eval/"), *at_k([record]))
    return [key for key in keys if record.get(key) is not None]


def rewards_of(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The metric names of the reward functions' means, if several functions have one."""
    begin, end = f"{prefix}rewards/", "/mean"
    means = {key: value for key, value in record.items() if key.startswith(begin) and key.endswith(end)}
    keys = [key for key, value in means.items() if value is not None and math.isfinite(value)]
    return keys if len(keys) > 1 else []


def number(record: Mapping[str, Any], key: str) -> str:
    """A metric as a text; an accuracy with its 95 % interval."""
    interval = [f"{record[name]:.3f}" for name in (f"{key}_low", f"{key}_high") if name in record]
    return f"{record[key]:.3f}" + f" ({' .. '.join(interval)})" * bool(interval)


def at_k(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of avg@k and pass@k in the metrics, each with its largest k."""
    largest: dict[str, int] = {}
    for start, _, k in (key.partition("@") for record in records for key in record):
        if start in ("eval/avg", "eval/pass", "test/avg", "test/pass") and k.isdecimal():
            largest[start] = max(int(k), largest.get(start, 0))
    return [f"{start}@{k}" for start, k in largest.items()]


# The terminal, at a run's start and end


def start_lines(mesh: Mesh, policy: Policy, head: EngineChoice, examples: str, config: RunConfig, step: int) -> str:
    """The first line of a run: devices, sizes, head and attention with reasons, and the first step; then changes."""
    attention, total, trained = policy.attention, count(policy.params), count(policy.trained)
    dtypes = "/".join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(policy.params)}))
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    first_line = "; ".join(
        [
            f"{mesh.size} of {jax.device_count()} devices ({jax.devices()[0].device_kind})",
            f"mesh {axes}",
            f"{total:,} parameters in {dtypes}" + f" ({trained:,} trained)" * (trained < total),
            f"head {head.impl}" + f" ({head.reason})" * bool(head.reason),
            f"attention {attention.attention.kernel if attention.attention else 'xla'}"
            + f" ({attention.reason})" * bool(attention.reason),
            f"{config.batch_shape.micro} rows at a time, remat {config.model.remat}",
            examples,
            f"resumed from step {step}" if step else "from the beginning",
        ]
    )
    later = [
        f"after step {c.step}: {c.key} {json.dumps(c.old)} -> {json.dumps(c.new)}"
        for c in config.changes
        if c.step >= step
    ]
    return "\n".join([first_line, *later])


def why_ended(state: RunState, steps: int) -> str:
    """The step after which the run ended, and why, if steps were left."""
    if state.step >= steps:
        return f"after all {steps:,} steps"
    validations = f"the validation loss has not fallen in {state.validations_without_gain} validations"
    return f"after step {state.step:,} of {steps:,}: {validations} (data.validation.patience)"


def summary(store: RunStore, ended: str, shown: Mapping[str, str]) -> str:
    """The table at the end of a run, read from metrics.jsonl and timings.jsonl; the first line is `ended`.

    Each evaluation metric has a line with its first and last value, a loss also with its lowest. Each reward function
    and each metric in `shown` has a line with the means over the first and the last tenth of the steps.
    """
    metrics, timings = store.records(METRICS), store.records(TIMINGS)
    lines = [("ended", ended)]
    for key in dict.fromkeys(key for record in metrics for key in measured(record)):
        records = [record for record in metrics if record.get(key) is not None]
        lowest = [min(records, key=lambda record: record[key])] if key.endswith("loss") else []
        chosen = {record["step"]: record for record in (records[0], *lowest, records[-1])}
        lines.append((key, ", ".join(f"{number(record, key)} at step {step}" for step, record in chosen.items())))
    rewards = {key: key for record in metrics for key in rewards_of(record)}
    for name, key in {**shown, **rewards}.items():
        if values := present(metrics, key):
            tenth = max(1, len(values) // 10)
            first, last = fmean(values[:tenth]), fmean(values[-tenth:])
            lines.append((name, f"{first:.3f} in the first tenth, {last:.3f} in the last of {len(values)} steps"))
    if speeds := present(timings, "tokens_per_second"):
        # Not the median: where several updates share a rollout, the median is an update without a rollout.
        mean = harmonic_mean(speeds[1:] or speeds)
        lines.append(("tokens/s", f"{mean:,.0f} (of all steps but the first; prompts and completions)"))
    phases = dict.fromkeys(key for record in timings for key in record if key.startswith("time/"))
    seconds = [f"{phase.removeprefix('time/')} {sum(present(timings, phase)):.1f}" for phase in phases]
    lines.append(("seconds", ", ".join(seconds)))
    if peaks := present(timings, "memory/peak_bytes"):
        lines.append(("peak memory", f"{max(peaks) / 2**20:,.0f} MiB"))
    lines.append(("files", str(store)))
    width = max(18, *(len(name) for name, _ in lines))
    return "\n".join(["", *(f"{name:<{width}} {text}".rstrip() for name, text in lines)])


def present(records: list[dict[str, Any]], key: str) -> list[float | int]:
    """The values of the records that have the key."""
    return [record[key] for record in records if record.get(key) is not None]
