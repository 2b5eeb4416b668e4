"""Batches of skipped updates: `tools/replay.py` finds out what was wrong with them."""

from io import BytesIO
from typing import Any

import numpy as np

from mllm.data.batch import Batch
from mllm.parallel.processes import RowShare, is_writer, local_rows
from mllm.store.run_store import RunStore


def save_batch(store: RunStore, batch: Batch, rows: RowShare, *, step: int, seed: int) -> str:
    """Save a skipped update's batch as skipped/step_N.npz, in all processes; UserError where it can't be written."""
    name = f"skipped/step_{step}.npz"
    fields = {field: local_rows(value) for field, value in batch._asdict().items() if value is not None}
    shares = rows.gather(fields)
    if is_writer():
        arrays: dict[str, Any] = {field: np.concatenate([share[field] for share in shares]) for field in fields}
        filled = arrays["segments"].any(axis=1)
        content = BytesIO()
        np.savez(content, step=step, seed=seed, **{field: array[filled] for field, array in arrays.items()})
        store.write(name, content.getvalue())
    return f"{store}/{name}"
