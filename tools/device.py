"""Finds out what only a TPU or a GPU can tell: python tools/device.py --out FOLDER

It runs the tests of the kernels, `python tools/bench head`, and one GRPO training twice, of which metrics.jsonl and the
arrays of the checkpoint are compared. Each is a process of its own, which prints here as it goes; one that fails costs
only itself. FOLDER gets the two runs. On a CPU sizes are small and the kernels' tests are left out: a rehearsal.

Exit codes: 0 all is well, 1 something failed or the two runs differ, 2 an error in one line.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.errors import UserError
from tools.bench.frame import DEFAULTS, ROOT, SOURCES, start

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""XLA's flag for the same bits in every run: sums have a fixed order, and no timing chooses products."""


def count(completion: str) -> float:
    """A reward that differs between the completions of a random model."""
    return float(len(completion))


def training(cpu: bool) -> list[str]:
    """The arguments of three GRPO steps of a random model of Qwen2's kind, but for run_dir."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    sizes = (64, 192, 2, 4, 1000) if cpu else (512, 1536, 4, 8, 151936)
    family = {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e6}
    architecture = family | dict(zip(names, sizes, strict=True))
    length = 32 if cpu else 512
    settings = {
        "model": {"init": "random", "architecture": architecture, "dtype": "bfloat16", "remat": "full"},
        "eval": {},
        "checkpoint": {},
        "steps": 3,
        "optimizer.warmup_steps": 1,
        "batch_size": 64,
        "micro_batch_size": 8,
        "rollout.max_completion_length": length,
        "grpo.row_length": length + 16,
        "grpo.num_iterations": 1,
        "task.heldout": 8,
        "task.rewards": [{"name": "tools.device:count"}],
    }
    pairs = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return ["train.py", "--config", "tiny_grpo.yaml", *pairs]


def difference(first: Path, second: Path) -> str:
    """The names of the log and of the newest checkpoint's arrays that differ in two finished runs; "" if none does."""
    from mllm.store.run_store import RunStore  # a machine with JAX may lack the trainer's packages

    stores = RunStore(first), RunStore(second)
    log, other_log = (store.read_log("metrics.jsonl") for store in stores)
    arrays, other_arrays = (store.document(store.steps()[-1])["arrays"] for store in stores)
    differing = sorted(name for name in arrays | other_arrays if arrays.get(name) != other_arrays.get(name))
    return ", ".join([*(["metrics.jsonl"] if log != other_log else []), *differing])


def succeeds(title: str, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether Python ends well with these arguments; what it prints is seen as it comes."""
    print(f"--- {title}", flush=True)
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False).returncode == 0


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the two runs; it has none yet")
    runs = [parser.parse_args(arguments).out.absolute() / name for name in ("one", "two")]
    for run in runs:
        if run.exists():
            raise UserError(f"--out: {run} exists: give another folder")
    answers, failure = start("tools.bench.measure", {}, 120.0)
    if failure:
        raise UserError(f"JAX finds no device: {failure}")
    print(", ".join(f"{name} {value}" for name, value in answers[0].items()))
    platform = answers[0]["platform"]
    platforms = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(platform, "cpu")
    environment = DEFAULTS | os.environ | SOURCES | {"JAX_PLATFORMS": platforms}
    well = []
    if platform != "cpu":
        tests = ["-m", "pytest", "-v", "-m", platform, "tests/kernels/test_on_device.py"]
        well.append(succeeds("the kernels", tests, environment))
    well.append(succeeds("the head", ["tools/bench", "head", "--live", "1"], environment))
    flags = f"{DETERMINISTIC if platform == 'gpu' else ''} {os.environ.get('XLA_FLAGS', '')}".strip()
    for run in runs:
        command = [*training(platform == "cpu"), f"run_dir={run}"]
        well.append(succeeds(f"training {run.name}", command, environment | {"XLA_FLAGS": flags}))
    if all(well[-2:]):
        differs = difference(*runs)
        print(f"two runs: {f'they differ in {differs}' if differs else 'the same bits'}")
        well.append(not differs)
    return int(not all(well))


if __name__ == "__main__":
    errors.run_main(main)
