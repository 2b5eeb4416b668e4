"""Times the LM head's engines beside the bare matrix products and other implementations; memory and errors, too.

Every method computes the cross-entropy of the same tokens and its gradients by hidden states and weight, unless its
name says otherwise, each in a process of its own. What isn't installed or can't run here is named with the reason.
Tables come at the end; a method's rows go to stderr as soon as it has run, with the share of rows that count.

    ms         median of the rounds, of calls that keep the device busy                      [host's clock]
    /three     the median, over rounds, of the ratio to the time of h Wᵀ, g W and gᵀ h, as XLA
               multiplies them in the same round, at the rows that count
    temp MiB   memory beside arguments and results             [the compiler's figure]
    loss ...   the largest difference to plain JAX in float64 (on TPUs float32 at the highest precision), relative to
               the largest magnitude there; for the general backward, "loss" compares logprob and lse

Methods named "float32 master" are the trainer's case: the weight is the bfloat16 copy of a float32 master, which gets a
float32 gradient. The others' gradient has the weight's dtype.

Leaves out several devices. Exit codes: 0 done, 2 an error that one line explains.
"""

import argparse
import importlib.metadata
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mllm import errors
from mllm.errors import UserError
from tools.bench.frame import Figures, Shape, line, positive, shape_of, start, table, title

if TYPE_CHECKING:
    from tools.bench.methods import Method

CHILD = "tools.bench.measure"
LEAST = 0.05
"""Seconds of a turn, so that the clock and the start of the calls don't count."""
PACKAGES = ("jax", "jaxlib", "optax", "tokamax", "google-tunix")
"""The packages whose versions are printed, where they are installed."""
LARGE: Shape = (8192, 2048, 151936)
"""The head of Qwen2.5-3B."""
SMALL: Shape = (1024, 256, 16384)
COLUMNS = ("method", "ms", "/three", "temp MiB", "loss", "dh", "dW")
Measured = tuple[list[Figures], str]
"""A method's figures at each share of rows that count, and why there are no more, "" where there are all."""


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from tools.bench.methods import methods as known_methods

    with tempfile.TemporaryDirectory() as cache:
        answers, failure = start(CHILD, {}, options.timeout, cache)
        if failure:
            raise UserError(f"JAX finds no device to measure on: {failure}")
        platform, kind = answers[0]["platform"], answers[0]["kind"]
        cpu = platform == "cpu"
        methods = chosen_methods(options.methods, known_methods(platform))
        lives = sorted(set(options.live or [1.0, 0.25]), reverse=True)
        dtype, rounds = options.dtype or ("float32" if cpu else "bfloat16"), options.repeats or (5 if cpu else 10)
        installed = {package.name.replace("_", "-"): package.version for package in importlib.metadata.distributions()}
        versions = ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)
        print(f"{platform} {kind}, {versions}; {dtype}, {datetime.now(UTC):%Y-%m-%d}, {rounds} rounds")
        shape = options.shape or (SMALL if cpu else LARGE)
        task = {"shape": shape, "dtype": dtype, "lives": lives, "rounds": rounds, "least": LEAST}
        measured: dict[str, Measured] = {}
        for method in methods:
            print(f"{title(shape)}: {method.name}", file=sys.stderr)
            obstacle = method.obstacle(platform)
            case = {**task, "method": method.name}
            measured[method.name] = ([], obstacle) if obstacle else start(CHILD, case, options.timeout, cache)
            for figures in measured[method.name][0]:
                print(line([f"{method.name}, {figures['live']:.0%}", *cells(figures)]), file=sys.stderr)
    for live in lives:
        print(f"\n{title(shape)}, {dtype}, {live:.0%} of the rows count")
        print(text(live, measured))
    if not any(figures for figures, _ in measured.values()):
        raise UserError("--shape, --methods: nothing could be measured")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = errors.ArgumentParser(__doc__, prog="python tools/bench head")
    add, sizes = known.add_argument, [",".join(map(str, shape)) for shape in (SMALL, LARGE)]
    shape = f"tokens, hidden size, vocabulary (default on a CPU {sizes[0]}, else {sizes[1]})"
    add("--shape", type=shape_of, metavar="N,D,V", help=shape)
    add("--dtype", choices=("float32", "bfloat16"), help="default on a CPU float32, else bfloat16")
    live = "shares of rows that count (default 1 0.25)"
    add("--live", type=positive(float, most=1), nargs="+", metavar="SHARE", help=live)
    add("--methods", nargs="+", metavar="TEXT", help="only those whose name has one of these in it")
    add("--timeout", type=positive(float), default=300.0, metavar="S", help="for one method, all shares (default 300)")
    add("--repeats", type=positive(int), help="rounds timed, after one that is not (default on a CPU 5, else 10)")
    return known.parse_args(arguments)


def chosen_methods(texts: Sequence[str] | None, known: Sequence["Method"]) -> list["Method"]:
    for text in texts or []:
        if not any(text.lower() in method.name.lower() for method in known):
            names = "; ".join(method.name for method in known)
            raise UserError(f"--methods: no method has {text!r} in its name; there are: {names}")
    return [method for method in known if not texts or any(text.lower() in method.name.lower() for text in texts)]


# --- the table


def text(live: float, measured: Mapping[str, Measured]) -> str:
    """The table at a share of rows that count; below it stands what wasn't measured, with the reason."""
    rows, measured_here, reasons = list[list[str]](), list[Figures](), dict[str, list[str]]()
    for name, (answers, reason) in measured.items():
        shown = [figures for figures in answers if figures["live"] == live]
        for figures in shown:
            measured_here.append(figures)
            rows.append([name, *cells(figures)])
        if not shown:
            reasons.setdefault(reason, []).append(name)
    if measured_here:
        seconds = statistics.median(statistics.median(bare_seconds(figures)) for figures in measured_here)
        rows.insert(0, ["3 bare products", f"{1e3 * seconds:.2f}", *[""] * 5])
    absent = [f"not measured: {why}: {'; '.join(names)}" for why, names in reasons.items()]
    return "\n".join([table(COLUMNS, rows), *absent] if rows else absent)


def bare_seconds(figures: Figures) -> list[float]:
    """Seconds of the three bare products in each round."""
    rounds = figures["rounds"]
    return [hw + gw + gh for hw, gw, gh in zip(rounds["hW"], rounds["gW"], rounds["gh"], strict=True)]


def cells(figures: Figures) -> list[str]:
    """A method's figures in the table."""
    rounds = figures["rounds"]["method"]
    ratio = statistics.median(a / b for a, b in zip(rounds, bare_seconds(figures), strict=True))
    errors = [format(x, ".1e") for x in figures["errors"]]
    temporaries = f"{figures['temp_bytes'] / 2**20:.1f}"
    return [f"{1e3 * statistics.median(rounds):.2f}", f"{ratio:.2f}", temporaries, *errors, *[""] * (3 - len(errors))]
