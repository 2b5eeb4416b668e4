"""Finds out what only a TPU or a GPU can tell: python tools/device.py --out FOLDER [--minutes M]

Checks and times the head's kernels, and the head beside bare products, full logits and other libraries; tunes tiles;
measures the trainer. Jobs run in order of value, each in a process of its own with a time limit; one that fails or
hangs costs only itself. The same command goes on where it stopped: what is done isn't repeated, what failed is tried
again after the rest. On a CPU sizes are small and interpreters run the kernels: a rehearsal.

FOLDER gets results.jsonl (a line as soon as a job ends) and, at the end, also on SIGTERM: table.md, device.tar.gz (logs
and figures) and curves.png. What jobs write stays in FOLDER/jobs.

Exit codes: 0 all is done or left out, 1 something failed or is to come, 2 an error in one line, 143 after SIGTERM.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script sees only its own folder
from mllm import child_process, errors
from mllm.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]
KEPT, LARGEST = (".txt", ".json", ".jsonl", ".png", ".yaml"), 2**20
"""Endings and bytes of files that the archive keeps."""
LEAST, MARGIN = 20, 10
"""Seconds without which no job begins, and those that a call leaves for its end."""
SHAPES = "class A:\n    __class_getitem__ = classmethod(lambda cls, _: cls)\n\n\ndef __getattr__(_):\n    return A\n"
"""In place of the module jaxtyping where that isn't installed."""
TRAINER = ("pydantic", "flax", "optax", "orbax", "grain", "transformers", "safetensors", "tensorboardX", "yaml", "tqdm")


@dataclass(frozen=True)
class Job:
    name: str
    command: Sequence[str]
    """The interpreter's arguments; {own} stands for the job's own folder, {all} for that of all jobs' folders."""
    seconds: float = 90
    """The time limit."""
    needs: Sequence[str] = ()
    """Modules that have to be installed."""
    shows: str = "^$"
    """A pattern of the lines of its output that belong into the table."""
    obstacle: str = ""
    """Why it can't run here."""


# --- the jobs, in order of value


