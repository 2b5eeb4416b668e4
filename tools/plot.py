"""Draws the curves of runs side by side: python tools/plot.py RUN [RUN ...] [--out FILE.png]

Each topic of the runs has a panel, and each run a color. Topics: reward, accuracy with its 95 % interval, loss and
validation loss, entropy, KL, completions' lengths from the shortest to the longest, speed. Without --out the picture
goes to the first run's curves.png.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mllm import errors
from mllm.errors import UserError
from mllm.run.store import RunStore, tool_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOPICS = {
    "Reward": ("reward", "eval/reward", "eval/sampled_reward", "test/reward"),
    "Accuracy": ("eval/greedy_accuracy", "test/greedy_accuracy"),
    "Loss (nats)": ("loss", "validation/loss"),
    "Validation: token accuracy": ("validation/token_accuracy",),
    "Share of pairs that are preferred": ("rewards/accuracies", "validation/rewards/accuracies"),
    "Rewards": (),
    "Entropy (nats)": ("entropy",),
    "KL to reference or teacher (nats)": ("kl",),
    "Completion length (tokens)": ("completions/mean_length",),
    "Share of completions cut off": ("completions/clipped_ratio",),
    "Learning rate": ("learning_rate",),
    "Gradient norm": ("grad_norm",),
    "Tokens per second": ("tokens_per_second",),
}
"""The metrics in each panel; avg@k and pass@k are accuracies, and each function's mean is a reward."""
SAMPLED = ("eval/sampled_", "eval/avg@", "validation/")
STYLES = ((SAMPLED, ".--"), ("eval/pass@", ".:"), ("eval/", ".-"), ("test/", "*"), ("", "-"))
"""How a metric is drawn, by the beginning of its name; the first that fits."""
AS_IT_IS = ("learning_rate",)
"""Metrics of steps that are no measurements: their mean would be another schedule."""
EXTREMES = {"completions/mean_length": ("completions/min_length", "completions/max_length")}
"""The ends of a metric's band, where they are not called by its name and _low or _high."""

Record = dict[str, Any]
"""The numbers of a step."""


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run_dir")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="default: curves.png in the first run")
    options = parser.parse_intermixed_args(arguments)
    runs = [tool_run(run) for run in options.runs]
    out = options.out or runs[0].folder / "curves.png"
    figure = draw({str(run): read_run(run) for run in runs})
    try:
        out = out.with_suffix(out.suffix or ".png")
        out.parent.mkdir(parents=True, exist_ok=True)
        if not options.out:
            out.unlink(missing_ok=True)  # in another's run it may be a link that leads anywhere
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: no name, or a format that matplotlib doesn't know
        raise UserError(f"--out: {out} can't be written ({error}); give the path of a .png") from None
    print(f"{'curves':<18} {out}")
    return 0


def read_run(run: RunStore) -> list[Record]:
    """A record for each step with its metrics and timings; UserError if there are no records."""
    steps: dict[int, Record] = {}
    for log in ("metrics.jsonl", "timings.jsonl"):
        for record in run.records(log):
            if isinstance(step := record.get("step"), int):
                steps.setdefault(step, {}).update({key: x for key, x in record.items() if isinstance(x, int | float)})
        if not steps:
            raise UserError(f"{run}: no metrics.jsonl with a line in it; give a run_dir")
    return list(steps.values())


def draw(runs: dict[str, list[Record]]) -> "Figure":
    """A figure with a panel for each topic that a run has metrics for; UserError if there is no such topic."""
    from matplotlib.figure import Figure

    from mllm.run.metrics import at_k, rewards_of

    means = dict.fromkeys(key for records in runs.values() for record in records for key in rewards_of(record))
    curves = [
        (topic, run, key, having)
        for topic, metrics in TOPICS.items()
        for run, records in runs.items()
        for key in (*metrics, *(at_k(records) if topic == "Accuracy" else means if topic == "Rewards" else ()))
        if (having := [record for record in records if key in record])
        # A policy's loss is near 0 on its own samples, so its curve shows nothing.
        and not (key == "loss" and any("reward" in record for record in records))
    ]
    if not curves:
        raise UserError(f"{', '.join(runs)}: metrics.jsonl has nothing to draw yet; wait for the first step")
    topics = list(dict.fromkeys(topic for topic, *_ in curves))
    columns = min(3, len(topics))
    rows = -(-len(topics) // columns)
    figure = Figure(figsize=(4.8 * columns, 3.1 * rows), layout="constrained")
    colors = {run: f"C{index}" for index, run in enumerate(runs)}
    axis: Any = None
    for index, title in enumerate(topics, 1):
        axis = figure.add_subplot(rows, columns, index, sharex=axis, title=title, xlabel="step")
        for topic, run, key, records in curves:
            if topic == title:
                draw_curve(axis, records, key, colors[run], f"{run}, " * (len(runs) > 1))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        axis.legend(fontsize="small", framealpha=0.5)
    return figure


def draw_curve(axis: Any, records: list[Record], key: str, color: str, run: str) -> None:
    """A curve: metrics of steps are faint, under their mean over a twentieth of the run; all else is drawn as it is."""
    style = next(style for begin, style in STYLES if key.startswith(begin))
    ends = EXTREMES.get(key, (f"{key}_low", f"{key}_high"))
    shown = [key, *(end for end in ends if all(end in record for record in records))]
    steps, (values, *band) = [record["step"] for record in records], [[record[x] for record in records] for x in shown]
    if style == "-" and key not in AS_IT_IS:
        axis.plot(steps, values, color=color, alpha=0.3)
        window = max(1, len(values) // 20)
        values, *band = (
            [fmean(x[max(0, end - window) : end]) for end in range(1, len(x) + 1)] for x in (values, *band)
        )
    if len(steps) == 1:
        style = style.replace("-", "") or "."  # a line has no single point
    axis.plot(steps, values, style, color=color, label=run + key)
    if band:
        axis.fill_between(steps, *band, color=color, alpha=0.12 if len(steps) > 1 else 1)  # of one step a line


if __name__ == "__main__":
    errors.run_main(main)
