"""Finds out what only a TPU or a GPU can tell: python tools/device.py --out FOLDER [--minutes M] [--wheels FOLDER]

Checks each kernel; times the head beside bare products, full logits and other libraries; looks for races; tunes tiles;
measures the trainer. Jobs run in order of value, each in a process of its own with a time limit, half of which must be
left; on a GPU the first ones run four at a time. One that fails costs only itself; after one that hangs, the rest are
late: a device that hangs once isn't trusted. The same command goes on where it stopped: what is done isn't repeated,
what failed is tried again after the rest. On a CPU sizes are small: a rehearsal.

FOLDER has what a job prints in jobs/ as it comes, and as soon as it ends its line in results.jsonl and in table.md.

Exit codes: 0 all is done or left out, 1 something failed or is to come, 2 an error in one line, 143 after SIGTERM.
"""

import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.errors import UserError
from mllm.plan import child
from tools.bench.frame import DEFAULTS, ROOT, positive, start

Record = dict[str, Any]
MARGIN = 10
"""Seconds that a call leaves for its end."""
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""XLA's flag for the same bits in every run: sums have a fixed order, and no timing chooses products."""
TRAINER = ("pydantic", "flax", "optax", "orbax", "grain", "array_record", "transformers", "safetensors", "tensorboardX")
"""Packages of the trainer that a machine with JAX may lack."""
KERNELS = {
    "forward": "a_result_asked_for_alone_is_right[forward]",
    "dh": "a_result_asked_for_alone_is_right[dh]",
    "dW": "a_result_asked_for_alone_is_right[dW]",
    "workspaces": "every_workspace_is_as_accurate_as_full_logits",
    "values and gradients": "values_and_gradients_are_as_accurate_as_full_logits",
    "full size": "at_qwens_size_the_results_are_those_of_the_xla_engine",
}
"""Tests of the kernels, each the end of a name."""


@dataclass(frozen=True)
class Job:
    name: str
    command: Sequence[str]
    """The interpreter's arguments; {own} stands for the job's own folder, {limit} for 20 seconds less than it has."""
    seconds: float = 400
    """The time limit."""
    shows: str = r"^\||not measured"
    """A pattern of the lines of its output that belong into the table."""
    obstacle: str = ""
    """Why it can't run here."""
    xla_flags: str = ""
    """In its environment, ahead of the user's own."""
    packages: str = ""
    """A folder of packages for it alone."""
    beside: bool = False
    """It may run beside three others."""


# --- the jobs, in order of value


