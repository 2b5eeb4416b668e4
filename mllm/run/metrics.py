"""The log of a run: metrics.jsonl, timings.jsonl, samples.jsonl, TensorBoard, and the progress bar.

metrics.jsonl and samples.jsonl are the same, to the byte, however often the run was killed and resumed; timings.jsonl
holds what depends on the machine. The first of several processes writes everything: metrics, samples and tokens/s of
all processes, but its own seconds and memory. A line that can't be written is a UserError.
"""

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mllm.config.schema import Change
from mllm.parallel.processes import is_writer
from mllm.run import tensorboard
from mllm.run.storage import LogFile, writing

RECORDS = ("metrics.jsonl", "timings.jsonl", "samples.jsonl")
EVENTS = "tensorboard"
Scalars = Mapping[str, float | int]


class RunLog:
    """The files of a run that grow by a line a step. In all processes but the first there are none."""

    def __init__(self, run_dir: Path, last_step: int, steps: int, changes: Sequence[Change] = ()) -> None:
        """Open the files, and cut off the lines after `last_step`, which is -1 for a run that begins.

        The first line of metrics.jsonl after one of the `changes` has it under `changed`.
        """
        self.changes: dict[int, dict[str, Any]] = {}
        for change in changes:
            self.changes.setdefault(change.step + 1, {})[change.key] = change.new
        self.files: dict[str, LogFile] = {}
        if is_writer():
            checkpoints = run_dir / "checkpoints"
            for name in RECORDS:
                with writing(run_dir / name, checkpoints):
                    cut_after(run_dir / name, last_step)
            events = f"tensorboard/events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            for name, path in [*((name, name) for name in RECORDS), (EVENTS, events)]:
                self.files[name] = LogFile(run_dir / path, checkpoints)
            self.files[EVENTS].append(tensorboard.header(last_step + 1))
        begin, hidden = max(last_step, 0), not self.files
        self.bar = tqdm(total=steps, initial=begin, desc=run_dir.name, unit="step", dynamic_ncols=True, disable=hidden)

    def write(self, step: int, metrics: Scalars, samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Append a step's lines. The metrics' line comes last: where it stands, the step's samples stand, too."""
        for sample in samples:
            self.append("samples.jsonl", step, sample)
        changed = {"changed": self.changes[step]} if step in self.changes else {}
        self.append("metrics.jsonl", step, {**metrics, **changed})

    def write_timings(self, step: int, timings: Scalars, metrics: Scalars) -> None:
        """Append the step's timings, and move the bar on, which shows some of the `metrics`."""
        self.append("timings.jsonl", step, timings)
        shown = {"reward": metrics.get("reward"), "loss": metrics.get("loss")}
        words = [f"{name} {value:.3f}" for name, value in shown.items() if value is not None]
        self.bar.set_postfix_str("  ".join([*words, f"{timings['tokens_per_second']:,.0f} tok/s"]))
        self.bar.update(step - self.bar.n)

    def append(self, name: str, step: int, record: Mapping[str, Any]) -> None:
        """Append a line to a file; the numbers of what isn't a sample go to TensorBoard, too."""
        if not self.files:
            return
        # NaN and Infinity are no JSON; a reader in another language would refuse the file.
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        self.files[name].append((json.dumps({"step": step, **finite}, ensure_ascii=False) + "\n").encode())
        if name != "samples.jsonl":
            numbers = {key: value for key, value in record.items() if key != "changed"}
            self.files[EVENTS].append(tensorboard.scalars(step, numbers))

    def sync(self) -> None:
        """Wait until everything written so far survives a crash of the machine; a checkpoint must not be newer."""
        for file in self.files.values():
            file.sync()

    def close(self) -> None:
        self.bar.close()
        self.sync()
        for file in self.files.values():
            file.close()


def cut_after(path: Path, step: int) -> None:
    """Remove the lines of later steps from a file of JSON lines, and a last line that a crash left incomplete."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                if json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
    os.truncate(path, end)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines, to which a run may be appending."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
