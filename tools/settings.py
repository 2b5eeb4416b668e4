"""Writes docs/settings.md, the reference of all settings, from the schema: python tools/settings.py"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mllm.algorithms.table import RUNS
from mllm.config.run import RunConfig

FILE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Generated from the schema, [mllm/config](../mllm/config): `python tools/settings.py`. In a configuration
`section.name` is `name` beneath `section:`; on the command line it is `section.name=value`. A setting that contradicts
another is an error.
"""
SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<=", "pattern": "matches"}
TYPES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "object": "mapping", "null": "`null`"}


def merged() -> dict[str, Any]:
    """One schema with the settings of all algorithms; a section that differs between two stands there twice."""
    schemas = {key: run.model_json_schema() for key, run in RUNS.items()}
    names = [key for key in RUNS if " " not in key]
    algorithm = {"enum": names, "description": RunConfig.model_fields["algorithm"].description}
    properties: dict[str, Any] = {"algorithm": algorithm}
    definitions: dict[str, Any] = {}
    for key, schema in schemas.items():
        definitions |= schema["$defs"]
        for name, field in schema["properties"].items():
            known = properties.setdefault(name, field)
            if re.findall(r"#/\$defs/\w+", json.dumps(known)) != re.findall(r"#/\$defs/\w+", json.dumps(field)):
                properties[f"{name} ({key})"] = field
    required = [name for name in properties if all(name in schema["required"] for schema in schemas.values())]
    description = "The settings of a run; its sections follow."
    return {"description": description, "$defs": definitions, "properties": properties, "required": required}


SCHEMA = merged()


def reference() -> str:
    """The text of docs/settings.md."""
    return "\n".join([HEAD, *tables(SCHEMA, "")])


def tables(schema: dict[str, Any], key: str, is_list: bool = False) -> Iterator[str]:
    """The table of a section's settings, and the tables of the sections in it."""
    if key:
        yield f"## {key}"
    yield cell(schema["description"]) + (" The section is a list of these." if is_list else "") + "\n"
    yield "| setting | type | default | meaning |\n| --- | --- | --- | --- |"
    inner = []
    for name, field in schema["properties"].items():
        if name == "changes":  # records that the trainer writes
            continue
        dotted = f"{key}.{name}" if key else name
        kind, default = readable(field), json.dumps(field.get("default", {})).strip('"')
        meaning = field.get("description")
        parts = [field, field.get("items", {}), *field.get("anyOf", ())]
        if refers := [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]:
            section = SCHEMA["$defs"][refers[0]]
            inner.append((section, dotted, "items" in field))
            meaning = meaning or section["description"]
            kind = f"[section](#{anchor(dotted)})"
            default = "{}" if isinstance(field.get("default"), dict) else default  # all of the section's own defaults
        default = "required" if name in schema.get("required", ()) else f"`{default}`"
        yield f"| `{dotted}` | {kind} | {default} | {cell(meaning)} |"
    yield ""
    for section, dotted, listed in inner:
        yield from tables(section, dotted, listed)


def readable(field: dict[str, Any]) -> str:
    """A type in words, with the limits of its values."""
    if "anyOf" in field:
        return " or ".join(map(readable, field["anyOf"]))
    if "enum" in field or "const" in field:
        return "one of " + ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "items" in field:
        return f"list of {readable(field['items'])}"
    bounds = ", ".join(f"{sign} {field[key]}" for key, sign in SIGNS.items() if key in field)
    return f"{TYPES.get(field.get('type', ''), 'mapping')} {bounds}".strip()


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def cell(text: str) -> str:
    """A docstring in one line, with YAML's word for None."""
    return re.sub(r"\bNone\b", "null", " ".join(text.split())).replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(reference())
