"""Draws the curves of runs side by side: python tools/plot.py RUN [RUN ...] [--out FILE.png]

One panel for each topic that the runs have, one color for each run: reward, accuracy with its 95 % interval, loss and
validation loss, entropy, KL, completions' lengths from the shortest to the longest, speed. Without --out the picture
goes to the first run's curves.png.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from mllm import errors
from mllm.errors import UserError
from mllm.store.run_store import RunStore, tool_run

TOPICS = {
    "Reward": {
        "training": "reward",
        "held-out": "eval/reward",
        "held-out, sampled": "eval/sampled_reward",
        "test": "test/reward",
    },
    "Accuracy": {
        "held-out": "eval/greedy_accuracy",
        "held-out, sampled": "eval/sampled_accuracy",
        "test": "test/greedy_accuracy",
    },
    "Loss (nats)": {"training": "loss", "validation": "validation/loss"},
    "Validation: token accuracy": {"validation": "validation/token_accuracy"},
    "Entropy (nats)": {"training": "entropy"},
    "KL to the reference (nats)": {"training": "kl"},
    "Completion length (tokens)": {"training": "completions/mean_length"},
    "Share of completions cut off": {"training": "completions/clipped_ratio"},
    "Tokens per second": {"training": "tokens_per_second"},
}
"""For each panel the metrics in it, and what its legend calls them."""
STYLES = {"training": "-", "held-out": ".-", "held-out, sampled": ".--", "validation": ".--", "test": "*"}
EXTREMES = {"completions/mean_length": ("completions/min_length", "completions/max_length")}
"""The ends of a metric's band, where they are not called by its name and _low or _high."""

Records = list[dict[str, Any]]


class Series(NamedTuple):
    """A metric of a run: its values at some steps, and the band around each where it has one."""

    run: str
    name: str
    steps: list[int]
    values: list[float]
    band: tuple[list[float], list[float]] | None


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run_dir")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="default: curves.png in the first run")
    options = parser.parse_args(arguments)
    runs = [tool_run(run) for run in options.runs]
    records = {str(run): read_run(run) for run in runs}
    out = options.out or runs[0].local_folder / "curves.png"
    if not out.suffix:  # matplotlib would add one, and another file would be written than is printed
        raise UserError(f"--out: {out} can't be written without an ending that says what it is; give a .png")
    draw(records, out)
    print(f"{'curves':<18} {out}")
    return 0


def read_run(run: RunStore) -> Records:
    """A record for each step: its metrics and its timings."""
    metrics = read_metrics(run, "metrics.jsonl")
    if not metrics:
        raise UserError(f"{run}: no metrics.jsonl with a line in it; give a run_dir")
    timings = {record["step"]: record for record in read_metrics(run, "timings.jsonl")}
    return [{**timings.get(record["step"], {}), **record} for record in metrics]


def read_metrics(run: RunStore, log: str) -> Records:
    """The numbers in each record of a file.

    Raises:
        UserError: the file can't be read, or a line of it is no record of a step.
    """
    from mllm.run.metrics import read_records

    try:
        return [
            {key: x for key, x in record.items() if isinstance(x, int | float)} | {"step": int(record["step"])}
            for record in read_records(run, log)
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{run}/{log}: damaged: a line is no record of a step ({error})") from None


def panels(runs: dict[str, Records]) -> dict[str, list[Series]]:
    """The series of each topic that a run has, by the panel's title."""
    found = {
        topic: [
            series
            for run, records in runs.items()
            # A policy's loss is near 0 on its own samples, so its curve shows nothing.
            if not (topic.startswith("Loss") and any("reward" in record for record in records))
            for name, key in metrics.items()
            if (series := find(run, name, records, key))
        ]
        for topic, metrics in TOPICS.items()
    }
    return {topic: series for topic, series in found.items() if series}


def find(run: str, name: str, records: Records, key: str) -> Series | None:
    """The metric `key` of the records that have it; None if none has."""
    records = [record for record in records if key in record]
    if not records:
        return None
    ends = EXTREMES.get(key, (f"{key}_low", f"{key}_high"))
    has_band = all(end in record for record in records for end in ends)
    band = ([record[ends[0]] for record in records], [record[ends[1]] for record in records]) if has_band else None
    return Series(run, name, [record["step"] for record in records], [record[key] for record in records], band)


def draw(runs: dict[str, Records], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    topics = panels(runs)
    if not topics:
        raise UserError(f"{', '.join(runs)}: metrics.jsonl has nothing to draw yet; wait for the first step")
    columns = min(3, len(topics))
    rows = -(-len(topics) // columns)
    figure = plt.figure(figsize=(4.8 * columns, 3.1 * rows), layout="constrained")
    colors = {run: f"C{place}" for place, run in enumerate(runs)}
    axis: Any = None
    for place, (topic, drawn) in enumerate(topics.items()):
        axis = figure.add_subplot(rows, columns, place + 1, sharex=axis)
        for series in drawn:
            draw_series(axis, series, colors[series.run], f"{series.run}, " * (len(runs) > 1) + series.name)
        axis.set_title(topic)
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        axis.legend(fontsize="small", framealpha=0.5)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib doesn't know
        raise UserError(f"--out: {out} can't be written ({error}); give the path of a .png") from None
    finally:
        plt.close(figure)


def draw_series(axis: Any, series: Series, color: str, label: str) -> None:
    """What comes with a step, faint, with its mean over the last twentieth of the run; what is measured, as it is."""
    _, name, steps, values, band = series
    style = STYLES[name]
    if name == "training":
        axis.plot(steps, values, color=color, alpha=0.3)
        values, band = smooth(values), band and (smooth(band[0]), smooth(band[1]))
    if len(steps) == 1:
        style = style.replace("-", "") or "."  # a line has no single point
    axis.plot(steps, values, style, color=color, label=label)
    if band:
        axis.fill_between(steps, *band, color=color, alpha=0.12)
    if band and len(steps) == 1:
        axis.vlines(steps, *band, color=color)


def smooth(values: list[float]) -> list[float]:
    """The means over the last twentieth of the run."""
    window = max(1, len(values) // 20)
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


if __name__ == "__main__":
    errors.run_main(main)