def make_jobs(device: Mapping[str, Any], packages: str = "") -> Iterator[Job]:
    """The jobs for a device, which is described as `tools/bench/measure.py` does; `packages` are for the trainer."""
    platform, cpu = device["platform"], device["platform"] == "cpu"
    needless = "it is for TPUs and GPUs" if cpu else ""
    trainer = absent(*TRAINER)
    shape = ["--shape", "256,128,1000" if cpu else "8192,2048,151936"]
    head = ["tools/bench", "head", *shape, "--live", "1", "--timeout", "150", "--methods"]

    def tests(name: str, place: str, obstacle: str = needless or absent("pytest"), **more: Any) -> Job:
        command = ["-m", "pytest", "-vv", "-rfE", "-m", platform, f"tests/{place}"]
        return Job(name, command, 240, "^(FAILED|ERROR)|passed|failed|skipped", obstacle, **more)

    for name, test in KERNELS.items():  # of a TPU's processes, one has it
        yield tests(name, f"kernels/test_on_device.py::test_{test}", beside=platform == "gpu")
    yield Job("head", [*head, *([] if cpu else [f"mosaic_{platform}"]), "xla, default", "xla, value", "full logits"])
    yield tests("races", "kernels/test_on_device.py::test_the_same_call_gives_the_same_bits_again_and_again")
    shown = r"^\||^mosaic|refused|left out"
    yield Job("tune", ["tools/tune.py", *shape, "--limit", "{limit}"], 400, shown, needless)
    yield Job("peers in JAX", [*head, "xla, w", "xla, g", "chunked", "tokamax", "tunix", "optax"])
    neither = absent("torch", "liger_kernel") and absent("torch", "cut_cross_entropy")
    only = neither if platform == "gpu" else "it is for GPUs"
    yield Job("peers in torch", [*head, "Liger", "cut-cross"], obstacle=only)

    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    long = 200 if cpu else 500
    half, three = (64, 192, 2, 4) if cpu else (896, 4864, 24, 14), (2048, 11008, 36, 16)

    def train(name: str, config: str, settings: Record, size: Sequence[int] = half, obstacle: str = trainer) -> Job:
        family = {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e6}
        made = {**family, **dict(zip(sizes, size, strict=True)), "vocab_size": 1000 if cpu else 151936}
        model = {"init": "random", "architecture": made, "dtype": "bfloat16", "remat": "full"}
        run = {"run_dir": "{own}/run", "eval": {}, "checkpoint": {}}
        pairs = [f"{key}={json.dumps(x)}" for key, x in {**run, "model": model, **settings}.items()]
        shown = "^(tokens/s|seconds|peak|loss)"
        return Job(name, ["train.py", "--config", config, *pairs], long, shown, obstacle, packages=packages)

    length = 32 if cpu else 512
    grpo: dict[str, Any] = {"steps": 3 if cpu else 8, "optimizer.warmup_steps": 1, "grpo.row_length": length + 16}
    grpo |= {"batch_size": 64, "micro_batch_size": 8, "rollout.max_completion_length": length}
    grpo |= {"grpo.num_iterations": 1, "task.heldout": 8, "task.rewards": [{"name": "tools.device:count"}]}
    steps = train("trainer", "tiny_grpo.yaml", grpo)
    yield steps
    middle = half if cpu else (512, 1536, 4, 8)
    twice = ["tools/bench", "twice", "{own}", *train("", "tiny_grpo.yaml", {**grpo, "steps": 3}, middle).command[1:]]
    flags = DETERMINISTIC if platform == "gpu" else ""
    yield Job("the same bits twice", twice, long, "^two runs", trainer, flags, packages)
    shown = "^(MiB|GiB|prefill |decode |log-prob |update |fits)"
    yield Job("its plan", [*steps.command, "--plan"], 300, shown, trainer, packages=packages)
    rows = ["--limit", "64"] if cpu else ["--hidden", "1024", "--layers", "16", "--rows", "256", "--slots", "256"]
    yield Job("decode", ["tools/bench", "rollout", *rows], long, obstacle=trainer, packages=packages)
    only = trainer if platform == "gpu" else "it is for GPUs"
    yield tests("attention", "model/test_attention.py", only or absent("pytest"), packages=packages)
    sft = {"steps": 20 if cpu else 100, "optimizer.warmup_steps": 10, "task.heldout": 64, "batch_size": 256}
    yield train("full logits", "tiny_sft.yaml", {**sft, "head.impl": "full_logits"})
    yield train("fused head", "tiny_sft.yaml", sft)
    number = device["devices"]
    whole = {**grpo, "mesh.fsdp": number, "micro_batch_size": 8 * number, "batch_size": 64 * number}
    alone = "it is for several TPUs or GPUs" if cpu or number == 1 else trainer
    yield train("3B over all devices", "tiny_grpo.yaml", whole, three, alone)


def absent(*modules: str) -> str:
    """Which of the modules aren't installed, as an obstacle."""
    missing = ", ".join(name for name in modules if importlib.util.find_spec(name) is None)
    return f"{missing}: not installed" if missing else ""


def count(completion: str) -> float:
    """A reward that differs between the completions of a random model."""
    return float(len(completion))


# --- the command


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the results; it may have some")
    limit = "end by then (default: no limit)"
    parser.add_argument("--minutes", type=positive(float), default=math.inf, metavar="M", help=limit)
    wheels = "*.whl of packages that the trainer needs and this machine lacks"
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help=wheels)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes - MARGIN
    results = read_results(options.out)
    found, failure = start("tools.bench.measure", {}, 120.0, str((options.out / "cache").absolute()))
    if failure:
        raise UserError(f"JAX finds no device: {failure}")
    with tempfile.TemporaryDirectory() as packages:
        if options.wheels:
            install(options.wheels, packages)
        return measure(options.out, found[0], list(make_jobs(found[0], packages)), results, deadline)


def install(wheels: Path, folder: str) -> None:
    """Unpack the wheels into a folder where modules are found from now on; UserError where pip can't."""
    files = sorted(map(str, wheels.glob("*.whl")))
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps", "--target", folder]
    reason = child.run([sys.executable, *pip, *files]).reason if files else "it has no *.whl"
    if reason:
        raise UserError(f"--wheels: {wheels}: {reason}")
    sys.path.append(folder)


