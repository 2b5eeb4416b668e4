"""Reads a configuration from a YAML file and `key.sub=value` overrides, explains errors in one line, and writes YAML.

Tags, anchors and merges, with which one line can fill the memory, are refused; a date is a text.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mllm.config import places
from mllm.config.habits import HABITS
from mllm.config.schema import Config
from mllm.config.section import fields_of
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
    try:
        return validated(path, overrides)
    except ValidationError as error:
        explained = explain(error)
        given = " ".join(culprits(path, overrides, explained))
        raise UserError(f"{f'on the command line: {given}' if given else path}: {explained}") from None


def validated(path: Path, overrides: Sequence[str]) -> Config:
    """The configuration in a file with overrides; raises UserError as `load`, or pydantic's ValidationError."""
    settings = read(path)
    places.add_modules(path.parent)
    places.locate(settings, (path.parent, Path()))
    for override in overrides:
        apply_override(settings, override)
    places.locate(settings, (Path(), path.parent))  # what a command line names is meant from the current folder
    return Config.model_validate(settings)


def culprits(path: Path, overrides: Sequence[str], explained: str) -> list[str]:
    """The overrides that an error comes from: without one of these nothing is wrong, or its key is the error's."""
    mended, named = [], []
    for override in overrides:
        try:
            validated(path, [other for other in overrides if other != override])
        except (ValidationError, UserError) as error:
            keys = [f"{text.partition(mark)[0]}." for text, mark in ((override, "="), (explained, ":"))]
            other = isinstance(error, UserError) or explain(error) != explained
            if other and (keys[0].startswith(keys[1]) or keys[1].startswith(keys[0])):
                named.append(override)
        else:
            mended.append(override)
    return mended or named


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


def explain(error: ValidationError) -> str:
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
            return unknown(location, problem["input"], dict(fields_of(Config)))
        case "missing":
            return f"{key}: this setting is required"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key}: expected a section of settings, got {problem['input']!r}"
    given = problem["input"]
    shown = f" (got {given!r})" if isinstance(given, str | int | float | None) else ""
    return f"{key}: {problem['msg']}{shown}"


def unknown(location: Sequence[str], value: Any, fields: Mapping[str, Any]) -> str:
    """The message for a setting that is not among `fields`, the known dotted keys: what it is called here, or where."""
    section, name = "".join(f"{part}." for part in location[:-1] if not part.isdigit()), location[-1]
    message = f"{'.'.join(location)}: unknown setting"
    for habit in () if isinstance(value, dict) else (f"{section}{name}".split(".")[-2:], [name]):
        setting, hint = HABITS.get(".".join(habit), (None, ""))
        if setting == "":
            return f"{message}; {hint}"
        if setting in fields:
            return f"{message}; here it is {setting}" + f" ({hint})" * bool(hint)
    settings = (key for key in fields if not key.startswith("changes."))  # those are a record that the trainer writes
    if elsewhere := [key for key in settings if key.rpartition(".")[2] == name]:
        return f"{message}; it is {' or '.join(elsewhere)}"
    here = [key.removeprefix(section) for key in fields if key.startswith(section)]
    if close := difflib.get_close_matches(name, [key for key in here if "." not in key], n=1):
        return f"{message}; did you mean {close[0]}?"
    if isinstance(value, dict) and value:  # what stands in a section of another trainer may say more
        path = [*location]
        while isinstance(value, dict) and value:
            inner, value = next(iter(value.items()))
            path.append(inner)
        return unknown(path, value, fields)
    return message
