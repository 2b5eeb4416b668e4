"""Times the LM head's engines beside the bare matrix products and other implementations; memory and errors, too.

Every method computes the cross-entropy of the same tokens and its gradients by hidden states and weight, unless its
name says otherwise, each in a process of its own. What isn't installed or can't run here is named with the reason.

    ms         median of the rounds, of calls that keep the device busy                      [host's clock]
    /three     the median, over rounds, of the ratio to the time of h Wᵀ, g W and gᵀ h, as XLA (or torch, for
               methods through torch) multiplies them in the same round, at the rows that count
    /four      the same with h Wᵀ twice, which is what a method without a workspace has to do
    TFLOP/s    of the products that a method has to make with the memory it is given: 3, 4, or 1
    peak MiB   the most that the device held                     [its own count; - where it has none]
    temp MiB   the peak without arguments and results; on a CPU the compiler's temporaries
    loss ...   the largest difference to plain JAX in float64 (on TPUs float32 at the highest precision), relative to
               the largest magnitude there; for the general backward, "loss" compares logprob and lse

With --target, the methods are compiled for a TPU that isn't there, and not run: see tools/bench/target.py.

Leaves out several devices. Exit codes: 0 done, 2 an error that one line explains.
"""

import argparse
import importlib.metadata
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm import child_process, errors
from mllm.errors import UserError
from tools import figures
from tools.bench.report import Outcome, Shape, shape_of

if TYPE_CHECKING:
    from tools.bench.methods import Method

ROOT = Path(__file__).parent.parent.parent
COMMAND = (sys.executable, "-m", "tools.bench.measure")
LEAST = 0.05
"""Seconds of a turn, so that the clock and the start of the calls don't count."""
PACKAGES = (
    *("jax", "jaxlib", "numpy", "optax", "tokamax", "google-tunix"),
    *("torch", "triton", "liger-kernel", "cut-cross-entropy"),
)
"""The packages whose versions are written beside the figures, where they are installed."""

LARGE: Shape = (8192, 2048, 151936)
"""The head of Qwen2.5-3B."""
SMALL: Shape = (1024, 256, 16384)


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.target:
        from tools.bench import target

        target.run(options.target, options.shape or [LARGE], options.json)
    else:
        run(options)
    return 0


# --- the command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = errors.ArgumentParser(
        prog="python tools/bench head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
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
    add("--target", metavar="CHIP", help="compile for this TPU, as in v6e, and time nothing (make aot installs libtpu)")
    add("--repeats", type=int, help="rounds timed, after one that is not (default on a CPU 5, else 10)")
    add("--seed", type=int, default=0, help="seed of the random inputs (default 0)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too, as they become known")
    options = parser.parse_args(arguments)
    for share in options.live or []:
        if not 0 < share <= 1:
            raise UserError(f"--live: {share:g} is not a number above 0, at most 1")
    for name in ("timeout", "repeats"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name}: {value:g} is not a number above 0")
    if options.seed < 0:
        raise UserError(f"--seed: {options.seed} is below 0")
    for name in ("methods", "live", "dtype", "repeats"):
        if options.target and getattr(options, name) is not None:
            raise UserError(f"--{name}: has no meaning with --target, which times nothing")
    figures.check(options.json)
    return options


def chosen_methods(texts: Sequence[str] | None, known: Sequence["Method"]) -> list["Method"]:
    for text in texts or []:
        if not any(text.lower() in method.name.lower() for method in known):
            names = "; ".join(method.name for method in known)
            raise UserError(f"--methods: no method has {text!r} in its name; there are: {names}")
    return [method for method in known if not texts or any(text.lower() in method.name.lower() for text in texts)]


# --- the measurements


def start(task: dict[str, Any], timeout: float, cache: Path) -> Outcome:
    """Run a task in a process of its own; all of them share the folder of compiled programs, `cache`."""
    # A process gets three quarters of a GPU unless it is told otherwise.
    defaults = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    defaults |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = {**defaults, **os.environ}
    ended = child_process.run([*COMMAND, json.dumps(task)], seconds=timeout, env=environment, cwd=ROOT)
    skipped = next((answer["skipped"] for answer in ended.answers if "skipped" in answer), None)
    if skipped is not None:
        return Outcome([], "skipped", skipped)
    if ended.code == 0:
        return Outcome(ended.answers)
    if ended.late:
        return Outcome(ended.answers, "failed", f"stopped after {timeout:g} s (--timeout)")
    return Outcome(ended.answers, "failed", ended.reason)


def run(options: argparse.Namespace) -> None:
    """Measure, and print each table as it becomes known.

    Raises:
        UserError: there is no device, or nothing could be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        probe = start({"task": "device"}, options.timeout, Path(folder))
        if probe.status != "measured":
            raise UserError(f"JAX finds no device to measure on: {probe.reason}")
        measure(options, Path(folder), probe.found[0])


def measure(options: argparse.Namespace, cache: Path, device: dict[str, Any]) -> None:
    from tqdm import tqdm

    from tools.bench import report
    from tools.bench.methods import methods as known_methods

    platform = device["platform"]
    cpu = platform == "cpu"
    methods = chosen_methods(options.methods, known_methods(platform))
    lives = sorted(set(options.live or ([1.0] if cpu else [1.0, 0.5, 0.25])), reverse=True)
    dtype = options.dtype or ("float32" if cpu else "bfloat16")
    task = {"task": "measure", "platform": platform, "lives": lives, "least": LEAST}
    task["rounds"] = options.repeats or (5 if cpu else 10)
    versions = {package: found for package in PACKAGES if (found := version(package))}
    content: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device | {"driver": driver()},
        "versions": versions,
        "dtype": dtype,
        "rounds": task["rounds"],
        "seed": options.seed,
        "results": [],
    }
    about = f"{platform} {device['kind']}, jax {versions['jax']}, {dtype}"
    print(f"{about}, {content['date'][:10]}, {task['rounds']} rounds")
    shapes = options.shape or [SMALL if cpu else LARGE]
    with tqdm(total=len(shapes) * len(methods), unit="method", dynamic_ncols=True, disable=None) as bar:
        for shape in shapes:
            sizes = dict(zip(("tokens", "features", "vocabulary"), shape, strict=True))
            problem = {**sizes, "dtype": dtype, "seed": options.seed}
            tables = [report.empty_table(shape, dtype, live) for live in lives]
            content["results"] += tables
            for method in methods:
                bar.set_description(f"{report.title(shape)}: {method.name}")
                obstacle = method.obstacle(platform)
                if obstacle is None:
                    outcome = start({**task, "method": method.name, "problem": problem}, options.timeout, cache)
                else:
                    outcome = Outcome([], "skipped", obstacle)
                for table in tables:
                    table["methods"].append(report.row(method, table, outcome))
                bar.update()
                figures.write(options.json, content)
            print("".join("\n" + "\n".join(report.lines(table)) + "\n" for table in tables), end="", flush=True)
    rows = [row for table in content["results"] for row in table["methods"]]
    if all(row["status"] != "measured" for row in rows):
        row = next((row for row in rows if row["status"] != "skipped"), rows[0])
        raise UserError(f"--shape, --methods: nothing could be measured; {row['method']}: {row['reason']}")


def version(package: str) -> str | None:
    """The version of a package; None where it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """An NVIDIA GPU's driver, highest clock, memory and power limit, if nvidia-smi tells them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version,clocks.max.sm,memory.total,power.limit", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.partition("\n")[0] or None


if __name__ == "__main__":
    errors.run_main(main)
