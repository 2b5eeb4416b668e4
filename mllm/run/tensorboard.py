"""Records of scalars for TensorBoard, which the run's log appends to a file of events.

tensorboardX's own writer has a thread, and the run hangs when that can't write; here the caller gets the error.
"""

import math
import struct
import time
from collections.abc import Mapping

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import Summary, scalar


def header(purge: int) -> bytes:
    """The beginning of a file of events; TensorBoard hides older files' events from step `purge` on."""
    begin = SessionLog(status=SessionLog.START)
    return record(Event(file_version="brain.Event:2")) + record(Event(step=purge, session_log=begin))


def scalars(step: int, named: Mapping[str, float | int]) -> bytes:
    """The record of a step's numbers, by name, without those that aren't finite, which tensorboardX warns of."""
    finite = {name: number for name, number in named.items() if math.isfinite(number)}
    values = [value for name, number in finite.items() for value in scalar(name, number).value]
    return record(Event(step=step, summary=Summary(value=values)))


def record(event: Event) -> bytes:
    """A record: the event's length, a checksum of that, the event, and a checksum of it."""
    event.wall_time = time.time()
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (length, data))
