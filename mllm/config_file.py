"""A configuration from a YAML file and `key.sub=value` overrides; what is wrong with it, in one line; back to YAML."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mllm.config import Config, Section
from mllm.errors import UserError

CONFIGS = Path(__file__).parent.parent / "configs"


def load(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration `name` (a path, or a file in configs/) and lay `key.sub=value` overrides over it.

    Raises:
        UserError: the file is not there or not YAML, or a setting is unknown, unused or impossible.
    """
    path = find(name)
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, TypeError, OSError) as error:  # a date that isn't one, a list for a key
        raise UserError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected a mapping of settings at the top level")
    for override in overrides:
        apply_override(settings, override)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error)}") from None


def dump(config: Config) -> str:
    """The resolved configuration as YAML: every setting, defaults included; `load` reads it back as it was."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def find(name: str) -> Path:
    candidates = [Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"]
    for path in candidates:
        if path.is_file():
            return path
    names = sorted(path.name for path in CONFIGS.glob("*.yaml"))
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"configs/ has {', '.join(names) or 'none'}"
    raise UserError(f"--config {name}: no such file, here or in configs/; {hint}")


def apply_override(settings: dict[str, Any], override: str) -> None:
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
        node[last] = yaml.load(text, UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{override}: the value is not YAML: {' '.join(str(error).split())}") from None


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML, but a key that stands twice is an error: the first of them would be ignored."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.YAMLError(f"{key_node.value} stands twice, at line {key_node.start_mark.line + 1}")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def explain(error: ValidationError) -> str:
    """The first problem, in one line: its key with dots, and the way out."""
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
            close = difflib.get_close_matches(location[-1], siblings(location), n=1)
            return f"{key}: unknown setting" + (f"; did you mean {close[0]}?" if close else "")
        case "missing":
            return f"{key}: this setting is required"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key}: expected a section of settings, got {problem['input']!r}"
    given = problem["input"]
    shown = f" (got {given!r})" if isinstance(given, str | int | float | None) else ""
    return f"{key}: {problem['msg']}{shown}"


def siblings(location: Sequence[str]) -> list[str]:
    """The names that the section around `location` defines."""
    section: Any = Config
    for part in location[:-1]:
        if part.isdigit():
            continue
        annotation = section.model_fields[part].annotation
        kinds = [annotation, *getattr(annotation, "__args__", ())]
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if section is None:
            return []
    return list(section.model_fields)
