"""Keeps Orbax from printing tracebacks of a failure that it also raises, from its threads and through asyncio.

Nothing else in a trainer's process uses asyncio.
"""

import logging
import sys
import warnings
from pathlib import PurePath
from types import CoroutineType


def silence() -> None:
    """Install the filters, for the rest of the process; everything else is logged and reported as before."""
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        abandoned = isinstance(unraisable.object, CoroutineType) or str(unraisable.exc_value) == "Event loop is closed"
        if not abandoned:
            report(unraisable)

    def is_shown(record: logging.LogRecord) -> bool:
        if "Skipping merge of OCDBT" in str(record.msg):  # which processes without a common disk do not write
            return False
        return record.levelno < logging.ERROR or "orbax" not in PurePath(record.pathname).parts

    sys.unraisablehook = report_others
    logging.getLogger("absl").addFilter(is_shown)
    logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.msg)
    warnings.filterwarnings("ignore", "coroutine 'async_(de)?serialize.* was never awaited", RuntimeWarning)
