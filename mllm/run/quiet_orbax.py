"""Keeps Orbax from printing tracebacks of a failure that it also raises.

It logs the error, with its traceback, from each of its threads; and the reads and writes that it has begun beside the
one that failed find their event loop closed, are collected half-done, or fail as well with nobody to ask them, all of
which Python reports. Everything else is logged and reported as ever.
"""

import logging
import sys
import warnings
from traceback import walk_tb
from types import CoroutineType


def silence() -> None:
    """For the rest of the process."""
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        if not left_behind(unraisable.exc_value, unraisable.object):
            report(unraisable)

    sys.unraisablehook = report_others
    logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or not is_orbax(record.pathname))
    warnings.filterwarnings("ignore", "coroutine 'async_(de)?serialize.* was never awaited", RuntimeWarning)
    logging.getLogger("asyncio").addFilter(lambda record: not never_retrieved(record))


def left_behind(error: BaseException | None, where: object) -> bool:
    """Whether this is what a read or write leaves that was given up."""
    if isinstance(where, CoroutineType):
        return is_orbax(where.cr_code.co_filename)
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def never_retrieved(record: logging.LogRecord) -> bool:
    """Whether this is an error that came through Orbax or tensorstore and that nobody asked for."""
    if "never retrieved" not in record.msg or not record.exc_info:
        return False
    _, error, trace = record.exc_info
    files = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
    return any(map(is_orbax, files)) or "tensorstore" in str(error)


def is_orbax(file: str) -> bool:
    return "orbax" in file.replace("\\", "/").split("/")
