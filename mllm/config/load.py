"""Reads a configuration from a YAML file and `key.sub=value` overrides, explains errors in one line, and writes YAML.

Plain values are YAML 1.2's (https://yaml.org/spec/1.2.2/#1032-tag-resolution): 1e-3 is a number, 010 is ten, `no`, 1:40
and dates are texts. Tags, anchors and merges, with which one line can fill the memory, are refused.
"""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mllm.algorithms.table import schema
from mllm.config import places
from mllm.config.habits import HABITS
from mllm.config.schema import Config
from mllm.config.section import keys_of
from mllm.errors import UserError

CONFIGS = (Path(__file__).parent.parent / "recipes").resolve()  # a link to configs/, or a copy where it is installed
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
    return validate(settings, path, overrides)


def load_run(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a run's config.yaml, whose paths are absolute; UserError as for `load`.

    The run may be a stranger's: no module beside the file can be imported.
    """
    settings = read(path)
    for override in overrides:
        apply_override(settings, override)
    return validate(settings, path, overrides)


def validate(settings: dict[str, Any], path: Path, overrides: Sequence[str]) -> Config:
    try:
        return schema().model_validate(settings)
    except ValidationError as error:
        raise UserError(f"{' '.join([str(path), *overrides])}: {explain(error)}") from None


def read(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, not yet validated; UserError where it is no mapping of plain values."""
    try:
        if not path.is_file():
            raise UserError(f"{path}: is no file")
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path}: larger than {LARGEST_FILE >> 20} MiB, so it is no configuration")
        settings = yaml.load(path.read_text(encoding="utf-8"), PlainLoader)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise UserError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected a mapping of settings at the top level")
    return settings


def dump(config: Config) -> str:
    """The resolved configuration as YAML: every setting, defaults included; `load` reads it back unchanged."""
    escaped = r"\x85" in repr(config)  # unless it is escaped, PyYAML reads this character as another line break
    return yaml.dump(config.model_dump(mode="json"), Dumper=PlainDumper, sort_keys=False, allow_unicode=not escaped)


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The settings in which two configurations differ: dotted key, old value, new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


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
        value = yaml.compose(text, PlainLoader)
        unread = text[value.end_mark.index :].strip() if value else text.strip()
        if unread:
            raise ValueError(f"{unread} would be a comment: quote the value inside the shell's quotes: '{key}=\"...\"'")
        node[last] = yaml.load(text, PlainLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{override}: the value is not readable as YAML: {' '.join(str(error).split())}") from None


class PlainLoader(yaml.SafeLoader):
    """Reads mappings, lists and plain values; raises ValueError for what settings don't need of YAML."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if event.anchor or getattr(event, "tag", None):
            raise ValueError(f"{place(event)}: anchors, aliases and tags are not read: write the value itself")
        if len(self.marks) > DEEPEST:
            raise ValueError(f"{place(event)}: more than {DEEPEST} levels")
        # A NUL would end a path, and half of a surrogate pair can't be written to any file.
        if isinstance(event, yaml.ScalarEvent) and (forbidden := re.search("[\0\ud800-\udfff]", event.value)):
            raise ValueError(f"{place(event)}: no text may hold {forbidden.group()!r}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
                raise ValueError(f"{place(key)}: {shown} is no name of a setting")
            if key.value in seen:  # its first value would be lost
                raise ValueError(f"{place(key)}: {key.value} stands twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        is_decimal = node.value[:2] not in ("0o", "0x")
        text = node.value.lower().replace(".inf", "inf").replace(".nan", "nan")
        value = float(text) if node.tag.endswith(":float") else int(text, 10 if is_decimal else 0)
        if not abs(value) < 2**63:  # NaN and infinity among them
            raise ValueError(f"{place(node)}: {node.value:.40} is no number that settings take")
        return value


def place(node: Any) -> str:
    """The line in which a node or an event of YAML begins."""
    return f"line {node.start_mark.line + 1}"


class PlainDumper(yaml.SafeDumper):
    """Quotes a text that would be another value in YAML 1.1 or 1.2."""


PLAIN = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "null": r"~|null|Null|NULL|",
    "merge": "<<",  # not in YAML 1.2, and refused
}
"""YAML 1.2's plain values that are no texts, the first that matches."""
PlainLoader.yaml_implicit_resolvers = {}
for kind, pattern in PLAIN.items():
    for resolver in (PlainLoader, PlainDumper):
        resolver.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(rf"(?:{pattern})\Z"), None)
PlainLoader.add_constructor("tag:yaml.org,2002:int", PlainLoader.construct_number)
PlainLoader.add_constructor("tag:yaml.org,2002:float", PlainLoader.construct_number)


def explain(error: ValidationError) -> str:
    """One line for the first problem: its key with dots, and the way out."""
    problems = error.errors(include_url=False)
    # Where a key is misspelt, the right one is often missing, too; the misspelt one says more.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    location = [str(part) for part in problem["loc"]]
    key, value = ".".join(location), problem["input"]
    if problem["type"] == "impossible":
        relative, message = problem["msg"].split("\n", 1)
        return f"{'.'.join([*location, relative])}: {message}"
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown setting{nearest([part for part in problem['loc'] if isinstance(part, str)])}"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}: expected a section of settings, got {value!r}"
    shown = f" (got {value!r})" if isinstance(value, str | int | float | None) else ""
    return f"{key}: {problem['msg']}{shown}"


def nearest(location: Sequence[str]) -> str:
    """The end of an error's line: the setting's name here, or its section; empty where nothing is like it."""
    section, name = ".".join(location[:-1]), location[-1]
    if name in HABITS:
        return f"; here: {HABITS[name]}"
    keys = [key.rpartition(".") for key in keys_of(schema()) if not key.startswith("changes.")]  # a mere record
    if elsewhere := ["".join(key) for key in keys if key[2] == name]:
        return f"; it is {' or '.join(elsewhere)}"
    close = difflib.get_close_matches(name, [key[2] for key in keys if key[0] == section], n=1)
    return f"; did you mean {close[0]}?" if close else ""
