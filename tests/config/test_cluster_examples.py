"""The examples in docs/clusters: shell and YAML are well formed, and train.py takes their arguments."""

import re
import shlex
import signal
import subprocess
from pathlib import Path

import train
from mllm.config import load
from mllm.errors import RESTART

CLUSTERS = Path(__file__).parents[2] / "docs" / "clusters"


def check(arguments: list[str]) -> None:
    options = train.make_parser().parse_intermixed_args(arguments)
    assert options.cluster
    assert load.load(options.config, options.overrides).run_dir.endswith("/grpo")


def test_the_shell_examples_are_well_formed_and_their_arguments_are_train_py_s():
    for name in ("slurm.sh", "tpu_pod.sh"):
        example = (CLUSTERS / name).read_text(encoding="utf-8")
        subprocess.run(["bash", "-n"], input=example, text=True, check=True)
        (arguments,) = re.findall(r"train\.py (.*)", example)
        check(shlex.split(arguments))


def test_the_manifest_s_job_tells_a_restart_from_a_mistake_and_its_arguments_are_train_py_s():
    *_, job = load.parser().load_all((CLUSTERS / "kubernetes.yaml").read_text(encoding="utf-8"))
    rules = [(rule["action"], rule["onExitCodes"]["values"]) for rule in job["spec"]["podFailurePolicy"]["rules"][:2]]
    assert rules == [("FailJob", [2]), ("Ignore", [RESTART, 128 + signal.SIGABRT])]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["python", "train.py"]
    check(container["command"][2:])
