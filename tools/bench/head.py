"""Times the LM head's engines beside the bare matrix products and other implementations; memory and errors, too.

Every method computes the cross-entropy of the same tokens and its gradients by hidden states and weight, unless its
name says otherwise, each in a process of its own. What isn't installed or can't run here is named with the reason.

    ms         median of the rounds, of calls that keep the device busy                      [host's clock]
    /three     the median, over rounds, of the ratio to the time of h Wᵀ, g W and gᵀ h, as XLA (or torch, for
               methods through torch) multiplies them in the same round, at the rows that count
    /four      the same with h Wᵀ twice, which is what a method without a workspace has to do
    TFLOP/s    of the products that a method has to make with the memory it is given: 3, 4, or 1
    peak MiB   the most that the device held, ≤ where compiling held as much   [its own count; - where it has none]
    temp MiB   the peak without arguments and results; on a CPU the compiler's temporaries
    loss ...   the largest difference to plain JAX in float64 (on TPUs float32 at the highest precision), relative to
               the largest magnitude there; for the general backward, "loss" compares logprob and lse

With --target, the methods are compiled for a TPU that isn't there, and not run: see tools/bench/target.py.

Leaves out several devices. Exit codes: 0 done, 2 an error that one line explains.
"""

import argparse
import importlib.metadata
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mllm import errors
from mllm.errors import UserError
from tools.bench.frame import Figures, Outcome, Shape, parser, shape_of, start, table, title

if TYPE_CHECKING:
    from tools.bench.methods import Method

CHILD = "tools.bench.measure"
LEAST = 0.05
"""Seconds of a turn, so that the clock and the start of the calls don't count."""
PACKAGES = (
    *("jax", "jaxlib", "numpy", "optax", "tokamax", "google-tunix"),
    *("torch", "triton", "liger-kernel", "cut-cross-entropy"),
)
"""The packages whose versions are printed, where they are installed."""
LARGE: Shape = (8192, 2048, 151936)
"""The head of Qwen2.5-3B."""
SMALL: Shape = (1024, 256, 16384)
COLUMNS = ("method", "ms", "/three", "/four", "TFLOP/s", "peak MiB", "temp MiB", "loss", "dh", "dW")


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.target:
        from tools.bench import methods, target

        chosen = chosen_methods(options.methods, methods.methods("tpu"))
        target.run(options.target, options.shape or [LARGE], chosen)
    else:
        run(options)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = parser("head", __doc__)
    add = known.add_argument
    add(
        "--shape",
        type=shape_of,
        nargs="+",
        metavar="N,D,V",
        help="tokens, hidden size, vocabulary; several are measured one after the other "
        f"(default on a CPU {','.join(map(str, SMALL))}, else {','.join(map(str, LARGE))})",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="default on a CPU float32, else bfloat16")
    add("--live", type=float, nargs="+", metavar="SHARE", help="shares of rows that count (default 1 0.5 0.25, CPU: 1)")
    add("--methods", nargs="+", metavar="TEXT", help="only those whose name has one of these in it")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="for one method, all shares (default 300)")
    add("--target", metavar="CHIP", help="compile for this TPU, as in v6e, and time nothing")
    add("--repeats", type=int, help="rounds timed, after one that is not (default on a CPU 5, else 10)")
    add("--seed", type=int, default=0, help="seed of the random inputs (default 0)")
    options = known.parse_args(arguments)
    for share in options.live or []:
        if not 0 < share <= 1:
            raise UserError(f"--live: {share:g} is not a number above 0, at most 1")
    for name in ("timeout", "repeats"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name}: {value:g} is not a number above 0")
    if options.seed < 0:
        raise UserError(f"--seed: {options.seed} is below 0")
    for name in ("live", "dtype", "repeats"):
        if options.target and getattr(options, name) is not None:
            raise UserError(f"--{name}: has no meaning with --target, which times nothing")
    return options


