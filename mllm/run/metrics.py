"""What a run says of itself: metrics.jsonl, timings.jsonl, samples.jsonl, TensorBoard, and the progress bar.

metrics.jsonl and samples.jsonl hold what the run computed and are the same, to the bit, however often it was killed and
resumed; timings.jsonl holds what the machine decided (seconds, tokens/s, memory). Names follow TRL's. Of several
processes the first writes all of it: metrics, samples and tokens/s are those of all, seconds and memory its own. What
can't be written is a UserError, which ends the run.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mllm.run.storage import Appended, writing
from mllm.run.tensorboard import Board

RECORDS = ("metrics.jsonl", "timings.jsonl", "samples.jsonl")
Scalars = Mapping[str, float | int]
"""By name."""


class RunLog:
    """The files of a run that grow by a line a step. Lines past `step`, from before a resume, are cut off."""

    def __init__(self, run_dir: Path, step: int | None, steps: int) -> None:
        """`step`: that of the checkpoint that the run goes on from; None: it begins."""
        last, checkpoints = -1 if step is None else step, run_dir / "checkpoints"
        for name in RECORDS:
            with writing(run_dir / name, checkpoints):
                cut_after(run_dir / name, last)
        self.files = {name: Appended(run_dir / name, checkpoints) for name in RECORDS}
        self.board = Board(run_dir / "tensorboard", last + 1, checkpoints)
        self.bar = tqdm(total=steps, initial=max(last, 0), desc=run_dir.name, unit="step", dynamic_ncols=True)

    def write(self, step: int, metrics: Scalars, samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Append a step's records; the metrics come last, so that their line says that all of the step is there."""
        for sample in samples:
            self.append("samples.jsonl", {"step": step, **sample})
        self.append("metrics.jsonl", {"step": step, **metrics})
        self.board.draw(step, metrics)

    def write_timings(self, step: int, timings: Scalars, metrics: Scalars) -> None:
        """Append what the machine took for the step, and move the bar on; `metrics` are shown beside it."""
        self.append("timings.jsonl", {"step": step, **timings})
        self.board.draw(step, timings)
        shown = {"reward": metrics.get("reward"), "loss": metrics.get("loss")}
        words = [f"{name} {value:.3f}" for name, value in shown.items() if value is not None]
        self.bar.set_postfix_str("  ".join([*words, f"{timings['tokens_per_second']:,.0f} tok/s"]))
        self.bar.update(step - self.bar.n)

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        # NaN and Infinity are no JSON; a reader in another language would refuse the file.
        finite = {key: None if isinstance(v, float) and not np.isfinite(v) else v for key, v in record.items()}
        self.files[name].append((json.dumps(finite, ensure_ascii=False) + "\n").encode())

    def sync(self) -> None:
        """Until everything written so far survives a crash of the machine; before a checkpoint begins."""
        for file in (*self.files.values(), self.board.file):
            file.sync()

    def close(self) -> None:
        self.bar.close()
        for file in (*self.files.values(), self.board.file):
            file.sync()
            file.close()


class NoLog(RunLog):
    """Of a process that leaves writing to process 0."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, metrics: Scalars, samples: Sequence[Mapping[str, Any]] = ()) -> None:
        pass

    def write_timings(self, step: int, timings: Scalars, metrics: Scalars) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def cut_after(path: Path, step: int) -> None:
    """Remove the lines of later steps from a file of JSON lines, and a last line that a crash left half-written."""
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
    """The whole lines of a file of JSON lines, which may still be being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
