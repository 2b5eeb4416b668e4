"""Processes meet that have the same run_dir, token, settings and programs; strangers neither end nor delay them."""

import socket
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack

import pytest
import tiny
from runs import arguments, changed, free_address

import train
from mllm.errors import UserError
from mllm.parallel import meeting, watch
from mllm.parallel.meeting import Member, begin, forward, listening, receive, visit
from mllm.parallel.processes import ProcessGroup

SETTINGS = tiny.config("sft", run_dir="runs/this").model_dump(mode="json")


def member(process: int, processes: int = 3, **settings) -> Member:
    return Member.of(process, processes, SETTINGS | settings)


@pytest.fixture
def place() -> tuple[str, int]:
    """Where process 0 can be visited."""
    return "127.0.0.1", int(free_address().rpartition(":")[2])


def meet(place, visitor: Member):
    """What process 0 and its only visitor come to: their links, or their errors."""
    with ThreadPoolExecutor() as pool:
        met = pool.submit(receive, member(0, 2), *place, [1]), pool.submit(visit, visitor, place)
        return [one.exception() or one.result() for one in met]


def test_a_process_that_was_started_twice_is_refused_and_one_with_another_number_of_them_ends_all(place, capsys):
    with ThreadPoolExecutor() as pool:
        zero = pool.submit(receive, member(0), *place, [1, 2])
        visits = [pool.submit(visit, member(1), place) for _ in range(2)]
        wait(visits, return_when=FIRST_COMPLETED)
        visits.append(pool.submit(visit, member(2, 4), place))
    message = "--processes: process 2 was started with 4, process 0 with 3"
    assert str(zero.exception()) == message
    assert [visit.exception().code for visit in visits] == [2, 2, 2]
    assert capsys.readouterr().err == "error: --process: 1 was started twice\n" + f"error: {message}\n" * 2


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"seed": 1}, "seed: process 1 has 1, process 0 0: give all the same"),
        ({"optimizer": {**SETTINGS["optimizer"], "b2": 0.9}}, "optimizer.b2: process 1 has 0.9, process 0 0.99: "),
        ({"eval": None}, "eval: process 1 has None, process 0 {'every': "),
        ({"jax": "0.0.1"}, "jax: process 1 has '0.0.1', process 0 '0."),
        ({"mllm": "code of yesterday"}, "mllm: process 1 has 'code of yesterday', process 0 'code "),
    ],
)
def test_a_process_with_other_settings_or_programs_ends_all_with_the_key_and_both_values(place, settings, line, capsys):
    zero, one = meet(place, member(1, 2, **settings))
    assert isinstance(zero, UserError)
    assert str(zero).startswith(line)
    assert one.code == 2
    assert capsys.readouterr().err == f"error: {zero}\n"


def test_data_and_their_cache_may_be_at_other_places_of_each_machine(place):
    data = {**SETTINGS["data"], "source": "/elsewhere/train.jsonl", "cache": "/scratch"}
    links, _ = meet(place, member(1, 2, data=data))
    assert {*links} == {1}


def test_train_py_gives_its_settings_to_the_others(tmp_path, monkeypatch):
    settings, given = changed(tiny.config("sft"), run_dir=str(tmp_path / "run"), seed=5), []
    monkeypatch.setattr(ProcessGroup, "join", lambda self, seconds, theirs: given.append(theirs) or time.no_such_thing)
    group = ["--coordinator", "localhost:1", "--processes", "2", "--process", "0"]
    with pytest.raises(AttributeError):
        train.main([*arguments(settings), "seed=6", *group])
    assert given == [changed(settings, seed=6).model_dump(mode="json")]


def test_the_code_of_another_version_is_another_one(monkeypatch, tmp_path):
    (tmp_path / "mllm" / "parallel").mkdir(parents=True)
    monkeypatch.setattr(meeting, "__file__", str(tmp_path / "mllm" / "parallel" / "meeting.py"))
    found = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "mllm" / "train.py").write_text(text)
        found.add(member(0).facts["mllm"])
    assert len(found) == 2


# Strangers

HOSTILE = (
    b'{"hello":[1,99]}\n',
    b'{"hello": "[1, 99, {}]", "proof": ""}\n',
    b'{"hello": "\\ud800", "proof": "\\ud800"}\n',
    b'{"hello": "[1, 3, {}]", "proof": 5}\n',
    b"[" * 60_000 + b"\n",
    b"1" * 60_000 + b"\n",
    b"\x80\x04cos\nsystem\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"",
)


