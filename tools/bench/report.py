"""Tables of `python tools/bench head`, from what its processes have measured.

Ratios are medians, over rounds, of a method's time to the sum of the bare products in the same round, so that clocks
and a busy machine cancel: three are h Wᵀ, g W and gᵀ h, four have h Wᵀ twice. TFLOP/s count a method's products at
the rows that count.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tools.bench.methods import Method

Shape = tuple[int, int, int]
"""Tokens, hidden size, vocabulary."""


class Outcome(NamedTuple):
    """What came of a process."""

    found: list[Any]
    """Its answers."""
    status: str = "measured"
    """Or "skipped", "failed"."""
    reason: str = ""


def shape_of(text: str) -> Shape:
    """For argparse: N,D,V as numbers."""
    try:
        tokens, features, vocabulary = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,D,V: three whole numbers") from None
    if not 1 <= min(tokens, features, vocabulary) <= max(tokens, features, vocabulary) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} has a size that isn't from 1 to {2**31 - 1}")
    return tokens, features, vocabulary


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
