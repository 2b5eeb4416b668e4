"""A run in a bucket has one holder: who has lost it, and does not know yet, changes nothing of its successor's."""

import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from runs import ROOT, environment

from mllm.errors import UserError
from mllm.store import lock
from mllm.store.bucket import LeaseLost
from mllm.store.lock import Lease, hold, identity, is_dead
from mllm.store.run_store import CONFIG, LOCK, RunStore

buckets = pytest.mark.parametrize("place", ["gs", "s3"], indirect=True)
google = pytest.mark.parametrize("place", ["gs"], indirect=True)
TAKEN = "was taken by another process"


@pytest.fixture
def other(store):
    """The same run, as another process sees it."""
    return RunStore(store.url)


def unaware(store):
    """Let a holder believe for good that it has its lease: it is stopped whenever it has looked, and goes on later."""
    store.check = lambda: None


# Who holds it


@buckets
def test_a_lease_whose_holder_is_gone_is_taken_and_the_holder_finds_out(store, monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(lock, "clock", lambda: now[0])
    monkeypatch.setattr(lock, "time", SimpleNamespace(time=time.time, sleep=sleep))
    monkeypatch.setattr(lock, "identity", lambda process: {"process": process, "host": "another"})
    first = Lease(store.place, store.token)
    first.ended.set()  # as if killed
    second = Lease(store.place, "new")
    second.check()
    with pytest.raises(LeaseLost, match=TAKEN):
        first.write(first.generation)
    with pytest.raises(UserError, match="could not be renewed"):
        first.release()
    assert LOCK in store.entries()
    second.release()
    assert store.entries() == []


@google
def test_who_has_lost_the_lease_finds_out_at_the_next_renewal_and_publishes_nothing(store):
    told = ""
    with suppress(UserError), hold(store):
        store.write(LOCK, b"{}")  # as another holder does
        with suppress(UserError):
            while True:
                store.check()
                time.sleep(0.01)
        try:
            store.publish(7, {"folder": "7-0123abcd.0", "arrays": {}}, 1, False)
        except UserError as error:
            told = str(error)
    assert TAKEN in told
    assert store.steps() == []
    assert store.read(LOCK) == b"{}"


@google
def test_a_lease_counts_from_the_request_that_renewed_it_and_the_thread_survives_any_error(store, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(lock, "clock", lambda: now[0])
    lease = Lease(store.place, store.token)
    answer = store.place.replace
    attempts = []

    def late(*arguments):
        attempts.append(now[0])
        if len(attempts) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        now[0] += 100
        return answer(*arguments)

    monkeypatch.setattr(store.place, "replace", late)
    while len(attempts) < 3:
        time.sleep(0.01)
    assert lease.renewed in attempts
    with pytest.raises(UserError, match="could not be renewed"):
        lease.check()
    lease.ended.set()


def test_the_clock_goes_on_while_the_machine_is_suspended(monkeypatch):
    clocks = []
    monkeypatch.setattr(time, "clock_gettime", lambda number: clocks.append(number) or 1.0)
    assert lock.clock() == 1.0
    assert clocks == [getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)]


def started_and_ended(reaped=True):
    """The identity of a process that has ended; unless it was reaped, its parent has not asked for its exit code."""
    process = subprocess.Popen(["sleep", "60"])
    found = identity(process.pid)
    process.kill()
    if reaped:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return found


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="only Linux tells")
def test_only_a_process_of_the_same_machine_and_container_is_known_to_be_dead():
    assert is_dead(started_and_ended())
    assert is_dead(started_and_ended(reaped=False))
    me = identity(os.getpid())
    assert not is_dead(me)
    assert is_dead(me | {"started": "1"})  # the number is another process's now
    for elsewhere in ({"boot": "another"}, {"namespace": "pid:[1]"}):
        assert not is_dead(started_and_ended() | elsewhere)
    for told_too_little in ({}, {"host": me["host"], "process": 2**22 + 1}, me | {"process": "../1"}):
        assert not is_dead(told_too_little)


# What it may write


def sent(store):
    """What the logs are."""
    return store.read_log("metrics.jsonl")


def lines(store):
    """A cut that keeps all."""
    return store.open_log("metrics.jsonl", lambda lines: sum(map(len, lines)))


@buckets
def test_lines_of_a_lost_holder_are_no_part_of_the_log(store, other):
    log = lines(store)
    log.append(b"1\n")
    store.sync()
    log.append(b"2 of the old\n")
    unaware(store)
    theirs = lines(other)
    store.sync()  # at the offset at which the new one goes on
    theirs.append(b"2\n")
    log.append(b"3 of the old\n")
    store.sync()
    other.sync()
    assert sent(store) == b"1\n2\n"
    lines(RunStore(store.url))
    assert sent(store) == b"1\n2\n"
    assert [name for name in store.entries() if ".000003." not in name] == []


@google
def test_a_holder_that_is_late_to_open_a_log_does_not_replace_the_new_one_s(store, other, monkeypatch):
    listed = store.place.names

    def list_and_stop(prefix):
        found = listed(prefix)
        monkeypatch.undo()
        theirs = lines(other)
        theirs.append(b"1\n")
        other.sync()
        return found

    first = lines(store)
    first.append(b"0\n")
    store.sync()
    monkeypatch.setattr(store.place, "names", list_and_stop)
    with pytest.raises(LeaseLost, match=TAKEN):
        lines(store)
    assert sent(store) == b"0\n1\n"