def read_results(folder: Path) -> dict[str, Record]:
    """What came of each job in earlier calls, by its name; UserError where the folder can't be gone on with."""
    try:
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        (folder / "results.jsonl").touch()
        return {record["job"]: record for record in map(json.loads, (folder / "results.jsonl").open())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--out: {folder} can't be gone on with ({error}): give another folder") from None


def measure(folder: Path, device: Record, jobs: Sequence[Job], results: dict[str, Record], deadline: float) -> int:
    """Run the jobs that `results` doesn't have as done, and write what came of each; returns the exit code."""
    for kind in {record["kind"] for record in results.values()} - {device["kind"]}:
        raise UserError(f"--out: {folder} has results of a {kind}, and this is a {device['kind']}")
    to_come = {"status": "to come", "seconds": 0.0, "kind": device["kind"]}
    results = {job.name: results.get(job.name, {"job": job.name, **to_come}) for job in jobs}
    stopped, lock, hung = threading.Event(), threading.Lock(), ""

    def attempt(job: Job) -> None:
        nonlocal hung
        if results[job.name]["status"] == "done":
            return
        found = run(job, folder, device["platform"], deadline, stopped.is_set, hung)
        with lock:
            if stopped.is_set():
                return
            if found.pop("hung", False) and device["platform"] != "cpu":
                hung = job.name
            results[job.name] |= found  # as it was where there is no time
            with (folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(results[job.name]) + "\n")
            print(f"{job.name}: {cell(results[job.name])}", flush=True)
            write_table(folder / "table.md", device, list(results.values()))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    order = sorted(jobs, key=lambda job: results[job.name]["status"] == "failed")
    for beside, group in itertools.groupby(order, key=lambda job: job.beside):
        with ThreadPoolExecutor(4 if beside else 1) as pool:
            try:
                list(pool.map(attempt, group))
            except BaseException:
                stopped.set()  # the jobs that run end with this process
                raise
    write_table(folder / "table.md", device, list(results.values()))
    return int(not {record["status"] for record in results.values()} <= {"done", "left out"})


def run(job: Job, folder: Path, platform: str, deadline: float, until: Callable[[], bool], hung: str) -> Record:
    """Run a job if it can run, there is time for it and none `hung` before, and return what came of it."""
    begin = time.monotonic()
    if job.obstacle:
        return {"status": "left out", "reason": job.obstacle}
    if hung:
        return {"status": "late", "reason": f"{hung!r} hung, and a device that hangs once isn't trusted"}
    if (limit := min(float(job.seconds), deadline - begin)) < job.seconds / 2:
        return {}
    print(f"{job.name} ...", flush=True)
    own = (folder / "jobs" / job.name.replace(" ", "_")).absolute()
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    command = [part.replace("{own}", str(own)).replace("{limit}", f"{limit - 20:.0f}") for part in job.command]
    environment = {
        **os.environ,
        **DEFAULTS,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), job.packages, os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str((folder / "cache").absolute()),
        "XLA_FLAGS": f"{job.xla_flags} {os.environ.get('XLA_FLAGS', '')}".strip(),
        "JAX_PLATFORMS": {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(platform, "cpu"),  # the tests' default is a CPU
    }
    command = [sys.executable, *command]
    ended = child.run(command, seconds=limit, env=environment, cwd=ROOT, until=until, folder=own)
    for checkpoints in own.rglob("checkpoints"):
        shutil.rmtree(checkpoints)
    printed = (ended.stdout if ended.code == 0 else ended.stdout + ended.stderr).splitlines()
    last = ended.stdout.splitlines()[-1:] if ended.late else []  # the name of a test that hangs
    return {
        "status": "done" if ended.code == 0 else "failed",
        "seconds": round(time.monotonic() - begin, 1),
        "reason": ended.reason,
        "shown": [line for line in printed if line and re.search(job.shows, line)] + last,
        "hung": (ended.late and limit == job.seconds) or child.LATE in ended.stdout,  # or what it started
    }


def write_table(path: Path, device: Record, found: Sequence[Record]) -> None:
    """Write the table of all jobs, with what they have printed below it."""
    about = ", ".join(f"{name} {value}" for name, value in device.items())
    lines = [f"{about}\n", "| job | s | result |", "| --- | ---: | --- |"]
    lines += [f"| {record['job']} | {record['seconds']:.0f} | {cell(record)} |" for record in found]
    for record in found:
        if record.get("shown"):
            lines += [f"\n{record['job']}\n```", *record["shown"], "```"]
    path.write_text("\n".join(lines) + "\n")


def cell(record: Record) -> str:
    """What came of a job, in a line."""
    return ": ".join(filter(None, (record["status"], record.get("reason", "").replace("|", "/"))))


if __name__ == "__main__":
    errors.run_main(main)
