"""All that only a GPU can tell, by one command: python tools/gpu.py --out FOLDER

    smoke    the device, its driver and versions; the head's kernels on a small problem, so that a fault shows at once
    tests    pytest -m gpu
    tune     sizes of the kernels for Qwen2.5's hidden sizes, noted in kernels/lm_head/gpu_tiles.json
    bench    the head beside its bare products and its peers: tools/bench.py, a shape at a time
    train    the trainer: tools/bench_train.py

Each is a program of its own, under a time limit; what fails is told, and the next one is started. Logs, JSON, plots and
tables gather in FOLDER, and the same command goes on where one before it stopped, on a fresh copy of the repository,
too, if FOLDER is there: for a GPU that can be had for ten minutes at a time. What is done is not done again.

It needs Python 3.11, jax for CUDA, numpy and jaxtyping; what else a step needs and isn't installed is named.

No GPU has run it. Leaves out: several GPUs.

Exit codes: 0 done, or stopped by --limit, 1 something failed, 2 something that you can mend (one line says what).
"""

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from mllm.errors import ArgumentParser, UserError
from tools import gpu_process, gpu_results, tune_table
from tools.gpu_process import ROOT, Run

STEPS = ("tests", "tune", "bench", "train")
NEEDS = {
    "smoke": ("jax", "numpy", "jaxtyping"),
    "tests": ("pytest",),
    "tune": ("tqdm",),
    "bench": ("tqdm", "optax", "matplotlib"),
    "train": ("tqdm", "flax", "optax", "transformers", "safetensors", "jinja2", "pydantic", "yaml", "matplotlib"),
}
"""Modules that each imports."""
SMOKE = 120.0
"""Seconds after which the smoke test counts as hanging."""
MARGIN = 15.0
"""Seconds between a program's own limit and the end that is put to it."""
TILES = ROOT / "kernels" / "lm_head" / "gpu_tiles.json"
KEYS = ("engine", "device", "features")
"""tune_gpu.SUBJECT, which can't be imported without tqdm."""


class Job(NamedTuple):
    name: str
    step: str
    least: float
    """Seconds without which it isn't begun."""
    most: float
    """Seconds that it gets in one call."""
    command: Callable[[Path, float], list[str]]
    """FOLDER, seconds for its own limit -> what to run."""
    environment: Mapping[str, str]
    lacks: Callable[[Path, str], str]
    """FOLDER, what it said -> why something is left to do, though it ended well; empty if nothing is."""


def main(arguments: Sequence[str] | None = None, run: Run = gpu_process.run) -> int:
    """`run`: how a program is started and watched."""
    try:
        options = parse(arguments)
        return measure(options, run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of results; made if need be")
    parser.add_argument("--limit", type=float, default=570, metavar="SECONDS", help="of this call (default 570)")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="(default: all)")
    options = parser.parse_args(arguments)
    if not 0 < options.limit < math.inf:
        raise UserError(f"--limit: {options.limit} is no number of seconds above 0")
    if missing := absent("smoke"):
        raise UserError(f"{missing} for {sys.executable}, and nothing here runs without")
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out: {options.out} is no folder")
    options.out = options.out.absolute()  # programs run in the repository
    return options


def absent(step: str) -> str:
    missing = [module for module in NEEDS[step] if importlib.util.find_spec(module) is None]
    return f"{', '.join(missing)}: not installed" if missing else ""


# --- jobs -----------------------------------------------------------------------------------------------------------


def jobs() -> list[Job]:
    """What matters most first."""
    lean = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    first, *others = (8192, 2048), (8192, 3584), (8192, 896), (32768, 2048), (1024, 2048), (65536, 2048)
    return [
        Job("tests", "tests", 60, 300, tests, {**lean, "JAX_PLATFORMS": "cuda,cpu"}, untested),
        Job("tune 2048", "tune", 90, 240, tune(2048), lean, lambda *_: ""),
        bench_job(*first),
        Job("train", "train", 120, 360, train, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}, untrained),
        Job("tune 3584", "tune", 90, 200, tune(3584), lean, lambda *_: ""),
        Job("tune 896", "tune", 60, 150, tune(896), lean, lambda *_: ""),
        *(bench_job(*sizes) for sizes in others),
        bench_job(*first, peak=14, methods=["workspace 0", "cut-cross-entropy"]),
    ]