@google
def test_a_part_whose_answer_was_lost_for_good_is_sent_as_it_was(store, server):
    log = lines(store)
    log.append(b"1\n")
    server.fault = lambda method, path: "lost" if method == "POST" else "503"
    with pytest.raises(UserError, match="check the bucket"):
        store.sync()
    server.fault = lambda method, path: None
    log.append(b"2\n")
    store.sync()
    assert sent(store) == b"1\n2\n"


@google
def test_a_log_that_is_replaced_while_it_is_read_is_read_again(store, other, monkeypatch):
    log = lines(store)
    log.append(b"1\n")
    store.sync()
    listed = store.place.names

    def list_and_stop(prefix):
        found = listed(prefix)
        monkeypatch.undo()
        lines(other)
        return found

    monkeypatch.setattr(store.place, "names", list_and_stop)
    assert sent(store) == b"1\n"


@buckets
def test_a_lost_holder_publishes_nothing_over_its_successor_and_removes_nothing_of_it(store, other):
    for step in (1, 2):
        store.publish(step, {"folder": f"{step}-00000001.0", "arrays": {}}, 3, False)
    looked = store.place.seen

    def look_and_stop(name):
        found = looked(name)
        store.place.seen = looked
        for step in (2, 3):
            other.publish(step, {"folder": f"{step}-00000002.0", "arrays": {}}, 3, False)
        return found

    unaware(store)
    store.place.seen = look_and_stop
    with pytest.raises(LeaseLost, match=TAKEN):
        store.publish(3, {"folder": "3-00000001.0", "arrays": {}}, 1, False)
    folders = {step: store.field(step, "folder")[2:10] for step in store.steps()}
    assert folders == {1: "00000001", 2: "00000002", 3: "00000002"}
    seen = store.place.seen("checkpoints/2.json")
    other.write("checkpoints/2.json", b"{}")
    store.place.remove("checkpoints/2.json", seen)
    assert 2 in store.steps()


@google
def test_who_could_not_renew_the_lease_or_has_lost_it_writes_and_removes_nothing(store, server, monkeypatch):
    """Each use of the store is refused by the lease's check, and by nothing else."""
    store.write(CONFIG, b"{}")
    store.publish(1, {"folder": "1-00000001.0", "arrays": {}}, 1, False)
    log = lines(store)
    store.check = Mock(side_effect=LeaseLost(store.url))
    log.check = store.check
    before = dict(server.objects)
    log.unsent += b"1\n"
    store.replaced["heartbeat.json"] = b"{}"
    for use in (
        lambda: log.append(b"1\n"),
        log.sync,
        log.close,
        store.sync,
        lambda: lines(store),
        lambda: store.write(CONFIG, b"other"),
        lambda: store.publish(2, {"folder": "2-00000001.0", "arrays": {}}, 1, False),
        lambda: store.put_aside(1, "?"),
        store.remove_unpublished,
    ):
        with pytest.raises(LeaseLost):
            use()
    assert server.objects == before


@google
def test_the_lease_is_checked_again_before_anything_is_pruned(store):
    for step in (1, 2):
        store.publish(step, {"folder": f"{step}-00000001.0", "arrays": {}}, 5, False)
    checks = iter([None, None, LeaseLost(store.url)])  # before the logs, and before the manifest

    def check():
        if error := next(checks):
            raise error

    store.check = check
    with pytest.raises(LeaseLost):
        store.publish(3, {"folder": "3-00000001.0", "arrays": {}}, 1, False)
    assert store.steps() == [1, 2, 3]


# The thread that sends


@google
def test_a_fault_of_the_machine_in_the_sending_thread_is_told_and_the_rest_is_sent_at_the_end(store, monkeypatch):
    monkeypatch.setattr(lock, "SENDING_SECONDS", 0.01)
    with hold(store):
        log = lines(store)
        with monkeypatch.context() as patch:
            error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            patch.setattr(store.place, "replace", Mock(side_effect=error))
            log.append(b"1\n")
            while not store.failure:
                time.sleep(0.01)
        assert "the logs can't be sent ([Errno 24] Too many open files); check this machine" in store.failure
    assert sent(store) == b"1\n"


SILENT = """
import os, sys
from mllm.store import bucket
for name in bucket.SILENCE:
    os.environ.pop(name, None)  # the tests' own
bucket.SILENCE = {name: "1" for name in bucket.SILENCE}
print(bucket.Bucket(sys.argv[1]).read("a"))
"""


@buckets
def test_a_request_that_is_not_answered_is_repeated(store, server):
    store.write("a", b"1")
    server.server.handle_error = lambda *_: None  # the client gives up
    forever, asked, answer = threading.Event(), [], server.answer

    def fall_silent(*request):
        asked.append(request)
        if len(asked) == 1:
            forever.wait()
        return answer(*request)

    server.answer = fall_silent
    command = [sys.executable, "-c", SILENT, store.url]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=True)
    finally:
        forever.set()
    assert done.stdout == b"b'1'\n"
