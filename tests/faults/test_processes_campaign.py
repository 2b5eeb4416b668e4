"""Nine faults of two processes that train together: both end, and the same command ends as an undisturbed run.

What a fault adds to one of the processes is gone when the run is started again.
"""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import ROOT, arguments, assert_same_end, changed, free_address, outputs, spawn
from tiny import config
from trainer import lines

from mllm.errors import RESTART

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
EVEN = {"rewards": [{"name": "user_rewards:even_characters"}]}
CONFIG = config(steps=40, mesh={"dp": 2}, task=EVEN, eval=None, checkpoint={"every": 4}, log={"samples": 2})
LOST = {RESTART, -signal.SIGABRT}
"""The exit codes of a process that has lost another one: its own, or that of JAX's coordination service."""
KILLED, MISTAKE = {-signal.SIGKILL}, {2}
TIMES = ["--heartbeat", "10", "--wait", "15"]


def launch(settings, numbers=(0, 1), program: Path = ROOT) -> list[subprocess.Popen]:
    """Start these processes of the run; the last one may have its program in another folder."""
    command = [*arguments(settings), "--coordinator", free_address(), "--processes", "2", *TIMES]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    last = {numbers[-1]: ([str(program / "train.py"), *command])}
    commands = [[*last.get(number, ["train.py", *command]), "--process", str(number)] for number in numbers]
    return [spawn(command, subprocess.STDOUT, **flags) for command in commands]


def strike(fault: str, settings, rng: random.Random, folder: Path) -> list[subprocess.Popen]:
    """Start the run, and let the fault befall it."""
    kind, _, number = fault.rpartition(" ")
    if kind == "other code in":
        for room in ("kernels", "mllm"):
            shutil.copytree(ROOT / room, folder / room)
        shutil.copy(ROOT / "train.py", folder)
        with (folder / "mllm" / "errors.py").open("a") as file:
            file.write("# another version\n")
        return launch(settings, program=folder)
    if kind == "late":
        return launch(settings, [0])
    processes = launch(settings)
    if kind == "kill -9 at the start of":
        time.sleep(rng.uniform(0, 3))
    else:
        metrics, steps = Path(settings.run_dir, "metrics.jsonl"), rng.randrange(1, 35)
        while lines(metrics) < steps:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
    what = signal.SIGKILL if "kill" in kind else signal.SIGSTOP if "SIGSTOP" in kind else signal.SIGTERM
    processes[int(number)].send_signal(what)
    return processes


FAULTS = {
    "kill -9 of 0": (KILLED, LOST),
    "kill -9 of 1": (LOST, KILLED),
    "kill -9 at the start of 0": (KILLED, LOST),
    "kill -9 at the start of 1": (LOST, KILLED),
    "SIGSTOP of 0": (LOST, LOST),
    "SIGSTOP of 1": (LOST, LOST),
    "SIGTERM to 1": ({143}, {143}),
    "other code in 1": (MISTAKE, MISTAKE),
    "late 1": ({RESTART},),
}
"""Each fault, with its process, and the exit codes that the processes may have."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The settings of a run that nothing has disturbed."""
    settings = changed(CONFIG, run_dir=str(tmp_path_factory.mktemp("undisturbed") / "run"))
    outputs(launch(settings))
    return settings


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_all_processes_and_the_same_command_loses_nothing(fault, undisturbed, tmp_path):
    settings = changed(CONFIG, run_dir=str(tmp_path / "run"))
    processes = strike(fault, settings, random.Random(fault), tmp_path / "code")
    begin, ended = time.monotonic(), {}
    while len(ended) < len(processes):
        time.sleep(0.01)
        for process in processes:
            if process.poll() is not None:
                ended.setdefault(process, f"{process.returncode} after {time.monotonic() - begin:.1f} s")
        if "SIGSTOP" in fault and len(ended) == 1:
            processes[int(fault[-1])].send_signal(signal.SIGCONT)
    said = [process.stdout.read() for process in processes]
    print(f"{fault}: exit codes", *(ended[process] for process in processes), *(text[-300:] for text in said), sep="\n")
    codes = zip([process.returncode for process in processes], FAULTS[fault], strict=True)
    assert all(code in allowed for code, allowed in codes), said
    if FAULTS[fault][0] is MISTAKE:
        assert not Path(settings.run_dir).exists()
    outputs(launch(settings))
    assert_same_end(settings, undisturbed)
