"""What a run says on the terminal: a line when it starts, and at its end a table of accuracy, speed and memory."""

import math
import shlex
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import jax
from jax.sharding import Mesh

from kernels.lm_head import EngineChoice
from mllm.model.attention import AttentionChoice
from mllm.model.layout import Params
from mllm.run.metrics import read_records
from mllm.store.run_store import RunStore


def start_line(mesh: Mesh, params: Params, head: EngineChoice, attention: AttentionChoice, step: int) -> str:
    """Devices, mesh, parameters, the head and attention that were picked and why, and where the run begins."""
    leaves = jax.tree.leaves(params)
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    dtypes = "/".join(sorted({str(leaf.dtype) for leaf in leaves}))
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return "; ".join(
        [
            f"{mesh.size} of {jax.device_count()} devices ({jax.devices()[0].device_kind})",
            f"mesh {axes}",
            f"{count:,} parameters in {dtypes}",
            f"head {head.impl}" + f" ({head.reason})" * bool(head.reason),
            f"attention {attention.attention.kernel if attention.attention else 'xla'}"
            + f" ({attention.reason})" * bool(attention.reason),
            f"resumed from step {step}" if step else "from the beginning",
        ]
    )


MEASURED = {
    "held-out, sampled": "eval/sampled_accuracy",
    "held-out, greedy": "eval/greedy_accuracy",
    "held-out reward": "eval/reward",
    "validation loss": "validation/loss",
    "test accuracy": "test/greedy_accuracy",
    "test reward": "test/reward",
    "weights moved": "params/moved",
}
"""The metrics of which a summary shows the first and the last value, and the lowest of a loss; by name."""


def summary(store: RunStore) -> str:
    """The table of a run, read from its metrics.jsonl and timings.jsonl."""
    metrics = read_records(store, "metrics.jsonl")
    timings = read_records(store, "timings.jsonl")
    lines = [*measured(metrics), *progress(metrics), *speed(timings), ("", ""), *places(store)]
    return "\n".join(["", *(f"{name:<18} {text}".rstrip() for name, text in lines)])


def measured(metrics: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What was measured on held-out data and when, accuracies with their 95 % intervals."""
    for name, key in MEASURED.items():
        if found := [record for record in metrics if record.get(key) is not None]:
            lowest = [min(found, key=lambda record: record[key])] if key.endswith("loss") else []
            chosen = {record["step"]: record for record in (found[0], *lowest, found[-1])}
            yield name, ", ".join(f"{number(record, key)} at step {step}" for step, record in chosen.items())


def number(record: dict[str, Any], key: str) -> str:
    interval = [f"{record[name]:.3f}" for name in (f"{key}_low", f"{key}_high") if name in record]
    value = f"{record[key]:.2%}" if key == "params/moved" else f"{record[key]:.3f}"
    return value + f" ({' .. '.join(interval)})" * bool(interval)


def progress(metrics: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The reward, or without one the loss: the mean of the first and of the last tenth of the steps."""
    name = "reward" if present(metrics, "reward") else "loss"
    if values := present(metrics, name):
        tenth = max(1, len(values) // 10)
        first, last = fmean(values[:tenth]), fmean(values[-tenth:])
        yield name, f"{first:.3f} in the first tenth, {last:.3f} in the last of {len(values)} steps"


def speed(timings: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if speeds := present(timings, "tokens_per_second"):
        yield "tokens/s", f"{median(speeds):,.0f} (median of the steps; prompts and completions)"
    phases = dict.fromkeys(key for record in timings for key in record if key.startswith("time/"))
    if sums := [f"{phase.removeprefix('time/')} {sum(present(timings, phase)):.1f}" for phase in phases]:
        yield "seconds", ", ".join(sums)
    if peaks := present(timings, "memory/peak_bytes"):
        yield "peak memory", f"{max(peaks) / 2**20:,.0f} MiB"


def present(records: list[dict[str, Any]], key: str) -> list[float | int]:
    """The values of all records that have one."""
    return [record[key] for record in records if record.get(key) is not None]


def places(store: RunStore) -> Iterator[tuple[str, str]]:
    entries = store.entries()
    for name in ("tensorboard", "samples.jsonl", "metrics.jsonl", "checkpoints", "curves.png"):
        there = name in entries and not (store.folder and (store.folder / name).stat().st_size == 0)
        if there or any(entry.startswith(f"{name}.") for entry in entries):
            path = f"{store}/{name}"
            opened_by = f"tensorboard --logdir {shlex.quote(path)}"
            yield name.partition(".")[0], opened_by if name == "tensorboard" else path
