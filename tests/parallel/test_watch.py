"""A process ends, with one line and an exit code, when another one is lost, silent, or says that it has failed.

So it does when its main thread or its watch's threads do no more. A run's heartbeat.json says what its processes do,
and when they last said so.
"""

import json
import queue
import socket
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
from runs import ROOT, environment

from mllm.parallel import watch
from mllm.parallel.watch import GO_ON, Link, Watch
from mllm.run.heartbeat import NAME, publish, watched
from mllm.store.run_store import RunStore

PROCESS = """
import socket, sys, time
from mllm.errors import CommonError, UserError
from mllm.parallel import watch
watch.BEAT, watch.SILENCE, watch.GRACE = 0.1, 3600, 0.1
own = watch.Watch({process}, {{{other}: watch.Link(socket.socket(fileno={handle}))}})
own.mark(7, "update")
{program}
time.sleep(3600)
"""
HEARD = """
while own.links[1].status.step != 3:
    time.sleep(0.01)
"""
"""Wait for `said`."""


def begin(process: int, program: str = "") -> tuple[subprocess.Popen, socket.socket]:
    """A process that watches the other end of the socket that is returned, and runs `program`."""
    ours, theirs = socket.socketpair()
    text = PROCESS.format(process=process, other=1 - process, handle=theirs.fileno(), program=program)
    command = [sys.executable, "-c", text]
    child = subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    ours.settimeout(60)
    if not program:
        assert json.loads(ours.recv(4096).split(b"\n")[0])["status"][:2] in ([process, 0], [process, 7])
    return child, ours


def assert_ends(child: subprocess.Popen, other: socket.socket, line: str, code: int) -> None:
    """With this beginning of its last line on stderr, and this exit code."""
    assert child.communicate()[1].decode().splitlines()[-1].startswith(line)
    assert child.returncode == code
    other.close()


def said(phase: str) -> bytes:
    return json.dumps({"status": [1, 3, phase, 0, 0]}).encode() + b"\n"


def test_a_process_ends_when_another_one_is_lost_with_a_line_and_the_code_of_a_restart():
    child, other = begin(0)
    other.sendall(said("save"))
    other.close()
    line = "error: process 1 (after step 3, save) was killed, or has lost its machine or network: "
    assert_ends(child, other, line, 75)


def test_the_line_of_another_one_is_a_process_s_last_whatever_its_main_thread_does_meanwhile():
    child, other = begin(0, "while not own.ending.locked() or own.finish(None) or sys.exit(0): time.sleep(0.01)")
    other.sendall(json.dumps({"end": [2, "process 1: no room"]}).encode() + b"\n")
    assert_ends(child, other, "error: process 1: no room", 2)


def test_a_process_ends_when_another_one_is_silent_and_not_when_it_has_trained_to_its_end():
    silent, one = begin(0, f"{HEARD}own.patience = 0.0\nown.beat()\nown.links[1].heard -= 3601")
    one.sendall(said("data"))
    finished, other = begin(0, "while own.links: time.sleep(0.01)\ntime.sleep(0.5)\nsys.exit()")
    other.sendall(said("end"))
    other.close()
    assert finished.wait() == 0
    errors = silent.communicate()[1].decode()
    assert errors.startswith("warning: no new phase for 0 minutes: process 0 (after step 7, update), process 1 (after")
    line = "error: process 1 (after step 3, data) has been silent for 3600 s"
    assert errors.splitlines()[-1].startswith(line)
    assert silent.returncode == 75
    one.close()
    finished.communicate()


@pytest.mark.parametrize(
    ("error", "told", "code"),
    [
        ('UserError("no room")', {"end": [2, "process 1: no room"]}, 2),
        ('KeyError("x")', {"end": [1, "process 1: KeyError: 'x'"]}, 1),
    ],
)
def test_a_process_that_fails_tells_the_others_why(error, told, code):
    child, other = begin(1, f"own.finish({error})")
    messages = b""
    while chunk := other.recv(4096):
        messages += chunk
    assert told in [json.loads(message) for message in messages.split(b"\n")[:-1]]
    assert_ends(child, other, f"error: {told['end'][1]}", code)


def test_an_error_that_all_raise_alike_ends_nobody():
    child, other = begin(1, 'own.finish(CommonError("all"))')
    while json.loads(other.recv(4096).split(b"\n")[-2])["status"][2] != "end":
        pass
    time.sleep(0.5)
    assert child.poll() is None
    child.kill()
    child.communicate()
    other.close()


