"""JSON documents with a checksum in them."""

import json
import zlib
from collections.abc import Mapping
from typing import Any


class Damaged(Exception):
    """The data that was read is not what was written."""


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the document, which must be JSON, with its checksum under one more key."""
    copy = json.loads(json.dumps(document))
    return {**copy, "crc32": crc32(copy)}


def unseal(sealed: Any) -> dict[str, Any]:
    """The document that `seal` was given; Damaged where it has changed since then."""
    if not isinstance(sealed, dict):
        raise Damaged("the document is no JSON object")
    document = {key: value for key, value in sealed.items() if key != "crc32"}
    if sealed.get("crc32") != crc32(document):
        raise Damaged("the document's checksum differs")
    return document


def crc32(document: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(document, sort_keys=True).encode()):08x}"
