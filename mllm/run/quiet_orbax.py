"""Keeps Orbax from printing tracebacks of a failure that it also raises.

It logs the error, with its traceback, from each of its threads. The reads and writes that it had begun beside the
failing one find their event loop closed, are collected before they end, or fail as well with nobody to await them; all
of these Python reports. Everything else is logged and reported as before.
"""

import logging
import re
import sys
import warnings
from traceback import walk_tb
from types import CoroutineType

TENSORSTORE_TEXT = re.compile("tensorstore|OCDBT|os_error_code")
"""What the text of an error from tensorstore holds. Futures get such errors from its threads, without a traceback."""


def silence() -> None:
    """Install the filters, for the rest of the process."""
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        if not is_from_abandoned_io(unraisable.exc_value, unraisable.object):
            report(unraisable)

    sys.unraisablehook = report_others
    logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or not is_orbax(record.pathname))
    warnings.filterwarnings("ignore", "coroutine 'async_(de)?serialize.* was never awaited", RuntimeWarning)
    logging.getLogger("asyncio").addFilter(lambda record: not is_unawaited_io_error(record))


def is_from_abandoned_io(error: BaseException | None, source: object) -> bool:
    """Whether Python can't raise the error because the read or write it comes from was given up."""
    if isinstance(source, CoroutineType):
        return is_orbax(source.cr_code.co_filename)
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def is_unawaited_io_error(record: logging.LogRecord) -> bool:
    """Whether asyncio logs an error of Orbax or tensorstore that nobody awaited."""
    if "never retrieved" not in record.msg or not record.exc_info:
        return False
    _, error, trace = record.exc_info
    files = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
    return any(map(is_orbax, files)) or TENSORSTORE_TEXT.search(str(error)) is not None


def is_orbax(file: str) -> bool:
    """Whether the source file is one of Orbax's."""
    return "orbax" in file.replace("\\", "/").split("/")
