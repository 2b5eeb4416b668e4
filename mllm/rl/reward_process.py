"""The processes in which reward functions and environments run: their own side, and the messages that they send.

No JAX is imported here.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from mllm import strict_json
from mllm.errors import UserError
from mllm.rl.reward_calls import (
    FAILURES,
    LARGEST,
    LONGEST_MESSAGE,
    NOT_APPLICABLE,
    Answer,
    Logged,
    Notes,
    describe,
    judge,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What reaches all processes of a job, and is the trainer's to handle."""
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

    def ignore(number: int, frame: FrameType | None) -> None:
        """Do nothing in this process; children that functions fork die of the signal."""
        if os.getpid() != worker:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def reply(*answer: Any) -> None:
        if os.getpid() != worker:
            os._exit(0)  # a function forked this process and returned in it, too
        try:
            connection.send_bytes(encode(*answer))
        except OSError:
            os._exit(1)

    for each in SIGNALS:
        signal.signal(each, ignore)
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


def encode(number: int, kind: str, given: float | str, *logged: Logged) -> bytes:
    """The message of an answer, as strict JSON; where that can't hold it, the message of a failure.

    This is the one check of what functions and models say, and on the process's side: it costs this answer alone.
    """
    given = " ".join("".join(c if c.isprintable() else " " for c in given).split()) if isinstance(given, str) else given
    try:
        return strict_json.dump([number, kind, given, *logged])
    except ValueError as error:
        return strict_json.dump([number, "raised", f"what it gave can't be sent: {error!s:.{LONGEST_MESSAGE}}"])


def decode(message: bytes, number: int) -> Any:
    """The `Answer` in a message of this number, or None where it has another form: a function may have written it."""
    kinds = ("ready", "failed") if number == HANDSHAKE else (*FAILURES, NOT_APPLICABLE)
    try:
        match strict_json.load(message):
            case [int(given), "value", float(value), *logged] if given == number and abs(value) <= LARGEST:
                return ("value", value, *logged) if all(map(is_logged, logged)) else None
            case [int(given), str(kind), str(text), *logged] if given == number and kind in kinds:
                return (kind, text, *logged) if all(map(is_logged, logged)) else None
    except ValueError:
        pass
    return None


def is_logged(one: Any) -> bool:
    """Whether this is a `Logged` as a list."""
    match one:
        case ["extra", str(), str()]:
            return True
        case ["extra" | "metric", str(), float(value)]:
            return abs(value) <= LARGEST
        case ["turn", list(messages), bool(), list(calls), int(errors), dict()]:
            return all(map(is_message, messages)) and all(map(is_call, calls)) and 0 <= errors <= len(calls) + 1
    return False


def is_message(one: Any) -> bool:
    whole = isinstance(one, dict) and {"role", "content"} <= one.keys() <= {"role", "content", "name"}
    return whole and all(isinstance(text, str) for text in one.values())


def is_call(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("arguments"), dict)


def answers(rewards: Sequence[Any], samples: Sequence[Any], seconds: float = 0.0) -> Iterator[Answer]:
    """What each function gives for each sample; functions that are called together are coroutine functions.

    An environment is a function, too, and its samples are moves.

    Of those, the calls that are left when none has ended for `seconds` (times the samples of a batched one) are timed
    out; the trainer watches over other calls.
    """
    calls = [
        (reward, part, Notes(len(part), reward.batched))
        for reward in rewards
        for part in ([samples] if reward.batched else [[sample] for sample in samples])
    ]
    results: Iterable[Any] = (call(*one) for one in calls)
    if rewards[0].kind == "async":
        limit = seconds * max(len(part) for _, part, _ in calls)
        results = rewards[0].run(run_together([reward(part, notes) for reward, part, notes in calls], limit))
    for (reward, part, notes), returned in zip(calls, results, strict=True):
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function left would go off in another one
        for (kind, given), logged in zip(judge_all(reward, returned, len(part)), notes.rows, strict=True):
            yield kind, given, *logged


def call(reward: Any, samples: Sequence[Any], notes: Notes) -> Any:
    """What the function returns, or the exception that it raises."""
    try:
        return reward(samples, notes)
    except BaseException as error:  # SystemExit too: only this call has failed
        return error


async def run_together(coroutines: Sequence[Awaitable[Any]], limit: float) -> list[Any]:
    """What coroutines return, or the exceptions that they raise."""

    async def finish(coroutine: Awaitable[Any]) -> Any:
        try:
            return await coroutine
        except BaseException as error:
            return error

    tasks = [asyncio.create_task(finish(coroutine)) for coroutine in coroutines]
    left = {*tasks}
    while left:
        ended, left = await asyncio.wait(left, timeout=limit or None, return_when=asyncio.FIRST_COMPLETED)
        for task in () if ended else left:
            task.cancel(f"took longer than {limit:g} s")
    return await asyncio.gather(*tasks)


def judge_all(reward: Any, returned: Any, samples: int) -> Iterable[tuple[str, float | str]]:
    """The answer for each of so many samples, which is the same for all where the call failed."""
    try:
        if isinstance(returned, asyncio.CancelledError):
            failure = "timed_out", str(returned)
        elif isinstance(returned, BaseException):
            failure = "raised", describe(returned, reward.file)
        elif len(values := list(returned) if reward.batched else [returned]) == samples:
            return map(judge, values)
        else:
            failure = "not_a_number", f"returned no list of numbers: {len(values)} values for {samples} completions"
    except BaseException as error:
        failure = "not_a_number", f"returned no list of numbers: {describe(error)}"
    return [failure] * samples