def tests(folder: Path, limit: float) -> list[str]:
    files = [
        path for path in sorted((ROOT / "tests").glob("test_*.py")) if "pytest.mark.gpu" in path.read_text("utf-8")
    ]
    # Shapes and what is deprecated are checked where there is no GPU; conftest.py needs beartype, and wants the CPU.
    numbers = ["--noconftest", "-W", "default::DeprecationWarning"]
    names = [str(path.relative_to(ROOT)) for path in files]
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-rfE", "--continue-on-collection-errors", *numbers, *names]


def untested(folder: Path, said: str) -> str:
    return "" if re.search(r"\b[0-9]+ passed\b", said) else "no test ran"


def tune(features: int) -> Callable[[Path, float], list[str]]:
    def command(folder: Path, limit: float) -> list[str]:
        return [*tool("tune"), "--shape", f"8192,{features},151936", "--write", "--limit", f"{limit:.0f}"]

    return command


def bench_job(tokens: int, features: int, peak: int | None = None, methods: Sequence[str] = ()) -> Job:
    """A shape; `peak` as the bench has it, and which `methods`."""
    name = f"bench {tokens},{features}" + (f" peak {peak}" if peak else "")
    subject = name.removeprefix("bench ").replace(",", "_").replace(" ", "_")
    inputs = ["--shape", f"{tokens},{features},151936", *(["--peak", str(peak), "--live", "1"] if peak else [])]

    def command(folder: Path, limit: float) -> list[str]:
        some = gpu_results.left_out(folder, subject) or methods
        file = gpu_results.next_file(folder, subject)
        about = [*inputs, *(["--methods", *some] if some else [])]
        return [*tool("bench"), "--limit", f"{limit:.0f}", "--json", str(file), *about]

    def lacks(folder: Path, said: str) -> str:
        return "its time was over: some methods are left" if gpu_results.left_out(folder, subject) else ""

    return Job(name, "bench", 120, 420, command, {}, lacks)


def train(folder: Path, limit: float) -> list[str]:
    return [*tool("bench_train"), "--json", str(folder / "train.json"), "--limit", f"{limit:.0f}"]


def untrained(folder: Path, said: str) -> str:
    late = any(line.startswith("--limit:") for line in said.splitlines())
    return "its time was over" if late else ""


def tool(name: str) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / f"{name}.py")]


# --- a call ---------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, run: Run) -> int:
    """Raises UserError where there is no Hopper GPU, or FOLDER tells of another."""
    start, folder = time.monotonic(), options.out
    before = gpu_results.read_state(folder)
    device, smoke = look(run, min(SMOKE, options.limit))
    if before.get("device", device)["kind"] != device["kind"]:
        raise UserError(
            f"--out: {folder} tells of {before['device']['kind']}, and this is {device['kind']}: give another folder"
        )
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "bench").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {folder}: {error.strerror}") from None
    state = {"device": device, "jobs": {**before.get("jobs", {}), "smoke": smoke}}
    gpu_results.write_state(folder, state)
    restore(folder)
    # What failed is tried again, after the others.
    for job in sorted(jobs(), key=lambda job: state["jobs"].get(job.name, {}).get("status") == "failed"):
        found = state["jobs"].get(job.name, {})
        if job.step not in options.steps or found.get("status") == "done":
            continue
        left = options.limit - (time.monotonic() - start) - MARGIN
        if missing := absent(job.step):
            state["jobs"][job.name] = entry("left out", missing)
        elif left < job.least:
            state["jobs"][job.name] = found or entry("to come", "no time was left")
        else:
            print(f"\n--- {job.name}: at most {min(left, job.most):.0f} s of the {left:.0f} left ---", flush=True)
            state["jobs"][job.name] = did(job, folder, min(left, job.most), run)
            keep_tiles(folder)
        gpu_results.write_state(folder, state)
    for line in gpu_results.gather(folder):
        print(line)
    print("\n".join(summary(state, folder, options.steps)), flush=True)
    return 1 if any(each["status"] == "failed" for each in state["jobs"].values()) else 0


