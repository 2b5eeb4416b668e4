"""Scalars for TensorBoard: a file of events, each written at once by the caller's own thread.

tensorboardX's own writer has a thread behind a queue of ten. If that thread can't write it ends with a traceback, and
the run hangs as soon as the queue is full; here the caller gets the error. Left out: whatever isn't a scalar.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import Summary, scalar

from mllm.run.storage import LogFile


class Board:
    """A new file of events in `folder`. TensorBoard hides older files' events from step `purge` on."""

    def __init__(self, folder: Path, purge: int, checkpoints: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self.file = LogFile(folder / name, checkpoints)
        self.append(Event(file_version="brain.Event:2"))
        self.append(Event(step=purge, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, scalars: Mapping[str, float | int]) -> None:
        values = [value for name, number in scalars.items() for value in scalar(name, number).value]
        self.append(Event(step=step, summary=Summary(value=values)))

    def append(self, event: Event) -> None:
        """Append a record: the event's length, a checksum of that, the event, and a checksum of it."""
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self.file.append(length + checksum(length) + data + checksum(data))


def checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
