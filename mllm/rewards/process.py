"""The processes in which reward functions and environments run: their own side, and the messages that they send.

No JAX is imported here.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from mllm import strict_json
from mllm.errors import UserError
from mllm.rewards.calls import LONGEST_MESSAGE, Logged, answers

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The signals that reach all processes of a job, and are the trainer's to handle."""
HANDSHAKE = -1
"""The number of the first answer, `ready` or `failed`: whether the functions could be imported."""


def work(connection: Connection, modules: Sequence[str]) -> None:
    """The process's own side: read calls from the trainer, and answer for each of their samples.

    `modules` are folders in which the functions are looked for after all that Python knows.
    """
    os.setsid()  # Ctrl-C is the trainer's to handle
    os.dup2(2, 1)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the functions may import JAX themselves; the accelerator is the trainer's
    sys.path += [folder for folder in (*modules, os.getcwd()) if folder not in sys.path]
    end_with_trainer()
    worker = os.getpid()

    def reply(*answer: Any) -> None:
        if os.getpid() != worker:
            os._exit(0)  # a function forked this process and returned in it, too
        try:
            connection.send_bytes(encode(*answer))
        except OSError:
            os._exit(1)

    for signum in SIGNALS:
        signal.signal(signum, lambda *_: None)
        os.register_at_fork(after_in_child=partial(signal.signal, signum, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        rewards = connection.recv()()
    except UserError as error:
        reply(HANDSHAKE, "failed", str(error))
        return
    reply(HANDSHAKE, "ready", " ".join(f"{reward.kind}:{reward.code}" for reward in rewards))
    while True:
        try:
            functions, first, samples, seconds = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # threads that functions have left wait for nobody
        for number, answer in enumerate(answers([rewards[i] for i in functions], samples, seconds), first):
            reply(number, *answer)


def end_with_trainer() -> None:
    """Fork a process that kills this one's group, so all that functions start in it, as soon as the trainer ends.

    It is no thread, since a function may hold Python's lock.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    if os.fork():
        return
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        os.closerange(0, trainer.sentinel)
        os.closerange(trainer.sentinel + 1, os.sysconf("SC_OPEN_MAX"))
        os.read(trainer.sentinel, 1)  # a pipe that only the trainer could write to
    finally:
        os.killpg(0, signal.SIGKILL)


def encode(number: int, kind: str, value: float | str, *logged: Logged) -> bytes:
    """The message of an answer, as strict JSON; where that can't hold it, the message of a failure.

    This is the one check of what functions and models say, and on the process's side: it costs this answer alone.
    """
    value = " ".join("".join(c if c.isprintable() else " " for c in value).split()) if isinstance(value, str) else value
    try:
        return strict_json.dump([number, kind, value, *logged])
    except ValueError as error:
        return strict_json.dump([number, "raised", f"what it gave can't be sent: {error!s:.{LONGEST_MESSAGE}}"])


def decode(message: bytes, number: int) -> Any:
    """The answer in a message of this number, or None where a function has written it, which knows no number."""
    try:
        match strict_json.load(message):
            case [int(sent), str(kind), float() | str() as value, *logged] if sent == number:
                return (kind, value, *logged)
    except ValueError:
        pass
    return None
