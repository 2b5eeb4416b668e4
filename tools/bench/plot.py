"""Draws what tools/bench/head.py measured: time against memory, a panel a shape and share of rows that count.

One point an implementation, of those that give the loss and its gradients; lines where the three and the four bare
products are. Down and to the left is better.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from mllm.errors import UserError
from tools.bench.report import MEASURED, bare_products, subject

MARKERS = "oDsv^<>pPX*hd"
LEAST = 1.0
"""MiB: the logarithm of none isn't drawn."""


def check(path: Path | None) -> None:
    """Raise UserError where no picture can be written at `path`: better before the work than after it."""
    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot: {path} doesn't say what it is; end it in .png, .svg or .pdf")
    if not path.parent.is_dir() or path.is_dir():
        raise UserError(f"--plot: {path} can't be written: {path.parent} is no folder, or {path.name} is one")


def points(table: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """MiB beside arguments and results, and milliseconds, by method."""
    return {
        row["method"]: (max(LEAST, row["temp_bytes"] / 2**20), 1e3 * row["seconds"])
        for row in table["methods"]
        if row["status"] == MEASURED and row["gradients"] and not row["general"] and row["temp_bytes"] is not None
    }


def draw(results: Sequence[dict[str, Any]], heading: str, out: Path) -> bool:
    """False where there is nothing to draw.

    Raises:
        UserError: the picture can't be written.
    """
    tables = [table for table in results if points(table)]
    if not tables:
        return False
    subjects = list(dict.fromkeys(subject(table) for table in tables))
    lives = sorted({table["live"] for table in tables}, reverse=True)
    names = list(dict.fromkeys(name for table in tables for name in points(table)))
    size = (4.4 * len(lives) + 3.4, max(3.4 * len(subjects), 0.26 * len(names) + 1.2))
    figure, axes = plt.subplots(len(subjects), len(lives), figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.set_visible(False)
    for table in tables:
        place = subjects.index(subject(table)), lives.index(table["live"])
        panel(axes[place], table, names)
    handles = {text: line for axis in axes.flat for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    ordered = [name for name in names if name in handles] + [name for name in handles if name not in names]
    figure.legend([handles[name] for name in ordered], ordered, loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(heading, fontsize=10, x=0.01, ha="left")
    try:
        figure.savefig(out, dpi=130)
    except OSError as error:
        raise UserError(f"--plot: {out} can't be written ({error.strerror})") from None
    finally:
        plt.close(figure)
    return True


def panel(axis: Axes, table: dict[str, Any], names: Sequence[str]) -> None:
    axis.set_visible(True)
    families = list(dict.fromkeys(name.split(",")[0] for name in names))
    found, bare = points(table), bare_products(table, "XLA") or {}
    for name, (memory, milliseconds) in found.items():
        colour, marker = f"C{families.index(name.split(',')[0]) % 10}", MARKERS[names.index(name) % len(MARKERS)]
        axis.plot([memory], [milliseconds], label=name, marker=marker, color=colour, linestyle="none", markersize=8)
    for (number, seconds), style in zip(bare.items(), ("--", ":"), strict=False):
        axis.axhline(1e3 * seconds, color="black", linewidth=1, linestyle=style, label=f"{number} bare products")
    axis.set_xscale("log")
    axis.set_xlim(LEAST / 1.5, 2 * max(memory for memory, _ in found.values()))
    axis.set_ylim(0, 1.1 * max([milliseconds for _, milliseconds in found.values()] + [1e3 * x for x in bare.values()]))
    axis.set_title(f"{subject(table)}\n{table['live']:.0%} of the rows count", fontsize=10, loc="left")
    axis.set_xlabel("MiB beside arguments and results")
    axis.set_ylabel("ms")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
