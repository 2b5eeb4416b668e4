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
            f"attention {attention.name}" + f" ({attention.reason})" * bool(attention.reason),
            f"resumed from step {step}" if step else "from the beginning",
        ]
    )


def summary(store: RunStore) -> str:
    """The table of a run, read from its metrics.jsonl and timings.jsonl."""
    metrics = read_records(store, "metrics.jsonl")
    timings = read_records(store, "timings.jsonl")
    lines = [
        *accuracy_table(metrics),
        *reward_line(metrics),
        *test_line(metrics),
        *validation_table(metrics),
        *progress_line(metrics),
        *speed_lines(timings),
        "",
        *places(store),
    ]
    return "\n".join(["", *lines])


def accuracy_table(metrics: list[dict[str, Any]]) -> Iterator[str]:
    evaluated = [record for record in metrics if "eval/greedy_accuracy" in record]
    if not evaluated:
        return
    first, last = evaluated[0], evaluated[-1]
    before, after = f"step {first['step']}", f"step {last['step']}"
    yield f"{'held-out accuracy':<18} {before:>8} {'95 %':^15} {after:>10} {'95 %':^15} {'gain':>7}"
    for mode in ("sampled", "greedy"):
        key = f"eval/{mode}_accuracy"
        if key in first and key in last:
            (old, new), intervals = (first[key], last[key]), [interval(record, key) for record in (first, last)]
            yield f"{mode:<18} {old:>8.3f} {intervals[0]:^15} {new:>10.3f} {intervals[1]:^15} {new - old:>+7.3f}"


def reward_line(metrics: list[dict[str, Any]]) -> Iterator[str]:
    """The mean reward on held-out problems that have no answers, at the first and at the last evaluation."""
    evaluated = [record for record in metrics if record.get("eval/reward") is not None]
    if evaluated and "eval/greedy_accuracy" not in evaluated[-1]:
        shown = (f"{record['eval/reward']:.3f} at step {record['step']}" for record in (evaluated[0], evaluated[-1]))
        yield f"{'held-out reward':<18} {', '.join(shown)}"


def test_line(metrics: list[dict[str, Any]]) -> Iterator[str]:
    """What the last parameters reach on the test set."""
    for record in metrics[-1:]:
        if (key := "test/greedy_accuracy") in record:
            yield f"{'test accuracy':<18} {record[key]:.3f} ({interval(record, key)}), greedy"
        elif record.get("test/reward") is not None:
            yield f"{'test reward':<18} {record['test/reward']:.3f}"


def interval(record: dict[str, Any], key: str) -> str:
    return f"{record[f'{key}_low']:.3f} .. {record[f'{key}_high']:.3f}"


def validation_table(metrics: list[dict[str, Any]]) -> Iterator[str]:
    """The validation's metrics at the first step, where the loss was lowest, and at the last."""
    validated = [record for record in metrics if record.get("validation/loss") is not None]
    if not validated:
        return
    lowest = min(validated, key=lambda record: record["validation/loss"])
    shown = {"step": validated[0], "lowest at": lowest, "last, at": validated[-1]}
    yield f"{'validation':<18}" + "".join(f" {name} {record['step']}".rjust(18) for name, record in shown.items())
    for name in ("loss", "perplexity", "token_accuracy"):
        values = (record[f"validation/{name}"] for record in shown.values())
        yield f"{name.replace('_', ' '):<18}" + "".join(f"{value:>18.3f}" for value in values)


def progress_line(metrics: list[dict[str, Any]]) -> Iterator[str]:
    """The reward, or without one the loss: the mean of the first and of the last tenth of the steps."""
    for key in ("reward", "loss"):
        if values := present(metrics, key):
            tenth = max(1, len(values) // 10)
            first, last = fmean(values[:tenth]), fmean(values[-tenth:])
            yield f"{key:<18} {first:.3f} in the first tenth, {last:.3f} in the last of {len(values)} steps"
            return


def speed_lines(timings: list[dict[str, Any]]) -> Iterator[str]:
    if speeds := present(timings, "tokens_per_second"):
        yield f"{'tokens/s':<18} {median(speeds):,.0f} (median of the steps; prompts and completions)"
    phases = dict.fromkeys(key for record in timings for key in record if key.startswith("time/"))
    if sums := [f"{phase.removeprefix('time/')} {sum(present(timings, phase)):.1f}" for phase in phases]:
        yield f"{'seconds':<18} {', '.join(sums)}"
    if peaks := present(timings, "memory/peak_bytes"):
        yield f"{'peak memory':<18} {max(peaks) / 2**20:,.0f} MiB"


def present(records: list[dict[str, Any]], key: str) -> list[float | int]:
    """The values of all records that have one."""
    return [record[key] for record in records if record.get(key) is not None]


def places(store: RunStore) -> Iterator[str]:
    entries = store.entries()
    for name in ("tensorboard", "samples.jsonl", "metrics.jsonl", "checkpoints", "curves.png"):
        there = name in entries and not (store.folder and (store.folder / name).stat().st_size == 0)
        if there or any(entry.startswith(f"{name}.") for entry in entries):
            path = f"{store}/{name}"
            opened_by = f"tensorboard --logdir {shlex.quote(path)}"
            yield f"{name.partition('.')[0]:<18} {opened_by if name == 'tensorboard' else path}"
