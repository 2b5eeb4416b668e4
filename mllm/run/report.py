"""What a run says on the terminal: a line when it starts, and at its end a table of accuracy, speed and memory."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, harmonic_mean
from typing import Any

import jax
from jax.sharding import Mesh

from lm_head import EngineChoice
from mllm.config.schema import Change
from mllm.model.layout import count
from mllm.model.load import Policy
from mllm.run.metrics import measured, number, read_records, rewards_of
from mllm.run.state import RunState
from mllm.store.run_store import RunStore


def start_lines(
    mesh: Mesh, policy: Policy, head: EngineChoice, examples: str, changes: Sequence[Change], step: int
) -> str:
    """The run's devices, sizes, head and attention, with reasons, and its first step; then changes from there on."""
    attention, total, trained = policy.attention, count(policy.params), count(policy.trained)
    dtypes = "/".join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(policy.params)}))
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    begun = "; ".join(
        [
            f"{mesh.size} of {jax.device_count()} devices ({jax.devices()[0].device_kind})",
            f"mesh {axes}",
            f"{total:,} parameters in {dtypes}" + f", of which {trained:,} train" * (trained < total),
            f"head {head.impl}" + f" ({head.reason})" * bool(head.reason),
            f"attention {attention.attention.kernel if attention.attention else 'xla'}"
            + f" ({attention.reason})" * bool(attention.reason),
            examples,
            f"resumed from step {step}" if step else "from the beginning",
        ]
    )
    changed = [
        f"after step {c.step}: {c.key} {json.dumps(c.old)} -> {json.dumps(c.new)}" for c in changes if c.step >= step
    ]
    return "\n".join([begun, *changed])


def why_ended(state: RunState, steps: int) -> str:
    """After which step the run has ended, and why, where it had more of them."""
    if state.step >= steps:
        return f"after all {steps:,} steps"
    validations = f"the validation loss has not fallen in {state.validations_without_gain} validations"
    return f"after step {state.step:,} of {steps:,}: {validations} (data.validation.patience)"


def summary(store: RunStore, ended: str, shown: Mapping[str, str]) -> str:
    """The table of a run, read from its metrics.jsonl and timings.jsonl; its first line says how it has `ended`.

    `shown` are the metrics that say what its updates have learned, by their names in the table.
    """
    metrics = read_records(store, "metrics.jsonl")
    timings = read_records(store, "timings.jsonl")
    lines = [("ended", ended), *held_out(metrics), *progress(metrics, shown), *speed(timings), ("", ""), *places(store)]
    width = max(18, *(len(name) for name, _ in lines))
    return "\n".join(["", *(f"{name:<{width}} {text}".rstrip() for name, text in lines)])


def held_out(metrics: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What was measured beside the updates and when: first, last, and a loss where it was lowest."""
    for key in dict.fromkeys(key for record in metrics for key in measured(record)):
        records = [record for record in metrics if record.get(key) is not None]
        lowest = [min(records, key=lambda record: record[key])] if key.endswith("loss") else []
        chosen = {record["step"]: record for record in (records[0], *lowest, records[-1])}
        yield key, ", ".join(f"{number(record, key)} at step {step}" for step, record in chosen.items())


def progress(metrics: list[dict[str, Any]], shown: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What updates learned from: the mean of the first and of the last tenth of the steps."""
    rewards = {key: key for record in metrics for key in rewards_of(record)}
    for name, key in {**shown, **rewards}.items():
        if values := present(metrics, key):
            tenth = max(1, len(values) // 10)
            first, last = fmean(values[:tenth]), fmean(values[-tenth:])
            yield name, f"{first:.3f} in the first tenth, {last:.3f} in the last of {len(values)} steps"
    if metrics and (without := metrics[-1].get("updates_without_gradient")):
        equal = "no completion's reward differed from its group's"
        yield "nothing to learn", f"in {without:,} of {metrics[-1]['step']:,} updates: {equal}"


def speed(timings: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if speeds := present(timings, "tokens_per_second"):
        # Not the median: where several updates share a rollout, it is the speed of the updates without one.
        mean = harmonic_mean(speeds[1:] or speeds)
        yield "tokens/s", f"{mean:,.0f} (of all steps but the first; prompts and completions)"
    phases = dict.fromkeys(key for record in timings for key in record if key.startswith("time/"))
    if sums := [f"{phase.removeprefix('time/')} {sum(present(timings, phase)):.1f}" for phase in phases]:
        yield "seconds", ", ".join(sums)
    if peaks := present(timings, "memory/peak_bytes"):
        yield "peak memory", f"{max(peaks) / 2**20:,.0f} MiB"


def present(records: list[dict[str, Any]], key: str) -> list[float | int]:
    """The values of all records that have one."""
    return [record[key] for record in records if record.get(key) is not None]


def places(store: RunStore) -> Iterator[tuple[str, str]]:
    for name in ("tensorboard", "samples.jsonl", "metrics.jsonl", "checkpoints", "curves.png"):
        if (entry := store.place / name).exists() and (entry.is_dir() or entry.stat().length):
            path = f"{store}/{name}"
            opened_by = f"tensorboard --logdir {shlex.quote(path)}"
            yield name.partition(".")[0], opened_by if name == "tensorboard" else path