def look(run: Run, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The device, and what came of the smoke test.

    Raises:
        UserError: there is no GPU.
    """
    outcome = run([sys.executable, "-m", "tools.gpu_smoke"], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, seconds, None)
    found = [json.loads(line) for line in outcome.said.splitlines() if line.startswith("{")]
    if not found:
        raise UserError(f"JAX finds no device: {outcome.reason or 'the smoke test said nothing'}")
    device = found[0]
    if device["platform"] != "gpu":
        raise UserError(f"JAX's device here is a {device['platform']}, and this is for a Hopper GPU")
    versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
    print(
        f"{device['kind']}, compute capability {device['capability']}; driver {device['driver']}; {device['runtime']}"
    )
    print(versions, flush=True)
    if len(found) < 2:
        smoke = entry("failed", outcome.reason or "it said nothing", outcome.seconds)
    elif wrong := {name: x for name, x in found[1].items() if not x < 0.02}:
        smoke = entry("failed", f"WRONG beside full logits: {wrong}", outcome.seconds)
    else:
        smoke = entry(
            "done", "relative errors " + ", ".join(f"{n} {x:.1e}" for n, x in found[1].items()), outcome.seconds
        )
    print(f"smoke test of the kernels: {smoke['status']}: {smoke['reason']}", flush=True)
    return device, smoke


def did(job: Job, folder: Path, seconds: float, run: Run) -> dict[str, Any]:
    log = folder / "logs" / f"{job.name.replace(' ', '_').replace(',', '_')}.log"
    outcome = run(job.command(folder, seconds - MARGIN), job.environment, seconds, log)
    if outcome.code is None:
        return entry("failed", f"stopped after {outcome.seconds:.0f} s", outcome.seconds)
    if outcome.code != 0:
        return entry("failed", outcome.reason or f"exit code {outcome.code}", outcome.seconds)
    if lacking := job.lacks(folder, outcome.said):
        return entry("to come", lacking, outcome.seconds)
    return entry("done", "", outcome.seconds)


def entry(status: str, reason: str, seconds: float = 0.0) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"status": status, "reason": reason, "seconds": round(seconds, 1), "date": now}


def restore(folder: Path) -> None:
    """Notes sizes that a call before this one has found, if this copy of the repository doesn't know them."""
    kept = tune_table.read(folder / TILES.name, KEYS)
    if kept:
        tune_table.write(TILES, tune_table.merged(tune_table.read(TILES, KEYS), kept, KEYS))


def keep_tiles(folder: Path) -> None:
    shutil.copyfile(TILES, folder / TILES.name)


def summary(state: dict[str, Any], folder: Path, steps: Sequence[str]) -> list[str]:
    """A line for each job; then what is missing, and about how long it may take."""
    known = jobs()
    lines = ["", f"{'':23} {'':10} {'s':>6}"]
    for name in ["smoke", *(job.name for job in known)]:
        if name in state["jobs"]:
            each = state["jobs"][name]
            lines.append(f"{name:23} {each['status']:10} {each['seconds']:6.0f}  {each['reason']}".rstrip())
    open_jobs = [
        job
        for job in known
        if job.step in steps and state["jobs"].get(job.name, {}).get("status") in (None, "to come", "failed")
    ]
    if open_jobs:
        minutes = sum(job.most for job in open_jobs) / 60
        names = "; ".join(job.name for job in open_jobs)
        lines.append(f"missing: {names}: the same command goes on, {minutes:.0f} min at most")
    lines.append(f"results: {folder}: " + ", ".join(sorted(os.listdir(folder))))
    return lines


if __name__ == "__main__":
    sys.exit(main())
