"""Finds out what only a TPU or a GPU can tell: python tools/device.py --out FOLDER

It runs the tests of the kernels, `python tools/bench head`, and one GRPO training twice, of which metrics.jsonl and the
arrays of the checkpoint are compared. Each is a process of its own, which prints here as it goes; one that fails costs
only itself. FOLDER gets the two runs. On a CPU sizes are small and the kernels' tests are left out: a rehearsal.

Exit codes: 0 all is well, 1 something failed or the two runs differ, 2 an error in one line.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.errors import UserError
from tools.bench.frame import DEFAULTS, ROOT, SOURCES, start

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""XLA's flag for the same bits in every run: sums have a fixed order, and no timing chooses products."""


SIZES = "hidden_size: 512, intermediate_size: 1536, num_hidden_layers: 4, num_attention_heads: 8"
TRAINING = [
    *("train.py", "--config", "tiny_grpo.yaml"),
    "model={init: random, dtype: bfloat16, remat: full}",
    f"model.architecture={{model_type: qwen2, num_key_value_heads: 2, {SIZES}}}",
    *("model.architecture.vocab_size=151936", "model.architecture.tie_word_embeddings=true"),
    *("steps=3", "batch_size=64", "micro_batch_size=8", "optimizer.warmup_steps=1", "eval={}", "checkpoint={}"),
    *("rollout.max_completion_length=512", "grpo.row_length=528", "grpo.num_iterations=1"),
    *("task.heldout=8", 'task.rewards=[{name: "tools.device:count"}]'),
]
"""Three GRPO steps of a random model of Qwen2's kind."""
ON_A_CPU = ["model.architecture.vocab_size=1000", "rollout.max_completion_length=32", "grpo.row_length=48"]


def count(completion: str) -> float:
    """A reward that differs between the completions of a random model."""
    return float(len(completion))


def difference(first: Path, second: Path) -> str:
    """The names of the log and of the newest checkpoint's arrays that differ in two finished runs; "" if none does."""
    from mllm.run.store import RunStore  # a machine with JAX may lack the trainer's packages

    one, other = (
        {"metrics.jsonl": store.read("metrics.jsonl"), **store.document(store.steps()[-1])["arrays"]}
        for store in (RunStore(first), RunStore(second))
    )
    return ", ".join(name for name in one | other if one.get(name) != other.get(name))


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
    flags = f"{DETERMINISTIC if platform == 'gpu' else ''} {os.environ.get('XLA_FLAGS', '')}".strip()
    own = {"JAX_PLATFORMS": {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(platform, "cpu")}
    training = [*TRAINING, *ON_A_CPU] if platform == "cpu" else TRAINING
    parts = [["-m", "pytest", "-v", "-m", platform, "tests/kernels/test_on_device.py"]] * (platform != "cpu")
    parts += [["tools/bench", "head", "--live", "1"], *([*training, f"run_dir={run}"] for run in runs)]
    well = []
    for part in parts:
        print(f"--- {' '.join(part)}", flush=True)
        environment = DEFAULTS | os.environ | SOURCES | own | ({"XLA_FLAGS": flags} if part[0] == "train.py" else {})
        done = subprocess.run([sys.executable, *part], cwd=ROOT, env=environment, check=False)
        well.append(done.returncode == 0)
    if all(well[-2:]):
        differs = difference(*runs)
        print(f"two runs: {f'they differ in {differs}' if differs else 'the same bits'}")
        well.append(not differs)
    return int(not all(well))


if __name__ == "__main__":
    errors.run_main(main)