def make_jobs(device: Mapping[str, Any]) -> Iterator[Job]:
    """The jobs for a device, which is described as `tools/bench kernels --kernel device` does."""
    platform, cpu = device["platform"], device["platform"] == "cpu"
    shape, large = ("256,128,296", "256,128,1000") if cpu else ("1024,128,6000", "8192,2048,151936")
    none = "it is for TPUs and GPUs" if cpu else ""
    engines = {"tpu": ("statistics", "mean", "dh", "dW", "kept"), "gpu": ("statistics", "dh", "dW", "kept")}
    for kind in engines if cpu else (platform,):
        old = "jax before 0.12 can't interpret it" if cpu and kind == "gpu" and device["jax"] < "0.12" else ""
        about = ["tools/bench", "kernels", "--impl", f"mosaic_{kind}", "--shape", shape]
        for kernel in engines[kind]:
            for cluster in ("2", "1") if kind == "gpu" and not cpu else ("2",):
                name = f"{kind} {kernel}" + f", cluster of {cluster}" * (kind == "gpu")
                blocks = ["--tiles", f"cluster={cluster}"] if kind == "gpu" and not cpu else []
                yield Job(name, [*about, "--kernel", kernel, *blocks], obstacle=old)
        # Room in dW's own memory alone; for some columns; for some rows and a float32 sum of dW; for the default.
        for workspace in ("0",) if cpu else ("0", "700000", "7000000", ""):
            size = ["--kernel", "loss", *["--workspace", workspace] * bool(workspace)]
            yield Job(f"{kind} loss, workspace {workspace or 'default'}", [*about, *size], obstacle=old)
    engine = "xla" if cpu else f"mosaic_{platform}"
    timed = ["tools/bench", "kernels", "--impl", engine, "--shape", large, "--timed"]
    for kernel in () if cpu else engines[platform]:
        yield Job(f"time of {kernel}", [*timed, "--kernel", kernel], 120)

    def bench(name: str, *methods: str, needs: Sequence[str] = ()) -> Job:
        command = ["tools/bench", "head", "--shape", large, "--live", "1"]
        return Job(name, [*command, "--methods", *methods], 400, needs, r"^\||skipped|failed")

    yield bench("head", engine, "full logits")
    limits = ["-n", "1", "--max-worker-restart=99", "--timeout=120", "--timeout-method=thread"]
    pytest, needs = ["-m", "pytest", "-m", platform, *limits, "-rfE", "tests"], ["xdist", "pytest_timeout", "jaxtyping"]
    yield Job("tests", pytest, 550, needs, "^(FAILED|ERROR)|passed|failed|crashed", none)
    yield Job("tune", ["tools/tune.py", "--shape", large, "--limit", "380"], 400, shows="  ", obstacle=none)
    yield bench("peers in JAX", "scan", "tokamax", "tunix", "optax")
    yield bench("peers in torch", "Liger", "cut-cross", "torch", needs=["torch"])

    tiny, half, four, three = (
        dict(zip(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), sizes, strict=True))
        for sizes in ((64, 192, 2, 4), (896, 4864, 24, 14), (1024, 3072, 4, 16), (2048, 11008, 36, 16))
    )

    def train(name: str, config: str, sizes: Mapping[str, int], settings: Record, obstacle: str = "") -> Job:
        family = {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e6}
        made = {**family, **(tiny if cpu else sizes), "vocab_size": 1000 if cpu else 151936}
        model = {"init": "random", "architecture": made, "dtype": "bfloat16", "remat": "full"}
        run = {"run_dir": "{own}/run", "eval": {}, "checkpoint": {}}
        pairs = [f"{key}={json.dumps(x)}" for key, x in {**run, "model": model, **settings}.items()]
        command = ["train.py", "--config", config, *pairs]
        return Job(name, command, 500, TRAINER, "^(tokens/s|seconds|peak|loss)", obstacle)

    length = 32 if cpu else 512
    grpo: dict[str, Any] = {"steps": 3 if cpu else 8, "optimizer.warmup_steps": 1, "grpo.row_length": length + 16}
    grpo |= {"batch_size": 64, "micro_batch_size": 8, "rollout.max_completion_length": length}
    grpo |= {"task.heldout": 8, "task.rewards": [{"name": "tools.device:count"}]}
    trainer = train("trainer", "tiny_grpo.yaml", half, grpo)
    yield trainer
    yield Job("its plan", [*trainer.command, "--plan"], 300, TRAINER, "^(MiB|prefill |decode |log-prob |update |fits)")
    yield Job("copy", ["tools/bench", "kernels", "--kernel", "copy"])
    rows = ["--limit", "64"] if cpu else ["--hidden", "1024", "--layers", "16", "--rows", "256", "--slots", "256"]
    yield Job("decode", ["tools/bench", "rollout", *rows], 400, TRAINER, r"^\|")
    sft = {"steps": 20 if cpu else 100, "optimizer.warmup_steps": 10, "task.heldout": 64, "batch_size": 256}
    yield train("full logits", "tiny_sft.yaml", four, {**sft, "head.impl": "full_logits"})
    yield train("fused head", "tiny_sft.yaml", four, sft)
    runs = [f"{{all}}/{name}/run" for name in ("full_logits", "fused_head")]
    yield Job("curves", ["tools/plot.py", *runs, "--out", "{own}/curves.png"], 60, [*TRAINER, "matplotlib"])

    number, alone = device["devices"], "it is for an even number of devices" * (device["devices"] % 2)
    several = ["tools/bench", "kernels", "--impl", engine, "--kernel", "loss", "--sharded", "--shape"]
    yield Job("sharded head", [*several, shape], obstacle=alone)
    yield Job("time of the sharded head", [*several, large, "--timed"], 200, obstacle=alone)
    whole = {**grpo, "mesh.fsdp": number, "micro_batch_size": 8 * number, "batch_size": 64 * number}
    whole |= {"rollout.max_prompt_length": 64, "grpo.row_length": length + 64}  # for a chat's template
    name = "models--Qwen--Qwen2.5-3B-Instruct"
    if (Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface")) / "hub" / name).is_dir() and not cpu:
        whole["model"] = {"source": "Qwen/Qwen2.5-3B-Instruct"}
    yield train("3B over all devices", "tiny_grpo.yaml", three, whole, alone)


def count(completion: str) -> float:
    """A reward that differs between the completions of a random model."""
    return float(len(completion))


# --- the command


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the results; it may have some")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="end by then (default: no limit)")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        raise UserError(f"--minutes: {options.minutes:g} is not a number above 0")
    if missing := [name for name in ("jax", "numpy") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{' and '.join(missing)}: not installed for {sys.executable}, and nothing here runs without")
    deadline = time.monotonic() + 60 * options.minutes - MARGIN
    results = read_results(options.out)
    ended = start(["tools/bench", "kernels", "--kernel", "device"], 120.0, options.out)
    if ended.code or ended.answer is None:
        raise UserError(f"JAX finds no device: {ended.reason}")
    return measure(options.out, ended.answer, list(make_jobs(ended.answer)), results, deadline)


def read_results(folder: Path) -> dict[str, Record]:
    """What came of each job in earlier calls, by its name; UserError where the folder can't be gone on with."""
    try:
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        path = folder / "results.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {record["job"]: record for record in map(json.loads, lines)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--out: {folder} can't be gone on with ({error}): give another folder") from None


def measure(
    folder: Path, device: Record, jobs: Sequence[Job], results: dict[str, Record], deadline: float = math.inf
) -> int:
    """Run the jobs that `results` doesn't have as done; then, and on SIGTERM, write the table and the archive.

    Returns the exit code.
    """
    before = results.get("device", device)
    if before["kind"] != device["kind"]:
        raise UserError(f"--out: {folder} has results of a {before['kind']}, and this is a {device['kind']}")

    def record(found: Record) -> None:
        results[found["job"]] = found
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")

    def status(job: Job) -> str:
        return results.get(job.name, {}).get("status", "to come")

    record({"job": "device", "status": "done", **device})
    ended_before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the job ends with it
    try:
        for job in sorted(jobs, key=lambda job: status(job) == "failed"):
            if status(job) != "done" and (found := run(job, folder, device["platform"], deadline)):
                record(found)
                print(f"{job.name}: {cell(found)}", flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report = [results.get(job.name, {"job": job.name, "status": "to come", "seconds": 0}) for job in jobs]
        write_report(folder, device, report)
        signal.signal(signal.SIGTERM, ended_before)
    return int(not {status(job) for job in jobs} <= {"done", "left out"})


def run(job: Job, folder: Path, platform: str, deadline: float) -> Record | None:
    """Run a job, and return what came of it; None where there is too little time, so that it is to come."""
    begin = time.monotonic()
    left = deadline - begin
    absent = ", ".join(name for name in job.needs if importlib.util.find_spec(name) is None)
    if reason := job.obstacle or (absent and f"{absent}: not installed"):
        return {"job": job.name, "status": "left out", "seconds": 0.0, "reason": reason}
    if left < min(LEAST, job.seconds):
        return None
    print(f"{job.name} ...", flush=True)
    own = folder / "jobs" / re.sub(r"\W", "_", job.name)
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    places = {"{own}": str(own.absolute()), "{all}": str(own.parent.absolute())}
    command = [re.sub(r"\{own\}|\{all\}", lambda found: places[found[0]], part) for part in job.command]
    ended = start(command, float(min(job.seconds, left)), folder, platform)
    for path in own.rglob("checkpoints"):
        shutil.rmtree(path)
    said = ended.stdout[-LARGEST // 3 :]
    (own / "log.txt").write_text(f"{said}\n--- stderr\n{ended.stderr[-LARGEST // 3 :]}")
    cut_off = ended.late and left < job.seconds
    return {
        "job": job.name,
        "status": "done" if ended.code == 0 else "to come" if cut_off else "failed",
        "seconds": round(time.monotonic() - begin, 1),
        "reason": ended.reason,
        "answer": ended.answer,
        "shown": [line for line in said.splitlines() if line and re.search(job.shows, line)],
    }


def start(command: Sequence[str], seconds: float, folder: Path, platform: str | None = None) -> child_process.Ended:
    """Run a job's command, on the platform that was found; the tests' default is a CPU."""
    work = (folder / "jobs").absolute()
    if importlib.util.find_spec("jaxtyping") is None:
        (work / "jaxtyping.py").write_text(SHAPES)
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", ""), str(work)]),
        "JAX_COMPILATION_CACHE_DIR": str(work / "cache"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    }
    if platform:
        own["JAX_PLATFORMS"] = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(platform, "cpu")
    return child_process.run([sys.executable, *command], seconds=seconds, env=os.environ | own, cwd=ROOT)


# --- the report


def write_report(folder: Path, device: Record, found: Sequence[Record]) -> None:
    """Write the table of all jobs, with what they have printed below it, and the archive of logs and figures."""
    about = ", ".join(f"{name} {value}" for name, value in device.items())
    lines = [f"{about}\n", "| job | s | result |", "| --- | ---: | --- |"]
    lines += [f"| {record['job']} | {record['seconds']:.0f} | {cell(record)} |" for record in found]
    for record in found:
        if record.get("shown"):
            lines += [f"\n{record['job']}\n```", *record["shown"], "```"]
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    jobs = folder / "jobs"
    with tarfile.open(folder / "device.tar.gz", "w:gz") as archive:
        for path in sorted(jobs.rglob("*")):
            if path.suffix in KEPT and path.is_file() and path.stat().st_size <= LARGEST:
                archive.add(path, path.relative_to(jobs))
    for picture in jobs.glob("curves/curves.png"):
        shutil.copyfile(picture, folder / picture.name)
    print(f"{folder}: {', '.join(sorted(os.listdir(folder)))}")


def cell(record: Record) -> str:
    """What came of a job, in a line."""
    if record["status"] != "done":
        return ": ".join(filter(None, (record["status"], record.get("reason", "").replace("|", "/"))))
    answer = record["answer"] if isinstance(record["answer"], dict) else {}
    figures = (f"{name} {x:.3g}" if isinstance(x, float) else f"{name} {x}" for name, x in answer.items())
    return ", ".join(figures) or "done"


if __name__ == "__main__":
    errors.run_main(main)
