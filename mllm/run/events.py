"""A run's numbers as TensorBoard's events, by tensorboardX's SummaryWriter. Trouble there never ends a run."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter, event_file_writer
from tensorboardX.summary import Summary, scalar

FLUSH_SECONDS = 2
"""How old events are at most when TensorBoard sees them; a killed run loses no more."""
logger = logging.getLogger(__name__)


class TolerantWriter(event_file_writer.EventsWriter):
    """tensorboardX's writer of a file, which gives up with a warning at the first error, such as a full disk.

    An error would end the thread that writes, and the run would then wait for room in that thread's queue for ever.
    """

    failed = False

    def write_event(self, event: Any) -> None:
        self.attempt(super().write_event, event)

    def flush(self) -> None:
        self.attempt(super().flush)

    def close(self) -> None:
        self.attempt(super().close)

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        if not self.failed:
            try:
                action(*arguments)
            except OSError as error:
                self.failed = True
                warn(error)


event_file_writer.EventsWriter = TolerantWriter


def open_events(folder: Path, first_step: int) -> SummaryWriter | None:
    """A new file of events in a folder, which is made where it is missing; None where that fails.

    TensorBoard hides what earlier files in the folder have of `first_step` and the steps behind it.
    """
    try:
        suffix = f".{time.time_ns()}"
        return SummaryWriter(str(folder), purge_step=first_step, flush_secs=FLUSH_SECONDS, filename_suffix=suffix)
    except OSError as error:
        warn(error)
        return None


def write_numbers(events: SummaryWriter, step: int, numbers: Mapping[str, float | int]) -> None:
    """Add numbers, all finite, to a step's events: as one event, where add_scalar makes many."""
    values = [value for name, number in numbers.items() for value in scalar(name, number).value]
    events.file_writer.add_summary(Summary(value=values), step)


def warn(error: OSError) -> None:
    logger.warning("TensorBoard's events can't be written (%s); the run goes on without them", error.strerror)