def run(options: argparse.Namespace) -> None:
    """Measure, and print each table as it becomes known; UserError where there is no device, or nothing is measured."""
    from tools.bench.methods import methods as known_methods

    with tempfile.TemporaryDirectory() as folder:
        probe = start(CHILD, {}, options.timeout, cache := Path(folder))
        if probe.status != "measured":
            raise UserError(f"JAX finds no device to measure on: {probe.reason}")
        device = probe.found[0]
        cpu = device["platform"] == "cpu"
        methods = chosen_methods(options.methods, known_methods(device["platform"]))
        lives = sorted(set(options.live or ([1.0] if cpu else [1.0, 0.5, 0.25])), reverse=True)
        dtype, rounds = options.dtype or ("float32" if cpu else "bfloat16"), options.repeats or (5 if cpu else 10)
        versions = ", ".join(f"{package} {found}" for package in PACKAGES if (found := version(package)))
        about = f"{device['platform']} {device['kind']}, {versions}; {dtype}"
        print(f"{about}, {datetime.now(UTC):%Y-%m-%d}, {rounds} rounds")
        everything: list[tuple[str, Outcome]] = []
        for shape in options.shape or [SMALL if cpu else LARGE]:
            problem = {**dict(zip(("tokens", "features", "vocabulary"), shape, strict=True)), "dtype": dtype}
            task = {"problem": {**problem, "seed": options.seed}, "lives": lives, "rounds": rounds, "least": LEAST}
            outcomes: dict[str, Outcome] = {}
            for method in methods:
                print(f"{title(shape)}: {method.name}", file=sys.stderr)
                obstacle = method.obstacle(device["platform"])
                outcome = Outcome([], "skipped", obstacle or "")
                if not obstacle:
                    outcome = start(CHILD, {**task, "method": method.name}, options.timeout, cache)
                outcomes[method.name] = outcome
            for live in lives:
                print(f"\n{title(shape)}, {dtype}, {live:.0%} of the rows count", flush=True)
                print(text(shape, live, {method.name: method.products for method in methods}, outcomes), flush=True)
            everything += outcomes.items()
    if not any(outcome.found for _, outcome in everything):
        name, outcome = next((each for each in everything if each[1].status == "failed"), everything[0])
        raise UserError(f"--shape, --methods: nothing could be measured; {name}: {outcome.reason}")


def chosen_methods(texts: Sequence[str] | None, known: Sequence["Method"]) -> list["Method"]:
    for text in texts or []:
        if not any(text.lower() in method.name.lower() for method in known):
            names = "; ".join(method.name for method in known)
            raise UserError(f"--methods: no method has {text!r} in its name; there are: {names}")
    return [method for method in known if not texts or any(text.lower() in method.name.lower() for text in texts)]


def version(package: str) -> str | None:
    """The version of a package; None where it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- the table


def text(shape: Shape, live: float, products: Mapping[str, int], outcomes: Mapping[str, Outcome]) -> str:
    """The table at a share of rows that count; below it stands what wasn't measured, with the reason.

    `products` has the number that each method has to make.
    """
    flops = 2 * max(1, round(live * shape[0])) * shape[1] * shape[2]  # of one product
    rows, bare, reasons = [], dict[str, list[tuple[float, float]]](), dict[str, list[str]]()
    for name, outcome in outcomes.items():
        found = next((found for found in outcome.found if found["live"] == live), None)
        if found is None:
            reasons.setdefault(f"{outcome.status}: {outcome.reason}", []).append(name)
            continue
        own, *each = (found["rounds"][product] for product in ("method", "hW", "gW", "gh"))
        three = [sum(parts) for parts in zip(*each, strict=True)]
        four = [a + b for a, b in zip(three, each[0], strict=True)]
        bare.setdefault(found["through"], []).append((statistics.median(three), statistics.median(four)))
        ratios = (statistics.median(a / b for a, b in zip(own, other, strict=True)) for other in (three, four))
        rows.append(cells(name, statistics.median(own), ratios, products[name] * flops, found))
    for through, medians in bare.items():
        for number, seconds in zip((4, 3), reversed([*zip(*medians, strict=True)]), strict=True):
            middle = statistics.median(seconds)  # over the processes that measured them with this library
            figures = f"{1e3 * middle:.2f}", "", "", f"{number * flops / middle / 1e12:.3g}"
            rows.insert(0, [f"{number} bare products, {through}", *figures, *[""] * 5])
    return "\n".join([table(COLUMNS, rows)] * bool(rows) + [f"{why}: {'; '.join(x)}" for why, x in reasons.items()])


def cells(name: str, seconds: float, ratios: Iterable[float], flops: int, found: Figures) -> list[str]:
    """A method's line of the table."""
    peak, temporaries = found["peak_bytes"], found["temp_bytes"]
    errors = [format(x, ".1e") for x in found["errors"].values()]
    return [
        name,
        f"{1e3 * seconds:.2f}",
        *(f"{ratio:.2f}" for ratio in ratios),
        f"{flops / seconds / 1e12:.3g}",
        "-" if peak is None else f"{'≤' * found['peak_is_bound']}{peak / 2**20:.0f}",
        "-" if temporaries is None else f"{temporaries / 2**20:.1f}",
        *errors,
        *[""] * (3 - len(errors)),
    ]


if __name__ == "__main__":
    errors.run_main(main)
