"""Writes docs/settings.md, the reference of all settings, from the schema: python tools/settings.py"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mllm.config.schema import Config
from mllm.config.section import Section, section_of

FILE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Generated from the schema, [mllm/config](../mllm/config): `python tools/settings.py`. In a configuration
`section.name` is `name` beneath `section:`; on the command line it is `section.name=value`. What contradicts other
settings, or would have no effect, is an error.
"""
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "pattern": "matches"}


def reference() -> str:
    """The text of docs/settings.md."""
    return "\n".join([HEAD, *tables(Config, "")])


def tables(schema: type[Section], key: str, is_list: bool = False) -> Iterator[str]:
    """The table of a section's settings, and those of the sections in it."""
    if key:
        yield f"## {key}\n"
    yield cell(schema.__doc__) + (" The section is a list of these." if is_list else "") + "\n"
    yield "| setting | type | default | meaning |\n| --- | --- | --- | --- |"
    inner = []
    for name, field in schema.model_fields.items():
        if name == "changes":  # a record that the trainer writes
            continue
        dotted = f"{key}.{name}" if key else name
        if section := section_of(field.annotation):
            inner.append((section, dotted, get_origin(field.annotation) is tuple))
        kind = f"[section](#{dotted.replace('.', '')})" if section else readable(field.annotation, field.metadata)
        default = "required" if field.is_required() else f"`{shown(field.get_default(call_default_factory=True))}`"
        yield f"| `{dotted}` | {kind} | {default} | {cell(field.description)} |"
    yield ""
    for section, dotted, listed in inner:
        yield from tables(section, dotted, listed)


def readable(annotation: Any, limits: Any = ()) -> str:
    """A type in words, with the limits of its values."""
    kind, parts = get_origin(annotation), [part for part in get_args(annotation) if part is not NoneType]
    if kind is Annotated:
        return readable(parts[0], parts[1:])
    if kind in (Union, UnionType):
        return " or ".join(
            [*(readable(part, limits) for part in parts), *["`null`"] * (len(get_args(annotation)) > len(parts))]
        )
    if kind is Literal:
        return "one of " + ", ".join(f"`{part}`" for part in parts)
    if kind in (tuple, dict):
        return f"list of {readable(parts[0])}" if kind is tuple else "mapping"
    found = [(sign, getattr(limit, name, None)) for limit in limits for name, sign in SIGNS.items()]
    bounds = ", ".join(f"{sign} {value}" for sign, value in found if value is not None)
    return f"{annotation.__name__} {bounds}".strip()


def shown(default: Any) -> str:
    """A default as it would be written in YAML."""
    if isinstance(default, Section):
        return "{}"  # all of the section's own defaults
    return json.dumps(default, default=lambda section: section.model_dump(exclude_defaults=True)).strip('"')


def cell(docstring: str | None) -> str:
    """A docstring in one line, with YAML's word for None."""
    return re.sub(r"\bNone\b", "null", " ".join((docstring or "").split())).replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(reference())
