"""The log of a run: metrics.jsonl, timings.jsonl, samples.jsonl, TensorBoard, Weights & Biases, and the terminal.

metrics.jsonl and samples.jsonl are the same, to the byte, however often the run was killed and resumed; timings.jsonl
holds what depends on the machine. The first of several processes writes everything: metrics, samples and tokens/s of
all processes, but its own seconds and memory. A line that can't be written is a UserError.
"""

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

from tqdm import tqdm

from mllm.config.schema import Config
from mllm.parallel.processes import is_writer
from mllm.run.events import Events
from mllm.run.wandb import sending
from mllm.store.log import Log
from mllm.store.run_store import RunStore

METRICS, TIMINGS, SAMPLES = RECORDS = ("metrics.jsonl", "timings.jsonl", "samples.jsonl")
EVENTS = "tensorboard"
Scalars = Mapping[str, float | int]
MEASURED = (
    *("eval/reward", "eval/greedy_accuracy", "validation/loss", "validation/rewards/accuracies"),
    *("test/reward", "test/greedy_accuracy"),
)
"""What is measured beside the updates and stands on the terminal."""


class RunLog:
    """The files of a run that grow by a line a step. In all processes but the first there are none."""

    def __init__(
        self,
        store: RunStore,
        last_step: int,
        steps: int,
        config: Config | None = None,
        progress: Mapping[str, str] | None = None,
        ends: Mapping[str, int] | None = None,
    ) -> None:
        """Open the files, and cut off what was written after the `ends` of a checkpoint from which a run goes on.

        `last_step` is the last step with lines there, -1 for a run that begins; `steps` is the run's last step. The
        first line of metrics.jsonl after one of the configuration's `changes` has it under `changed`. None: there are
        no changes and no `log.wandb`. `progress` are the metrics that are printed, by their names there.
        """
        self.changes: dict[int, dict[str, Any]] = {}
        for change in config.changes if config else ():
            self.changes.setdefault(change.step + 1, {})[change.key] = change.new
        self.files, self.events, self.stack = dict[str, Log](), None, ExitStack()
        self.steps, self.said, self.progress = steps, -1.0, progress or {"loss": "loss"}
        self.first: tuple[int, float] | None = None  # the first step of this process and when it ended
        if is_writer():
            for name in RECORDS:
                log = store.open_log(name, ends[name] if ends else 0)
                self.files[name] = self.stack.enter_context(closing(log))
            if config and config.log.wandb:
                self.stack.enter_context(sending(store, config))
            store.check()
            self.events = self.stack.enter_context(closing(Events(store.folder / EVENTS, last_step + 1)))

    def write(self, step: int, metrics: Scalars, samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Append a step's lines. The metrics' line comes last: where it stands, the step's samples stand, too."""
        for sample in samples:
            self.append("samples.jsonl", step, sample)
        changed = {"changed": self.changes[step]} if step in self.changes else {}
        self.append("metrics.jsonl", step, {**metrics, **changed})
        self.say(step, [f"{key} {number(metrics, key)}" for key in measured(metrics)])

    def write_timings(self, step: int, timings: Scalars, metrics: Scalars) -> None:
        """Append the step's timings, and at most every second print some of the `metrics` and the time that is left."""
        self.append("timings.jsonl", step, timings)
        now = time.monotonic()
        self.first = self.first or (step, now)
        if now < self.said + 1 and step != self.steps:
            return
        self.said = now
        shown = {name: metrics[key] for name, key in self.progress.items() if metrics.get(key) is not None}
        # An update in which no token counts has no entropy; a loss that is NaN has to be seen.
        words = [f"{name} {x:.3f}" for name, x in shown.items() if name == "loss" or math.isfinite(x)]
        words.append(f"{timings['tokens_per_second']:,.0f} tok/s")
        if step > self.first[0]:  # the first one compiles, and says nothing of the pace
            pace = (now - self.first[1]) / (step - self.first[0])
            words.append(f"ETA {tqdm.format_interval(pace * (self.steps - step))}")
        self.say(step, words)

    def say(self, step: int, words: Sequence[str]) -> None:
        """Print a line of the step, if there are words for it."""
        if self.files and words:
            print("  ".join([f"step {step} of {self.steps}", *words]), file=sys.stderr, flush=True)

    def append(self, name: str, step: int, record: Mapping[str, Any]) -> None:
        """Append a line to a file; the numbers of what isn't a sample go to TensorBoard, too."""
        if not self.files:
            return
        # NaN and Infinity are no JSON; a reader in another language would refuse the file.
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        self.files[name].append((json.dumps({"step": step, **finite}, ensure_ascii=False) + "\n").encode())
        if name != "samples.jsonl" and self.events:
            numbers = {key: value for key, value in finite.items() if value is not None and key != "changed"}
            self.events.write(step, numbers)

    def close(self) -> None:
        self.stack.close()


def measured(record: Mapping[str, Any]) -> list[str]:
    """The metrics of what a step measured beside its update, in their order on the terminal."""
    keys = (*MEASURED, *rewards_of(record, "eval/"), *at_k([record]))
    return [key for key in keys if record.get(key) is not None]


def rewards_of(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The metrics of the reward functions' means, if there are several."""
    begin, end = f"{prefix}rewards/", "/mean"
    keys = [key for key, value in record.items() if key.startswith(begin) and key.endswith(end) and value is not None]
    return keys if len(keys) > 1 else []


def number(record: Mapping[str, Any], key: str) -> str:
    """A measured number, an accuracy with its 95 % interval."""
    interval = [f"{record[name]:.3f}" for name in (f"{key}_low", f"{key}_high") if name in record]
    return f"{record[key]:.3f}" + f" ({' .. '.join(interval)})" * bool(interval)


def last_logged_step(store: RunStore) -> int:
    """The step of the last complete line of metrics.jsonl; -1 if it has none."""
    for line in reversed(store.read_log("metrics.jsonl").splitlines(keepends=True)):
        with suppress(ValueError, KeyError, TypeError):
            if line.endswith(b"\n"):
                return int(json.loads(line)["step"])
    return -1


def at_k(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of avg@k and pass@k in the metrics, each with its largest k."""
    largest: dict[str, int] = {}
    for start, _, k in (key.partition("@") for record in records for key in record):
        if start in ("eval/avg", "eval/pass", "test/avg", "test/pass") and k.isdecimal():
            largest[start] = max(int(k), largest.get(start, 0))
    return [f"{start}@{k}" for start, k in largest.items()]


def read_records(store: RunStore, name: str) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines, to which a run may be appending."""
    return [json.loads(line) for line in store.read_log(name).decode().split("\n")[:-1]]