def test_strangers_are_ignored_with_a_line_whatever_they_send_and_delay_nobody_when_silent(place, capsys, monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 3600)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        met = pool.submit(receive, member(0), *place, [1, 2])
        while not met.done():
            try:
                silent = stack.enter_context(socket.create_connection(place))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        for message in HOSTILE:
            with socket.create_connection(place) as stranger:
                stranger.sendall(message)
                stranger.shutdown(socket.SHUT_WR)
                assert b"go" not in b"".join(iter(lambda s=stranger: s.recv(4096), b""))
        assert not met.done()
        links = [pool.submit(visit, member(number), place) for number in (1, 2)]
        assert {*met.result()} == {1, 2}
        assert all(link.result() for link in links)
        silent.close()
    lines = capsys.readouterr().err.splitlines()
    ignored = "warning: --coordinator: a visitor from 127.0.0.1 is ignored: "
    assert [line for line in lines if not line.startswith(ignored)] == []
    assert len(lines) >= len(HOSTILE)


def test_a_process_of_another_run_dir_is_refused_and_the_others_go_on(place, capsys):
    with ThreadPoolExecutor() as pool:
        met = pool.submit(receive, member(0, 2), *place, [1])
        with pytest.raises(SystemExit, match="2"):
            visit(member(1, 2, run_dir="runs/other"), place)
        assert not met.done()
        pool.submit(visit, member(1, 2), place)
        assert {*met.result()} == {1}
    said = capsys.readouterr().err
    assert "error: --coordinator: this process is refused: its run_dir or MLLM_TOKEN is not process 0's: " in said
    assert "127.0.0.1 is ignored: its run_dir or MLLM_TOKEN is not process 0's: give all" in said


def test_a_proof_needs_the_token_is_of_one_challenge_and_tells_nothing(monkeypatch):
    proofs = {member(1).proof(challenge, text) for challenge in "ab" for text in "cd"}
    monkeypatch.setenv("MLLM_TOKEN", "secret")
    proofs |= {member(1).proof(challenge, text) for challenge in "ab" for text in "cd"}
    assert len(proofs) == 8
    assert not any("secret" in proof for proof in proofs)


def test_what_answers_instead_of_process_0_is_named(place, capsys):
    with socket.create_server(place) as server, ThreadPoolExecutor() as pool:
        visitor = pool.submit(visit, member(1), place)
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        assert visitor.exception().code == 2
    assert f"listens at port {place[1]}, the one below it, is no process 0" in capsys.readouterr().err


# Where process 0 listens


@pytest.mark.parametrize(
    ("coordinator", "addresses", "bound"),
    [
        ("localhost:1234", ["::1", "127.0.0.1"], "127.0.0.1:1234"),
        ("127.0.0.1:1234", ["127.0.0.1"], "127.0.0.1:1234"),
        ("this-machine:1234", ["127.0.0.2"], "[::]:1234"),
        ("service:1234", ["192.0.2.1"], "[::]:1234"),
        ("several:1234", ["127.0.0.1", "192.0.2.1"], "[::]:1234"),
        ("unknown:1234", [], "[::]:1234"),
    ],
)
def test_process_0_listens_at_the_coordinators_address_where_that_is_its_own(
    monkeypatch, coordinator, addresses, bound
):
    """192.0.2.1 is never a machine's own."""
    real = socket.getaddrinfo

    def resolve(host, port, *more, **named):
        if more or named or host in ("127.0.0.1", "::1"):
            return real(host, port, *more, **named)
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    assert listening(coordinator) == bound
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:99")
    assert listening(coordinator) == "0.0.0.0:99"


def test_nobody_gets_in_at_another_address_than_the_coordinators(place, monkeypatch):
    met = []

    def look(own, host, port, missing):
        with meeting.open_port(host, port), pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))  # a machine has all of 127.0.0.0/8
        met.append((host, port))
        return {}

    monkeypatch.setattr(meeting, "receive", look)
    monkeypatch.setattr(watch, "watch", None)
    assert begin(member(0), f"127.0.0.1:{place[1] + 1}", [1, 2]) == f"127.0.0.1:{place[1] + 1}"
    assert met == [place]
    watch.watch.stop()


def test_a_relay_keeps_the_connection_open_when_the_other_side_closes_its():
    (far, here), (there, near) = socket.socketpair(), socket.socketpair()
    thread = threading.Thread(target=forward, args=(here, there))
    thread.start()
    far.sendall(b"x")
    assert near.recv(1) == b"x"
    far.close()
    thread.join()
    near.settimeout(0.1)
    with pytest.raises(TimeoutError):
        near.recv(1)
    for end in (here, there, near):
        end.close()
