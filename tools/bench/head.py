"""Times the fused head beside the bare matrix products and what others have; memory and errors in the same table.

Every method computes the cross-entropy of the same tokens and its gradients by hidden states and weight, but for those
whose name says otherwise, in a process of its own. What isn't installed, or can't run here, is named with the reason.

    ms         median of the rounds, of calls that the device is kept busy with                     [host's clock]
    /three     the median, over rounds, of the time to that of h Wᵀ, g W and gᵀ h, as XLA (or, for
               methods through torch, torch) multiplies them in the same round, at the rows that count
    /four      the same with h Wᵀ twice, which is what a method without a workspace has to do
    TFLOP/s    of the products that a method has to make with the memory it is given: 3, 4, or 1
    peak MiB   the most that the device held                              [its own count; - where it has none]
    temp MiB   of that, beside arguments and results; on a CPU the compiler's temporaries
    loss ...   the largest difference to float32 at the highest precision, relative to the largest magnitude there;
               of the general backward, for the loss, that of logprob and lse

With `--target`, for a TPU that isn't there, compiled and not run: see bench_target.py.

Leaves out: several devices.

Exit codes: 0 done, 2 something that you can mend (one line says what).
"""

import argparse
import importlib.util
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from mllm.errors import ArgumentParser, UserError
from mllm.plan.targets import CHIPS

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # a script sees only its own folder
from tools import figures, machine
from tools.bench import methods as bench_methods
from tools.bench import plot as bench_plot
from tools.bench import report as bench_report
from tools.bench import run as bench_run
from tools.bench import target as bench_target
from tools.bench.methods import Method
from tools.bench.problem import MODELS, PRESETS, VOCABULARY, Shape, shapes_of
from tools.bench.run import Children, Settings

LARGE: Shape = (8192, MODELS["3B"], VOCABULARY)
SMALL: Shape = (1024, 256, 16384)
LEAST = 0.05
"""Seconds that a turn takes: the clock and the start of the calls don't count then."""
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "tokamax", "torch", "triton", "liger-kernel", "cut-cross-entropy")
FOREVER = 10.0**9


