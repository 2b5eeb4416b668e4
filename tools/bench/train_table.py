"""The figures of `python tools/bench train` as tables in Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GIB = 2**30
NONE = "-"

Results = Mapping[str, Mapping[str, Any]]
"""The results by name, each with the rates of the device at its time."""


def report(device: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables in Markdown of all that was measured; a part without measurements is left out."""
    if not device:
        return "nothing was measured"
    results = {name: job["result"] | job["rates"] for name, job in jobs.items()}
    columns = "rows x tokens|micro|attention|rollout s|log-prob s|update s|step s|tokens/s of a step|of the update|"
    columns += "TFLOP/s|MFU, data sheet|MFU, measured product|peak GiB"
    updates = table(f"update|{columns}", (update_row(device, *named) for named in part_of("update", results)))
    columns = "prompt + completion|prefill s|ms a step|tokens/s|bound, tokens/s|of the bound|peak GiB"
    decoding = table(f"decode|{columns}", (decode_row(*named) for named in part_of("decode", results)))
    return "\n\n".join(["", about(device), *filter(None, (updates, decoding))])


def about(device: Mapping[str, Any]) -> str:
    peak = f", {device['peak_flops'] / 1e12:.0f} TFLOP/s by the data sheet" if device["peak_flops"] else ""
    product = f"{device['matmul_flops'] / 1e12:.3g} TFLOP/s by a bfloat16 product of {device['matmul']} cubed"
    copy = f"{device['copy_bytes'] / 1e12:.3g} TB/s by a copy, read and written"
    memory = f"a program may have {device['memory'] / GIB:.1f} GiB"
    return f"{device['kind']}, jax {device['jax']}{peak}; measured: {product}, {copy}; {memory}"


def update_row(device: Mapping[str, Any], name: str, result: Mapping[str, Any]) -> Sequence[str]:
    if "out_of_memory" in result:
        return [name, "out of memory"]
    seconds, tokens = result["seconds"], result["rows"] * result["length"]
    step = seconds["update"] + seconds.get("rollout", 0) + result["logprob_passes"] * seconds.get("logprob", 0)
    rate = result["flops"] / seconds["update"]
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
        f"{rate / device['peak_flops']:.1%}" if device["peak_flops"] else NONE,
        f"{rate / result['matmul_flops']:.1%}",
        gib(result["peak_bytes"]),
    ]


def decode_row(name: str, result: Mapping[str, Any]) -> Sequence[str]:
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
        f"{share:.1%}",
        gib(result["peak_bytes"]),
    ]


def part_of(part: str, results: Results) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The results of a part, by their names without the part's."""
    return [(name.removeprefix(f"{part} "), result) for name, result in results.items() if name.startswith(f"{part} ")]


def table(header: str, rows: Iterable[Sequence[str]]) -> str:
    columns = header.split("|")
    lines = [f"| {' | '.join([*row, *[NONE] * (len(columns) - len(row))])} |" for row in rows]
    return (
        "\n".join([f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}", *lines]) if lines else ""
    )


def gib(count: int | None) -> str:
    return NONE if count is None else f"{count / GIB:.2f}"
