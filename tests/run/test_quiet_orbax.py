"""Orbax's tracebacks are kept from the terminal, and nobody else's."""

import gc
import logging
import sys

import pytest

from mllm.run import checkpoint, quiet_orbax

assert checkpoint  # has silenced it

ORBAX, OTHERS = "/lib/orbax/checkpoint/writer.py", "/home/orbax-user/mine.py"


def error_from(file):
    """An error that came through a function of that file."""
    scope = {}
    exec(compile("def fail(): raise ValueError('no room')", file, "exec"), scope)
    try:
        scope["fail"]()
    except ValueError as error:
        return error


def coroutine_of(file):
    scope = {}
    exec(compile("async def write(): pass", file, "exec"), scope)
    return scope["write"]()


@pytest.mark.parametrize(("file", "shown"), [(ORBAX, False), (OTHERS, True)])
def test_an_error_that_nobody_asked_for_is_shown_if_it_is_not_orbax_s(caplog, file, shown):
    logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=error_from(file))
    assert bool(caplog.records) == shown


@pytest.mark.parametrize(("level", "file", "shown"), [("ERROR", ORBAX, 0), ("WARNING", ORBAX, 1), ("ERROR", OTHERS, 1)])
def test_what_orbax_logs_as_an_error_is_not_shown(caplog, level, file, shown):
    logger = logging.getLogger("absl")
    logger.handle(logger.makeRecord("absl", getattr(logging, level), file, 1, "a save failed", (), None))
    assert len(caplog.records) == shown


def test_an_error_of_a_write_that_tensorstore_s_threads_give_to_a_future_is_not_shown(caplog):
    text = 'RESOURCE_EXHAUSTED: Error writing "params.embed/0.0" in OCDBT database at local file "run/checkpoints/4": '
    for cause in ("", "No space left on device [os_error_code='28']"):
        error = ValueError(text + cause)
        logging.getLogger("asyncio").error("Future exception was never retrieved", exc_info=(ValueError, error, None))
    assert caplog.records == []


def test_other_messages_of_asyncio_are_shown(caplog):
    logging.getLogger("asyncio").error("Executing took 3 seconds", exc_info=error_from(ORBAX))
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    assert len(caplog.records) == 2


def test_a_read_that_was_given_up_is_left_behind_and_nothing_else(monkeypatch):
    given_up, mine = coroutine_of(ORBAX), coroutine_of(OTHERS)
    assert quiet_orbax.is_from_abandoned_io(ValueError(), given_up)
    assert quiet_orbax.is_from_abandoned_io(RuntimeError("Event loop is closed"), None)
    assert not quiet_orbax.is_from_abandoned_io(ValueError(), mine)
    assert not quiet_orbax.is_from_abandoned_io(RuntimeError("cannot schedule new futures"), None)
    given_up.close()
    mine.close()


def test_what_python_can_not_raise_is_still_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_value.args))
    quiet_orbax.silence()

    class Failing:
        def __init__(self, *error):
            self.error = error

        def __del__(self):
            raise RuntimeError(*self.error)

    for error in ("Event loop is closed", "mine"):
        Failing(error)
    gc.collect()
    assert reported == [("mine",)]
