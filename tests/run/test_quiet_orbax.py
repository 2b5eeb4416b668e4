"""Orbax's tracebacks are kept from the terminal, and nobody else's."""

import gc
import logging
import sys

import pytest

from mllm.run import checkpoint, quiet_orbax

assert checkpoint  # has silenced it

ORBAX, OTHERS = "/lib/orbax/checkpoint/writer.py", "/home/orbax-user/mine.py"


@pytest.mark.parametrize(("level", "file", "shown"), [("ERROR", ORBAX, 0), ("WARNING", ORBAX, 1), ("ERROR", OTHERS, 1)])
def test_what_orbax_logs_as_an_error_is_not_shown(caplog, level, file, shown):
    logger = logging.getLogger("absl")
    logger.handle(logger.makeRecord("absl", getattr(logging, level), file, 1, "a save failed", (), None))
    assert len(caplog.records) == shown


def test_what_asyncio_says_of_errors_that_nobody_awaited_is_not_shown(caplog):
    text = 'RESOURCE_EXHAUSTED: Error writing "params.embed/0.0" in OCDBT database at local file "run/checkpoints/4": '
    error = ValueError(text + "No space left on device [os_error_code='28']")
    for what in ("Future", "Task"):
        logging.getLogger("asyncio").error(f"{what} exception was never retrieved", exc_info=(ValueError, error, None))
    assert caplog.records == []
    logging.getLogger("asyncio").error("Executing took 3 seconds")
    assert len(caplog.records) == 1


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