def test_a_watch_that_fails_ends_the_process_and_says_why():
    child, other = begin(1, "own.publish = lambda statuses: statuses.no_such_thing")
    told = b"".join(iter(partial(other.recv, 4096), b"")).split(b"\n")[-2]
    line = "process 1: AttributeError: 'list' object has no attribute 'no_such_thing'"
    assert json.loads(told) == {"end": [1, line]}
    assert_ends(child, other, f"error: {line}", 1)


@pytest.fixture
def ended(monkeypatch):
    """Collects with what code and line this process would have ended."""
    found = queue.SimpleQueue()
    monkeypatch.setattr(Watch, "end", lambda self, code, line, details="": found.put((code, line)))
    monkeypatch.setattr(watch, "BEAT", 0.02)
    return found


@pytest.mark.parametrize(
    "message",
    [
        "",
        "[" * 60_000,
        "[]",
        '{"status": null}',
        '{"status": [1, 3, "data", 0]}',
        '{"status": [1, "3", "data", 0, 0]}',
        '{"status": [1, -1, "data", 0, 0]}',
        '{"status": [1, 3, "\\u001b[2J", 0, 0]}',
        '{"status": [1, 3, "data", NaN, 0]}',
        '{"status": [1, 3, "data", 1e999, 0]}',
        '{"status": [0, 3, "data", 0, 0]}',
        '{"end": [0, "all is well"]}',
        '{"end": [2, 7]}',
        '{"end": 2}',
        "\xff",
        "1" * 100_000,
    ],
)
def test_a_message_that_is_none_ends_the_run_and_names_who_sent_it(ended, message):
    ours, theirs = socket.socketpair()
    own = Watch(0, {1: Link(ours)})
    theirs.sendall(message.encode("latin-1") + b"\n")
    code, line = ended.get()
    assert line.startswith("process 0: process 1 sent what is no message of this program: {")
    assert (code, line.isprintable()) == (2, True)
    own.stop()
    theirs.close()


# A main thread that hangs


def test_a_run_without_a_new_phase_ends_at_the_users_limit_and_says_where_each_process_is():
    child, other = begin(0, f"{HEARD}own.limit_stalls(0.4)")
    other.sendall(said("data"))
    where = "process 0 (after step 7, update), process 1 (after step 3, data)"
    line = f"error: --stall-limit: no new phase for 0.4 s: {where}"
    assert_ends(child, other, line, 75)


def test_a_phase_of_any_process_counts_for_the_limit_and_a_process_that_is_alone_has_one_too(ended):
    with watched(stall_limit=0.2) as alone:
        alone.mark(3, "update")
        assert ended.get() == (75, f"--stall-limit: no new phase for 0.2 s: process 0 (after step 3, update); {GO_ON}")
    ours, theirs = socket.socketpair()
    several, looks = Watch(0, {1: Link(ours)}), iter(range(40))
    several.stop()

    def wait(seconds):
        """Until process 1 has had a new phase, in place of some time; True at the end."""
        if (step := next(looks, None)) is not None:
            theirs.sendall(json.dumps({"status": [1, step, "data", step, 0]}).encode() + b"\n")
            while several.links[1].status[1:3] != (step, "data"):
                time.sleep(0.001)
        return step is None

    several.stopped, several.begin = SimpleNamespace(wait=wait), lambda look: look()
    several.limit_stalls(0.2)
    theirs.sendall(said("end"))
    theirs.close()
    while several.links:
        time.sleep(0.01)
    assert ended.empty()


# What a supervisor reads


def test_the_heartbeat_is_replaced_while_the_run_lives_and_not_before_it_has_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "BEAT", 0.02)
    path, seen = tmp_path / NAME, set()
    with watched() as watching:
        time.sleep(0.1)
        assert not path.exists()
        watching.mark(7, "update")
        watching.publish = partial(publish, RunStore(tmp_path), True)
        while len(seen) < 3:
            if path.exists():
                (process,) = json.loads(path.read_text())["processes"]
                assert (process["process"], process["step"], process["phase"]) == (0, 7, "update")
                assert process["since"] <= process["time"] <= time.time()
                seen.add((process["time"], process["since"]))
            time.sleep(0.01)
    assert len({since for _, since in seen}) == 1
    left = path.read_text()
    time.sleep(0.1)
    assert path.read_text() == left
