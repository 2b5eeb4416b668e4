"""Draws the curves of runs side by side: python tools/plot.py RUN [RUN ...] [--out FILE.png]

One panel for each metric, one color for each run: reward, held-out accuracy with its 95 % interval, loss and
validation loss, entropy, length. Without --out the picture goes to the first run's curves.png.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mllm import errors
from mllm.errors import UserError

PANELS = {
    "reward": "Reward",
    "eval": "Held-out accuracy",
    "loss": "Loss",
    "validation/token_accuracy": "Validation: token accuracy",
    "entropy": "Entropy (nats)",
    "completions/mean_length": "Completion length (tokens)",
    "tokens_per_second": "Tokens per second",
}

Records = list[dict[str, Any]]


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run_dir")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="default: curves.png in the first run")
    options = parser.parse_args(arguments)
    out = options.out or options.runs[0] / "curves.png"
    if not out.suffix:  # matplotlib would add one, and write another file than is told
        raise UserError(f"--out: {out} can't be written without an ending that says what it is; give a .png")
    draw({name(run, options.runs): read_run(run) for run in options.runs}, out)
    print(f"{'curves':<18} {out}")
    return 0


def name(run: Path, runs: Sequence[Path]) -> str:
    """The folder's name, or the whole path where two runs share it."""
    return run.name if sum(other.name == run.name for other in runs) == 1 else str(run)


def read_run(run: Path) -> Records:
    """A record for each step: its metrics and its timings."""
    metrics = read_metrics(run / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{run}: no metrics.jsonl with a line in it; give a run_dir")
    timings = {record["step"]: record for record in read_metrics(run / "timings.jsonl")}
    return [{**timings.get(record["step"], {}), **record} for record in metrics]


def read_metrics(path: Path) -> Records:
    """The numbers in each record of a file.

    Raises:
        UserError: the file can't be read, or a line of it is no record of a step.
    """
    from mllm.run.metrics import read_records

    try:
        records = read_records(path) if os.path.lexists(path) else []
        return [
            {key: x for key, x in record.items() if isinstance(x, int | float)} | {"step": int(record["step"])}
            for record in records
        ]
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
        raise UserError(f"{path}: damaged: a line is no record of a step ({error})") from None


def draw(runs: dict[str, Records], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [key for key in PANELS if any(has(records, key) for records in runs.values())]
    if "reward" in shown and "loss" in shown:
        shown.remove("loss")  # a policy's loss is near 0 on its own samples, so its curve shows nothing
    if not shown:
        raise UserError(f"{', '.join(runs)}: metrics.jsonl has nothing to draw yet; wait for the first step")
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    for axis, key in zip(axes.flat, shown, strict=False):
        for color, (label, records) in enumerate(runs.items()):
            (draw_accuracy if key == "eval" else draw_curve)(axis, records, key, label, f"C{color}")
            if key == "loss":
                draw_curve(axis, records, "validation/loss", f"{label}: validation", f"C{color}", "--")
        axis.set_title(PANELS[key], fontsize=11, loc="left")
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if key == "eval":
            axis.set_ylim(0, 1)
        if key == "eval" or len(runs) > 1 or len(axis.lines) > 2:
            axis.legend(frameon=False, fontsize=9)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib doesn't know
        raise UserError(f"--out: {out} can't be written ({error}); give the path of a .png") from None
    finally:
        plt.close(figure)


def has(records: Records, key: str) -> bool:
    return any(record.get("eval/greedy_accuracy" if key == "eval" else key) is not None for record in records)


def draw_curve(axis: Any, records: Records, key: str, label: str, color: str, style: str = "-") -> None:
    """The values, faint, and their mean over the last twentieth of the run."""
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    window = max(1, len(values) // 20)
    means = [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
    axis.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
    axis.plot(steps, means, style, color=color, linewidth=1.6, label=label)


def draw_accuracy(axis: Any, records: Records, key: str, label: str, color: str) -> None:
    for mode, style in (("greedy", "-"), ("sampled", "--")):
        accuracy = f"eval/{mode}_accuracy"
        found = [record for record in records if record.get(accuracy) is not None]
        if not found:
            continue
        steps = [record["step"] for record in found]
        axis.plot(steps, [r[accuracy] for r in found], style, color=color, marker=".", label=f"{label}: {mode}")
        axis.fill_between(
            steps,
            [r[f"{accuracy}_low"] for r in found],
            [r[f"{accuracy}_high"] for r in found],
            color=color,
            alpha=0.12,
        )


if __name__ == "__main__":
    errors.run_main(main)
