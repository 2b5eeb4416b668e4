"""The figures of bench_train.py as tables in Markdown, with the goals beside them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GOALS = {"update": 0.5, "decode": 0.5, "memory": 4.0}
"""Of the data sheet's flops, of the bound by bandwidth, and times the micro-batch of full logits."""
GOAL_ROWS = 128
"""The batch that decoding's goal is for."""
GIB = 2**30
NONE = "-"

Results = Mapping[str, Mapping[str, Any]]
"""What came of each measurement, with the rates that it is held against, by its name."""


def show(device: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]]) -> str:
    """All that was measured; nothing of a part without measurements.

    Args:
        jobs: as `Jobs` records them.
    """
    if not device:
        return "nothing was measured"
    results = {name: job["result"] | job["rates"] for name, job in jobs.items()}
    parts = (updates(device, results), decoding(results), memory(results))
    return "\n\n".join(["", about(device), *filter(None, parts)])


def about(device: Mapping[str, Any]) -> str:
    peak = f", {device['peak_flops'] / 1e12:.0f} TFLOP/s by the data sheet" if device["peak_flops"] else ""
    product = f"{device['matmul_flops'] / 1e12:.3g} TFLOP/s by a bfloat16 product of {device['matmul']} cubed"
    copy = f"{device['copy_bytes'] / 1e12:.3g} TB/s by a copy, read and written"
    memory = f"a program may have {device['memory'] / GIB:.1f} GiB"
    return f"{device['kind']}, jax {device['jax']}{peak}; measured: {product}, {copy}; {memory}"


def updates(device: Mapping[str, Any], results: Results) -> str:
    header = (
        "update",
        "rows x tokens",
        "micro",
        "attention",
        "rollout s",
        "log-prob s",
        "update s",
        "step s",
        "tokens/s of a step",
        "of the update",
        "TFLOP/s",
        "MFU, data sheet",
        "MFU, measured product",
        "peak GiB",
        f"goal {GOALS['update']:.0%}",
    )
    return table(header, (update(device, name, result) for name, result in of("update", results)))


def update(device: Mapping[str, Any], name: str, result: Mapping[str, Any]) -> Sequence[str]:
    if "out_of_memory" in result:
        return [name, "out of memory"]
    seconds, tokens = result["seconds"], result["rows"] * result["length"]
    step = seconds["update"] + seconds.get("rollout", 0) + result["logprob_passes"] * seconds.get("logprob", 0)
    rate = result["flops"] / seconds["update"]
    share = rate / device["peak_flops"] if device["peak_flops"] else None
    return [
        name,
        f"{result['rows']} x {result['length']}",
        str(result["micro"]),
        result["attention"],
        *(f"{seconds[phase]:.3f}" if phase in seconds else NONE for phase in ("rollout", "logprob", "update")),
        f"{step:.3f}",
        f"{tokens / step:,.0f}",
        f"{tokens / seconds['update']:,.0f}",
        f"{rate / 1e12:.3g}",
        percent(share),
        percent(rate / result["matmul_flops"]),
        gib(result["peak_bytes"]),
        met(share, GOALS["update"]),
    ]


def decoding(results: Results) -> str:
    header = (
        "decode",
        "prompt + completion",
        "prefill s",
        "ms a step",
        "tokens/s",
        "bound, tokens/s",
        "of the bound",
        "peak GiB",
        f"goal {GOALS['decode']:.0%} at {GOAL_ROWS}",
    )
    return table(header, (decode(name, result) for name, result in of("decode", results)))


def decode(name: str, result: Mapping[str, Any]) -> Sequence[str]:
    if "out_of_memory" in result:
        return [name, "out of memory"]
    turns = result["turns"]
    bounds = [turn["bytes"] / result["copy_bytes"] for turn in turns]
    share = statistics.median(bound / turn["seconds"] for bound, turn in zip(bounds, turns, strict=True))
    steps, seconds = sum(turn["steps"] for turn in turns), sum(turn["seconds"] for turn in turns)
    return [
        name,
        f"{result['prompt']} + {result['completion']}",
        f"{result['prefill_seconds']:.3f}",
        f"{1e3 * seconds / steps:.2f}",
        f"{result['rows'] * steps / seconds:,.0f}",
        f"{result['rows'] * steps / sum(bounds):,.0f}",
        percent(share),
        gib(result["peak_bytes"]),
        met(share, GOALS["decode"]) if result["rows"] == GOAL_ROWS else NONE,
    ]


def memory(results: Results) -> str:
    """Peaks by rows and head, and what the searches came to."""
    peaks: dict[str, dict[int, dict[str, str]]] = {}
    for name, result in of("memory", results):
        case, head, rows = name.split(", ")
        peak = gib(result["peak_bytes"]) if "peak_bytes" in result else "out of memory"
        peaks.setdefault(case, {}).setdefault(int(rows.split()[0]), {})[head] = peak
    lines = []
    for case, by_rows in peaks.items():
        heads = ("reference", "fused")
        header = (f"memory {case}, rows", *(f"{head}, peak GiB" for head in heads))
        cells = ([str(count), *(by_rows[count].get(head, NONE) for head in heads)] for count in sorted(by_rows))
        lines += [table(header, cells), largest(case, results)]
    return "\n\n".join(filter(None, lines))


def largest(case: str, results: Results) -> str:
    found = {head: results.get(f"largest {case}, {head}") for head in ("reference", "fused")}
    said = [f"{head} {limit(result)}" for head, result in found.items() if result is not None]
    text = f"largest micro-batch, {case}: {'; '.join(said)}" if said else ""
    reference, fused = found["reference"], found["fused"]
    if reference and fused and reference["rows"] and reference["refused"]:
        times = fused["rows"] / reference["rows"]
        least = "at least " if fused["refused"] is None else ""
        text += f"; {least}{times:.1f} times, goal {GOALS['memory']:g}: {met(times, GOALS['memory'])}"
    return text


def limit(result: Mapping[str, Any]) -> str:
    if result["refused"] is None:
        return f"{result['rows']} (nothing ran out of memory up to there)"
    return f"{result['rows']} ({result['refused']} ran out of memory)"


def of(part: str, results: Results) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The measurements of a part, without its name in front of theirs."""
    return [(name.removeprefix(f"{part} "), result) for name, result in results.items() if name.startswith(f"{part} ")]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join([*row, *[NONE] * (len(header) - len(row))])} |" for row in rows]
    rule = f"| --- |{' ---: |' * (len(header) - 1)}"
    return "\n".join([f"| {' | '.join(header)} |", rule, *lines]) if lines else ""


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def gib(count: int | None) -> str:
    return NONE if count is None else f"{count / GIB:.2f}"


def met(reached: float | None, goal: float) -> str:
    return NONE if reached is None else "met" if reached >= goal else "missed"
