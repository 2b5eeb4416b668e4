"""What tools/bench/head.py tells: rows of figures from what a process has measured, and tables of them.

Ratios are medians, over rounds, of a method's time to the sum of the bare products in the same round, so that clocks
and a busy machine cancel: three are h Wᵀ, g W and gᵀ h, four have h Wᵀ twice. TFLOP/s count a method's products at
the rows that count.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench.methods import Method
from tools.bench.problem import Problem, Shape

MEASURED = "measured"


def title(shape: Shape) -> str:
    return "N={}, D={}, V={}".format(*shape)


def subject(table: dict[str, Any]) -> str:
    return title((table["N"], table["D"], table["V"])) + f", peak {table['peak']:g}" * (table["peak"] > 0)


def table(problem: Problem, live: float) -> dict[str, Any]:
    """With no rows yet; how large the largest probability is on average is known later."""
    sizes = dict(zip("NDV", problem.shape, strict=True))
    about: dict[str, Any] = {**sizes, "dtype": problem.dtype, "peak": problem.peak, "largest_probability": None}
    return {**about, "live": live, "rows": problem.live_rows(live), "methods": []}


def row(method: Method, table: dict[str, Any], outcome: Any) -> dict[str, Any]:
    """A method's figures in this table, or what there is instead. An error that isn't finite is None."""
    about = {"method": method.name, "gradients": method.gradients, "general": method.general}
    found = [figures for figures in outcome.found or [] if figures["live"] == table["live"]]
    if not found:
        return {**about, "status": outcome.status, "reason": outcome.reason}
    figures = found[0]
    rounds = figures["rounds"]
    flops = 2 * table["rows"] * table["D"] * table["V"]
    three, four = bare(rounds)
    seconds = statistics.median(rounds["method"])
    return {
        **about,
        "status": MEASURED,
        "seconds": seconds,
        "ratio_to_three": ratio(rounds["method"], three),
        "ratio_to_four": ratio(rounds["method"], four),
        "counted_products": method.products,
        "tflops": method.products * flops / seconds / 1e12,
        "three_products_seconds": statistics.median(three),
        "four_products_seconds": statistics.median(four),
        **{key: value for key, value in figures.items() if key != "live"},
        "errors": {name: x if math.isfinite(x) else None for name, x in figures["errors"].items()},
    }


def bare(rounds: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    """Seconds of the three and the four bare products, a figure a round."""
    three = [sum(parts) for parts in zip(rounds["hW"], rounds["gW"], rounds["gh"], strict=True)]
    return three, [a + b for a, b in zip(three, rounds["hW"], strict=True)]


def ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def bare_products(table: dict[str, Any], through: str) -> dict[str, float] | None:
    """Seconds of three and four, the median over the processes of a library that measured them."""
    rows = [row for row in table["methods"] if row["status"] == MEASURED and row["through"] == through]
    if not rows:
        return None
    return {n: statistics.median(row[f"{n}_products_seconds"] for row in rows) for n in ("three", "four")}


def lines(table: dict[str, Any]) -> list[str]:
    """The table as text; what wasn't measured stands below it."""
    measured = [row for row in table["methods"] if row["status"] == MEASURED]
    width = max([len(row["method"]) for row in measured] + [len("three bare products, torch")])
    result = [f"{subject(table)}, {table['dtype']}, {table['live']:.0%} of the rows count: {table['rows']}"]
    if table["largest_probability"] is not None:
        result[0] += f"; largest probability {table['largest_probability']:.2g} on average"
    if measured:
        heads = ["ms", "/three", "/four", "TFLOP/s", "peak MiB", "temp MiB", "loss", "dh", "dW"]
        sizes = [10, 7, 7, 8, 10, 10, 9, 9, 9]
        result.append(" " * width + "".join(f"{head:>{size}}" for head, size in zip(heads, sizes, strict=True)))
    flops = 2 * table["rows"] * table["D"] * table["V"]
    for through in ("XLA", "torch"):
        for number, seconds in (bare_products(table, through) or {}).items():
            rate = {"three": 3, "four": 4}[number] * flops / seconds / 1e12
            name = f"{number} bare products, {through}"
            result.append(f"{name:{width}}{1e3 * seconds:10.2f}{'':14}{rate:8.3g}".rstrip())
    result += [f"{row['method']:{width}}{cells(row)}" for row in measured]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in table["methods"]:
        if row["status"] != MEASURED:
            reasons.setdefault((row["status"], row["reason"]), []).append(row["method"])
    return result + [f"{status}: {'; '.join(names)}: {reason}" for (status, reason), names in reasons.items()]


def cells(row: dict[str, Any]) -> str:
    peak = "-" if row["peak_bytes"] is None else f"{'≤' * row['peak_is_bound']}{row['peak_bytes'] / 2**20:.0f}"
    temporaries = "-" if row["temp_bytes"] is None else f"{row['temp_bytes'] / 2**20:.1f}"
    errors = "".join(f"{'nan' if x is None else format(x, '.1e'):>9}" for x in row["errors"].values())
    times = f"{1e3 * row['seconds']:10.2f}{row['ratio_to_three']:7.2f}{row['ratio_to_four']:7.2f}{row['tflops']:8.3g}"
    return f"{times}{peak:>10}{temporaries:>10}{errors}"
