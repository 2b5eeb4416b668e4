"""The tables tpu/tiles.json and gpu/tiles.json: tiles that tools/tune.py has measured on a device, and their times."""

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
"""What it is for (device, features, ...), `tiles`, and `seconds` beside the xla engine's `xla_seconds`."""


@functools.cache
def read(platform: str) -> list[Entry]:
    """The entries for "tpu" or "gpu".

    Raises:
        ValueError: names the file, which is no such table.
    """
    path = Path(__file__).parent / platform / "tiles.json"
    try:
        found = json.loads(path.read_text())
        if all(isinstance(entry["tiles"], dict) and entry["features"] > 0 for entry in found):
            return list(found)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise ValueError(f"{path} is no table of tiles: restore it, or write [] to it and run tools/tune.py --write")


def nearest(entries: Iterable[Entry], features: int) -> Entry | None:
    """The entry for the hidden size nearest to `features` in proportion; the fastest of these if there are several."""

    def distance(entry: Entry) -> tuple[float, float]:
        return abs(math.log(entry["features"] / features)), entry.get("seconds", 0.0)

    return min(entries, key=distance, default=None)