def parser() -> ArgumentParser:
    result = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument(
        "--shape",
        type=shapes_of,
        nargs="+",
        metavar="N,D,V",
        help="tokens, hidden size, vocabulary; several are measured one after the other. N,3B has the sizes of "
        f"Qwen2.5-3B, 3B alone is that at 1024 to 65536 tokens; so for {', '.join(MODELS)} "
        f"(default on a CPU {','.join(map(str, SMALL))}, else {','.join(map(str, LARGE))})",
    )
    result.add_argument("--preset", choices=sorted(PRESETS), help="a list of shapes, what matters most first")
    result.add_argument("--dtype", choices=("float32", "bfloat16"), help="default on a CPU float32, else bfloat16")
    result.add_argument(
        "--live",
        type=share,
        nargs="+",
        metavar="SHARE",
        help="shares of rows that count (default on a CPU 1, else 1 0.5 0.25)",
    )
    result.add_argument("--methods", nargs="+", metavar="TEXT", help="only those whose name has one of these in it")
    result.add_argument("--limit", type=positive, metavar="SECONDS", help="end by then; tell what was left out")
    result.add_argument(
        "--timeout", type=positive, default=300.0, metavar="SECONDS", help="of one method, all shares (default 300)"
    )
    result.add_argument(
        "--target",
        choices=sorted(CHIPS),
        help="compile for this TPU instead and time nothing, in bfloat16; needs libtpu, which make aot installs",
    )
    result.add_argument("--repeats", type=int, help="rounds timed, after one that is not (default on a CPU 5, else 10)")
    result.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    result.add_argument(
        "--peak",
        type=positive,
        default=0.0,
        metavar="P",
        help="inputs as a trained model has them: words by Zipf's law, a label's logit P above (default: all normal)",
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, as they become known")
    result.add_argument("--plot", type=Path, metavar="FILE", help="draw time against memory there (.png, .svg, .pdf)")
    return result


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most 1")
    return number


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= FOREVER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parser().parse_args(arguments)
        if options.repeats is not None and options.repeats < 1:
            raise UserError(f"--repeats: {options.repeats} rounds give no time, 1 is the least")
        if not 0 <= options.seed < 2**31:
            raise UserError(f"--seed: {options.seed} is not from 0 to {2**31 - 1}")
        if options.shape and options.preset:
            raise UserError("--preset: is a list of shapes, as --shape is; give one of them")
        figures.check(options.json)
        bench_plot.check(options.plot)
        if options.target:
            of_target(options)
        else:
            of_device(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def chosen_shapes(options: argparse.Namespace, default: Shape) -> list[Shape]:
    if options.preset:
        return PRESETS[options.preset]
    return [shape for shapes in options.shape or [[default]] for shape in shapes]


def chosen_methods(texts: Sequence[str] | None, platform: str) -> list[Method]:
    known = bench_methods.methods(platform)
    for text in texts or []:
        if not any(text.lower() in method.name.lower() for method in known):
            names = "; ".join(method.name for method in known)
            raise UserError(f"--methods: no method has {text!r} in its name; there are: {names}")
    return [method for method in known if not texts or any(text.lower() in method.name.lower() for text in texts)]


def of_device(options: argparse.Namespace) -> None:
    """Measure, and tell it as it becomes known.

    Raises:
        UserError: there is no device, or nothing could be measured.
    """
    children = Children(options.limit or FOREVER, options.timeout)
    probe = children.start({"task": "device"})
    if probe.status != bench_report.MEASURED:
        raise UserError(f"JAX finds no device to measure on: {probe.reason}")
    device = probe.found
    cpu = device["platform"] == "cpu"
    methods = chosen_methods(options.methods, device["platform"])
    settings = Settings(
        dtype=options.dtype or ("float32" if cpu else "bfloat16"),
        lives=sorted(set(options.live or ([1.0] if cpu else [1.0, 0.5, 0.25])), reverse=True),
        rounds=options.repeats or (5 if cpu else 10),
        least=LEAST,
        seed=options.seed,
        peak=options.peak,
    )
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device | {"driver": machine.driver()},
        "versions": machine.versions(PACKAGES),
        "dtype": settings.dtype,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "peak": settings.peak,
        "results": [],
    }
    heading = f"{device['platform']} {device['kind']}, jax {jax.__version__}, {settings.dtype}, {report['date'][:10]}"
    print(f"{heading}, {settings.rounds} rounds")

    shapes = chosen_shapes(options, SMALL if cpu else LARGE)
    results = report["results"]
    for tables, complete in bench_run.bench(shapes, methods, device["platform"], settings, children):
        if len(tables[0]["methods"]) == 1:
            results += tables
        keep(options.json, report)
        if complete:
            print("".join("\n" + "\n".join(bench_report.lines(table)) + "\n" for table in tables), end="", flush=True)
        if complete and options.plot:
            bench_plot.draw(results, heading, options.plot)
    rows = [row for table in report["results"] for row in table["methods"]]
    if all(row["status"] != bench_report.MEASURED for row in rows):
        reason = next((row["reason"] for row in rows if row["status"] != "skipped"), rows[0]["reason"])
        raise UserError(f"--shape, --methods: nothing could be measured; of {rows[0]['method']}: {reason}")


def keep(path: Path | None, report: dict[str, Any]) -> None:
    """Write the file as a whole: who is cut off has the one before."""
    if path is not None:
        draft = path.with_name(f"{path.name}.part")
        figures.write(draft, report)
        draft.replace(path)


def of_target(options: argparse.Namespace) -> None:
    for name in ("plot", "methods", "live", "limit"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name}: has no meaning with --target, which times nothing")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("--target: libtpu, the TPU compiler, isn't installed; make aot does")
    print(f"{options.target} by its compiler, jax {jax.__version__}, bfloat16; nothing was run, and nothing is a time")
    results = []
    for shape in chosen_shapes(options, LARGE):
        print(f"\n{bench_report.title(shape)}")
        rows = bench_target.table(options.target, shape)
        bench_target.show(rows)
        results.append(dict(zip("NDV", shape, strict=True)) | {"methods": [asdict(row) for row in rows]})
    report = {"target": options.target, "jax": jax.__version__, "dtype": "bfloat16", "results": results}
    figures.write(options.json, {"command": shlex.join(["python", *sys.argv])} | report)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # large files are removed
    sys.exit(main())
