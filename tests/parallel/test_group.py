"""The processes of a run begin together, or say why not, and end together with one line and one exit code."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import jax
import pytest
from runs import arguments, free_address, outputs, spawn, start_group
from tiny import config

import train
from mllm.errors import RESTART, UserError
from mllm.parallel import group as group_module
from mllm.parallel.processes import gather_objects


def ends(what):
    """In each of two processes: join, with other settings in one of them, or let one fail in the midst of the work."""
    options = train.make_parser().parse_args(["--config", ""])
    group, number = (options.coordinator, options.processes, options.process), options.process
    group_module.join(group, {"seed": number if what == "settings" else 0, "data": {"source": str(number)}}, 60)
    with group_module.watched(2.0 if what == "stall" else None) as watch:
        for step in range(1000):
            watch.mark(step, "update")
            gather_objects(step)
            if step == 3 and number == 1:
                match what:
                    case "error":
                        raise UserError("a line")
                    case "bug":
                        raise KeyError("a key")
                    case "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "stall":
                        time.sleep(600)


ENDS = {
    "settings": (2, r"error: seed: process 1 has 1, process 0 0: give all the same"),
    "error": (2, "error: process 1: a line"),
    "bug": (1, "error: process 1: KeyError: 'a key'"),
    "killed": (RESTART, r"error: another process was lost \(.*\): the same command goes on from the newest checkpoint"),
    "stall": (
        RESTART,
        r"error: process [01]: --stall-limit: no new phase for 2 s \(after step [34], update\): the same .*",
    ),
}
"""What goes wrong in process 1; the exit code with which all end, and the line."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow if what == "error" else pytest.mark.nightly) for what in ENDS]
)
def test_all_end_alike_when_one_fails_or_was_started_otherwise(what):
    code, line = ENDS[what]
    script = f"import test_group; from mllm.errors import *; run_main(command(lambda: test_group.ends({what!r})))"
    processes = start_group(["-c", script], 2, 1)
    said = [process.communicate(timeout=120)[0] for process in processes]
    codes = [code, -signal.SIGKILL if what == "killed" else code]
    assert [process.returncode for process in processes] == codes, said
    for output in said[: 1 if what == "killed" else 2]:
        assert len(re.findall(f"^{line}$", output, re.MULTILINE)) == output.count("error: ") == 1, output
    assert ("Traceback" in said[1]) == (what == "bug")


@pytest.mark.nightly
def test_a_stalled_process_that_trains_alone_ends_and_only_then():
    script = "import time; from mllm.parallel.group import *\nwith watched(1.0) as watch:\n    {}\n    print('done')"
    for body, code, said in (
        ("[(time.sleep(0.3), watch.mark(step, 'data')) for step in range(6)]", 0, "done\n"),
        (
            "watch.mark(3, 'update'); time.sleep(600)",
            RESTART,
            "error: --stall-limit: no new phase for 1 s (after step 3, ",
        ),
    ):
        (output,) = outputs([spawn(["-c", script.format(body)], subprocess.STDOUT)], code)
        assert output.startswith(said)


@pytest.mark.nightly
def test_missing_processes_and_a_port_that_is_taken_are_an_error_in_one_line(tmp_path):
    settings = config("sft", run_dir=str(tmp_path / "run"), mesh={"dp": 2, "fsdp": 2, "tp": 2})
    command = ["train.py", *arguments(settings), "--wait", "2", "--processes", "2"]
    alone = [spawn([*command, "--coordinator", free_address(), "--process", i], subprocess.STDOUT) for i in "01"]
    for output in outputs(alone, RESTART):
        assert re.fullmatch(r"error: --coordinator: not all processes came to .* within 2 s \(--wait\)\n", output)
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        (said,) = outputs([spawn([*command, "--coordinator", address, "--process", "0"], subprocess.STDOUT)], 2)
    assert re.fullmatch(rf"error: --coordinator {address}, .*: \[Errno \d+\] Address already in use.*\n", said)
    assert not Path(settings.run_dir).exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((None, None, 1), "--process 1: coordinator_address should be defined"),
        (("host:http", 2, 0), "--coordinator host:http, .* invalid literal"),
        (("host:1", 2, 2), "--process 2: process_id and num_processes must be nonnegative, with process_id < num_proc"),
        ((None, None, None), "--coordinator None, .*; --cluster finds what is not given"),
    ],
)
def test_an_impossible_flag_is_refused_with_what_was_given(flags, message, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    with pytest.raises(UserError, match=message):
        group_module.join(flags, {})


def test_flags_take_precedence_over_the_environment_and_without_both_a_process_is_alone(monkeypatch):
    def found(*flags):
        options = train.make_parser().parse_args(["--config", "any.yaml", *flags])
        return options.coordinator, options.processes, options.process

    assert found() == (None, None, None)
    for name, value in (("COORDINATOR_ADDRESS", "a:1"), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "1")):
        monkeypatch.setenv(f"JAX_{name}", value)
    assert found() == ("a:1", 2, 1)
    assert found("--coordinator", "b:2", "--processes", "4", "--process", "3") == ("b:2", 4, 3)
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(UserError, match="--process: invalid int value: 'one'"):
        found()
