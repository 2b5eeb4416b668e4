"""The clusters' examples in docs/clusters: shell and YAML are well formed, and train.py takes their arguments."""

import re
import shlex
import signal
import subprocess
from pathlib import Path

import train
from mllm.config import load
from mllm.errors import RESTART

CLUSTERS = Path(__file__).parents[2] / "docs" / "clusters"
SHELL = [(CLUSTERS / name).read_text(encoding="utf-8") for name in ("slurm.sh", "tpu_pod.sh")]


def test_cluster_examples_have_valid_arguments_and_exit_codes():
    *_, job = load.parser().load_all((CLUSTERS / "kubernetes.yaml").read_text(encoding="utf-8"))
    rules = [(rule["action"], rule["onExitCodes"]["values"]) for rule in job["spec"]["podFailurePolicy"]["rules"][:2]]
    assert rules == [("FailJob", [2]), ("Ignore", [RESTART, 128 + signal.SIGABRT])]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["python", "train.py"]
    subprocess.run(["bash", "-n"], input="\n".join(SHELL), text=True, check=True)
    given = [shlex.split(re.findall(r"train\.py (.*)", example)[0]) for example in SHELL]
    for arguments in (*given, container["command"][2:]):
        options = train.make_parser().parse_intermixed_args(arguments)
        assert options.cluster
        assert load.load(options.config, options.overrides).run_dir.endswith("/grpo")
