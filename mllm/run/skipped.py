"""Batches of skipped updates: `tools/replay.py` finds out what was wrong with them."""

from pathlib import Path
from typing import Any

import numpy as np

from mllm.data.batch import Batch
from mllm.parallel.processes import RowShare, is_writer, local_rows
from mllm.run.storage import writing


def save_batch(run_dir: Path, batch: Batch, rows: RowShare, *, step: int, seed: int) -> Path:
    """Save a skipped update's batch as skipped/step_N.npz, in all processes; UserError where it can't be written."""
    path = run_dir / "skipped" / f"step_{step}.npz"
    fields = {name: local_rows(value) for name, value in batch._asdict().items() if value is not None}
    shares = rows.gather(fields)
    if is_writer():
        arrays: dict[str, Any] = {name: np.concatenate([share[name] for share in shares]) for name in fields}
        filled = arrays["segments"].any(axis=1)
        with writing(path, run_dir / "checkpoints"):
            path.parent.mkdir(exist_ok=True)
            np.savez(path, step=step, seed=seed, **{name: array[filled] for name, array in arrays.items()})
    return path


def too_many_skipped(count: int, batch: Path) -> str:
    return (
        f"optimizer.max_skipped: the last {count} updates were not finite and skipped; the last batch is {batch}, "
        "and tools/replay.py looks into it"
    )
