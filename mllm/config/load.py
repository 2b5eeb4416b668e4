"""Reads a configuration from a YAML file and `key.sub=value` overrides, explains errors in one line, and writes YAML.

Tags, anchors and merges, with which one line can fill the memory, are refused; a date is a text.
"""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from mllm.config import places
from mllm.config.schema import Config
from mllm.config.section import Section
from mllm.errors import UserError

CONFIGS = Path(__file__).parent.parent.parent / "configs"
LARGEST_FILE = 2**20
DEEPEST = 20


def load(name: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration `name` (a path, or a file in configs/) with `key.sub=value` overrides applied.

    The files and modules that it names are looked for in its own folder and then in the current one.

    UserError is raised if the file is missing or not YAML, or a setting is unknown, unused or impossible.
    """
    path = find(name)
    settings = read(path)
    places.add_modules(path.parent)
    places.locate(settings, (path.parent, Path()))
    for override in overrides:
        apply_override(settings, override)
    places.locate(settings, (Path(), path.parent))  # what a command line names is meant from the current folder
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error)}") from None


def read(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, not yet validated; UserError where it is no mapping of plain values."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path}: larger than {LARGEST_FILE >> 20} MiB, so it is no configuration")
        settings = from_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise UserError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected a mapping of settings at the top level")
    return settings


def dump(config: Config) -> str:
    """The resolved configuration as YAML: every setting, defaults included; `load` reads it back unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def find(name: str) -> Path:
    """The file of the configuration `name`: itself, or in configs/ with or without its ending."""
    candidates = [Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"]
    for path in candidates:
        if os.path.isfile(path):  # never raises, as Path.is_file does at names that are too long
            return path
    names = sorted(path.name for path in CONFIGS.glob("*.yaml"))
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"configs/ has {', '.join(names) or 'none'}"
    raise UserError(f"--config {name}: no such file, here or in configs/; {hint}")


def apply_override(settings: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in `settings`; sections on the way are created where they are missing."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"{override}: expected key.sub=value")
    *parents, last = key.split(".")
    node: Any = settings
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise UserError(f"{override}: {parent} is a value, not a section")
    try:
        node[last] = from_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{override}: the value is not readable as YAML: {' '.join(str(error).split())}") from None


def from_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: the text is no YAML.
        ValueError: the text uses more of YAML than settings need.
    """
    depth = 0
    events: Iterator[Any] = yaml.parse(text, yaml.SafeLoader)
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError(f"line {line}: anchors and aliases are not read: write the value where it is meant")
        if getattr(event, "tag", None):
            raise ValueError(f"line {line}: tags are not read: remove {event.tag}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"line {line}: more than {DEEPEST} levels")
        # A NUL would end a path, and half of a surrogate pair can't be written to any file.
        if isinstance(event, yaml.ScalarEvent) and (found := re.search("[\0\ud800-\udfff]", event.value)):
            raise ValueError(f"line {line}: no text may hold {found.group()!r}")
    return yaml.load(text, PlainLoader)


class PlainLoader(yaml.SafeLoader):
    """Refuses what can't be written back unchanged, and a key that stands twice, whose first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
                raise ValueError(f"line {line}: {shown} is no name of a setting")
            if key.value in seen:
                raise ValueError(f"{key.value} stands twice, at line {line}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        value = self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)
        if not abs(value) < 2**63:  # NaN and infinity among them
            raise ValueError(f"line {node.start_mark.line + 1}: {node.value:.40} is no number that settings take")
        return value


for kind, construct in (
    ("int", PlainLoader.construct_number),
    ("float", PlainLoader.construct_number),
    ("timestamp", PlainLoader.construct_yaml_str),
):
    PlainLoader.add_constructor(f"tag:yaml.org,2002:{kind}", construct)


def explain(error: ValidationError, schema: type[BaseModel] = Config) -> str:
    """One line for the first problem: its key with dots, and the way out."""
    problems = error.errors(include_url=False)
    # A misspelt name is often also a missing one, and says more.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    match problem["type"]:
        case "impossible":
            relative, message = problem["msg"].split("\n", 1)
            return f"{'.'.join([*location, relative])}: {message}"
        case "extra_forbidden":
            close = difflib.get_close_matches(location[-1], siblings(location, schema), n=1)
            return f"{key}: unknown setting" + (f"; did you mean {close[0]}?" if close else "")
        case "missing":
            return f"{key}: this setting is required"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key}: expected a section of settings, got {problem['input']!r}"
    given = problem["input"]
    shown = f" (got {given!r})" if isinstance(given, str | int | float | None) else ""
    return f"{key}: {problem['msg']}{shown}"


def siblings(location: Sequence[str], schema: type[BaseModel]) -> list[str]:
    """The names of the settings in the section around `location`."""
    section: Any = schema
    for part in location[:-1]:
        if part.isdigit():
            continue
        annotation = section.model_fields[part].annotation
        kinds = [annotation, *getattr(annotation, "__args__", ())]
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if section is None:
            return []
    return list(section.model_fields)
