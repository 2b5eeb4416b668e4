"""Tables and the picture of `python tools/bench head`, from what its processes have measured.

Ratios are medians, over rounds, of a method's time to the sum of the bare products in the same round, so that clocks
and a busy machine cancel: three are h Wᵀ, g W and gᵀ h, four have h Wᵀ twice. TFLOP/s count a method's products at
the rows that count. The picture has a panel for each shape and share of rows that count, and in it a point for each
method that gives the loss and its gradients; down and to the left is better.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mllm.errors import UserError

if TYPE_CHECKING:
    from tools.bench.methods import Method

MARKERS = "oDsv^<>pPX*hd"

Shape = tuple[int, int, int]
"""Tokens, hidden size, vocabulary."""


class Outcome(NamedTuple):
    """What came of a process."""

    found: list[Any]
    """Its answers."""
    status: str = "measured"
    """Or "skipped", "failed"."""
    reason: str = ""


def title(shape: Sequence[int]) -> str:
    return "N={}, D={}, V={}".format(*shape)


def empty_table(shape: Shape, dtype: str, live: float) -> dict[str, Any]:
    """A table without rows for a share `live` of rows that count."""
    sizes = dict(zip("NDV", shape, strict=True))
    return {**sizes, "dtype": dtype, "live": live, "rows": max(1, round(live * shape[0])), "methods": []}


def row(method: "Method", table: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """A method's figures in this table, or why there are none. An error that isn't finite becomes None."""
    about = {"method": method.name, "gradients": method.gradients, "general": method.general}
    figures = next((answer for answer in outcome.found if answer["live"] == table["live"]), None)
    if figures is None:
        return {**about, "status": outcome.status, "reason": outcome.reason}
    rounds = figures["rounds"]
    three = [sum(parts) for parts in zip(rounds["hW"], rounds["gW"], rounds["gh"], strict=True)]
    four = [a + b for a, b in zip(three, rounds["hW"], strict=True)]
    seconds = statistics.median(rounds["method"])
    return {
        **about,
        "status": "measured",
        "seconds": seconds,
        "ratio_to_three": statistics.median(a / b for a, b in zip(rounds["method"], three, strict=True)),
        "ratio_to_four": statistics.median(a / b for a, b in zip(rounds["method"], four, strict=True)),
        "counted_products": method.products,
        "tflops": method.products * product_flops(table) / seconds / 1e12,
        "three_products_seconds": statistics.median(three),
        "four_products_seconds": statistics.median(four),
        **{key: value for key, value in figures.items() if key != "live"},
        "errors": {name: x if math.isfinite(x) else None for name, x in figures["errors"].items()},
    }


def product_flops(table: dict[str, Any]) -> int:
    """The floating-point operations of one matrix product at the rows that count."""
    return 2 * table["rows"] * table["D"] * table["V"]


def bare_products(table: dict[str, Any], through: str) -> dict[str, float]:
    """Seconds of three and of four bare products, medians over the processes that measured them with this library."""
    rows = [row for row in table["methods"] if row["status"] == "measured" and row["through"] == through]
    names = ("three", "four") if rows else ()
    return {n: statistics.median(row[f"{n}_products_seconds"] for row in rows) for n in names}


def lines(table: dict[str, Any]) -> list[str]:
    """The table as text; below it stands what wasn't measured, with the reason."""
    measured = [row for row in table["methods"] if row["status"] == "measured"]
    width = max([len(row["method"]) for row in measured] + [len("three bare products, torch")])
    subject = title((table["N"], table["D"], table["V"]))
    result = [f"{subject}, {table['dtype']}, {table['live']:.0%} of the rows count: {table['rows']}"]
    if measured:
        heads = ["ms", "/three", "/four", "TFLOP/s", "peak MiB", "temp MiB", "loss", "dh", "dW"]
        sizes = [10, 7, 7, 9, 10, 10, 9, 9, 9]
        result.append(" " * width + "".join(f"{head:>{size}}" for head, size in zip(heads, sizes, strict=True)))
    for through in ("XLA", "torch"):
        for number, seconds in bare_products(table, through).items():
            rate = {"three": 3, "four": 4}[number] * product_flops(table) / seconds / 1e12
            name = f"{number} bare products, {through}"
            result.append(f"{name:{width}}{1e3 * seconds:10.2f}{'':14}{rate:9.3g}".rstrip())
    result += [f"{row['method']:{width}}{cells(row)}" for row in measured]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in table["methods"]:
        if row["status"] != "measured":
            reasons.setdefault((row["status"], row["reason"]), []).append(row["method"])
    return result + [f"{status}: {'; '.join(names)}: {reason}" for (status, reason), names in reasons.items()]


def cells(row: dict[str, Any]) -> str:
    peak = "-" if row["peak_bytes"] is None else f"{'≤' * row['peak_is_bound']}{row['peak_bytes'] / 2**20:.0f}"
    temporaries = "-" if row["temp_bytes"] is None else f"{row['temp_bytes'] / 2**20:.1f}"
    errors = "".join(f"{'nan' if x is None else format(x, '.1e'):>9}" for x in row["errors"].values())
    times = f"{1e3 * row['seconds']:10.2f}{row['ratio_to_three']:7.2f}{row['ratio_to_four']:7.2f}{row['tflops']:9.3g}"
    return f"{times}{peak:>10}{temporaries:>10}{errors}"


def points(table: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """For each method that the picture shows: MiB beside arguments and results (at least 1), and milliseconds."""
    return {
        row["method"]: (max(1.0, row["temp_bytes"] / 2**20), 1e3 * row["seconds"])
        for row in table["methods"]
        if row["status"] == "measured" and row["gradients"] and not row["general"] and row["temp_bytes"] is not None
    }


def draw(results: Sequence[dict[str, Any]], heading: str, out: Path) -> None:
    """Draw the tables that have points; none: no file.

    Raises:
        UserError: the picture can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tables = [table for table in results if points(table)]
    if not tables:
        return
    columns = len({table["live"] for table in tables})
    lines = -(-len(tables) // columns)
    names = list(dict.fromkeys(name for table in tables for name in points(table)))
    size = (4.4 * columns + 3.4, max(3.4 * lines, 0.26 * len(names) + 1.2))
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, table in zip(axes.flat, tables, strict=False):
        draw_panel(axis, table, names)
    handles = {text: line for axis in axes.flat for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(heading, fontsize=10, x=0.01, ha="left")
    try:
        figure.savefig(out, dpi=130)
    except OSError as error:
        raise UserError(f"--plot: {out} can't be written ({error.strerror})") from None
    finally:
        plt.close(figure)


def draw_panel(axis: Any, table: dict[str, Any], names: Sequence[str]) -> None:
    for name, (memory, milliseconds) in points(table).items():
        place = names.index(name)
        axis.plot([memory], [milliseconds], MARKERS[place % len(MARKERS)], color=f"C{place % 10}", label=name)
    for (number, seconds), style in zip(bare_products(table, "XLA").items(), ("--", ":"), strict=False):
        axis.axhline(1e3 * seconds, color="black", linewidth=1, linestyle=style, label=f"{number} bare products")
    shape = title((table["N"], table["D"], table["V"]))
    axis.set_title(f"{shape}\n{table['live']:.0%} of the rows count", fontsize=10, loc="left")
    axis.set_xscale("log")
    axis.set_xlim(left=0.7)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("MiB beside arguments and results")
    axis.set_ylabel("ms")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
