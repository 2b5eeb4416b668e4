"""Reads a run's settings from YAML 1.2 and `key.sub=value` overrides, explains errors in one line, and writes YAML."""

import difflib
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from mllm.algorithms.table import RUNS, schema
from mllm.config import places
from mllm.config.habits import HABITS
from mllm.config.run import RunConfig
from mllm.config.section import keys_of
from mllm.errors import UserError

CONFIGS = (Path(__file__).parent.parent / "recipes").resolve()  # a link to configs/, or a copy where it is installed
COMMENT = re.compile(r"(^|\s)#")


def load(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration `name` (a path, or a file in configs/) with `key.sub=value` overrides applied.

    Files and modules that it names are searched in its own folder, then in the current folder. UserError is raised if
    the file is missing or not YAML, or a setting is unknown or impossible.
    """
    path = find(str(name))
    settings = read(path)
    places.add_modules(path.parent)
    places.locate(settings, (path.parent, Path()))
    for override in overrides:
        apply_override(settings, override)
    places.locate(settings, (Path(), path.parent))  # names on a command line are relative to the current folder
    return validate(settings, path, overrides)


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a run's config.yaml, with absolute paths; UserError as for `load`.

    The run may be untrusted, so its folder is not added to the folders that modules are imported from.
    """
    settings = read(path)
    for override in overrides:
        apply_override(settings, override)
    return validate(settings, path, overrides)


def validate(settings: dict[str, Any], path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    try:
        return schema().validate_python(settings)
    except ValidationError as error:
        raise UserError(f"{' '.join([str(path), *overrides])}: {explain(error)}") from None


def for_devices(config: RunConfig, devices: int) -> RunConfig:
    """The configuration with a number in place of `mesh.fsdp: -1`, for so many devices.

    UserError is raised if there are fewer than dp * tp devices, or the batch can't be split over them.
    """
    if config.mesh.fsdp != -1:
        return config
    used = config.mesh.dp * config.mesh.tp
    if used > devices:
        raise UserError(f"mesh: dp * tp = {used}, more than the number of devices, {devices}: lower one of them")
    mesh = config.mesh.model_copy(update={"fsdp": devices // used})
    try:
        return schema().validate_python(config.model_dump() | {"mesh": mesh.model_dump()})
    except ValidationError as error:
        fault = f"{explain(error)}, with all {devices} devices"
        raise UserError(f"{fault}: change it, or set mesh.fsdp to use fewer of them") from None


class PlainConstructor(SafeConstructor):
    """Reads a date as a text, because no setting is a date."""

    def construct_yaml_str(self, node: Any) -> str:
        text: str = super().construct_yaml_str(node)
        text.encode()  # ValueError for half of a surrogate pair, which no file can hold
        return text


for kind in ("str", "timestamp"):
    PlainConstructor.add_constructor(f"tag:yaml.org,2002:{kind}", PlainConstructor.construct_yaml_str)


def parser() -> YAML:
    """A reader and writer of YAML 1.2 that refuses Python objects."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = PlainConstructor
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


def read(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, not yet validated; UserError where the file is no mapping."""
    try:
        settings = parser().load(path.read_text(encoding="utf-8"))
    except (YAMLError, ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected a mapping of settings at the top level")
    return settings


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML: every setting, defaults included; `load` reads it back unchanged."""
    text, writer = io.StringIO(), parser()
    writer.allow_unicode = r"\x85" not in repr(config)  # unless it is escaped, this character is read as a line's end
    writer.dump(config.model_dump(mode="json"), text)
    return text.getvalue()


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The differences of two configurations: dotted key, old value, new value.

    The sources of a mix are compared one by one, with keys such as `data.mix.source`.
    """
    if key == "data.mix" and isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new, strict=True):
            yield from differences(one, other, key)
    elif isinstance(old, dict) and isinstance(new, dict):
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
    beside = [str(path) for path in Path(name).parent.glob("*.y*ml")]
    stem = os.path.splitext(name)[0]
    same = [path for path in beside if os.path.splitext(path)[0] == os.path.normpath(stem)]
    close = (
        same or difflib.get_close_matches(name, beside, n=1, cutoff=0.8) or difflib.get_close_matches(name, names, n=1)
    )
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
        node[last] = parser().load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{override}: the value is not readable as YAML: {' '.join(str(error).split())}") from None
    if COMMENT.search(text) and not text.startswith(("'", '"', "[", "{")):
        raise UserError(f"{override}: # begins a comment: quote the value inside the shell's quotes: '{key}=\"...\"'")


def explain(error: ValidationError) -> str:
    """One line for the first problem: its key with dots, and the way out."""
    problems = error.errors(include_url=False)
    # A misspelt key is often a missing key as well; the misspelt key says more.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    if problem["type"].startswith("union_tag"):
        given = problem["input"].get("algorithm") if isinstance(problem["input"], dict) else problem["input"]
        names = ", ".join(key for key in RUNS if " " not in key)
        return f"algorithm: expected one of {names} (got {given!r})"
    kind, *location = map(str, problem["loc"])
    key, value = ".".join(location), problem["input"]
    if problem["type"] == "impossible":
        relative, message = problem["msg"].split("\n", 1)
        return f"{'.'.join([*location, relative])}: {message}"
    if problem["type"] == "extra_forbidden":
        texts = [part for part in problem["loc"][1:] if isinstance(part, str)]
        return f"{key}: unknown setting{nearest(kind, texts)}"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}: expected a section of settings, got {value!r}"
    if problem["type"] == "missing":
        return f"{key}: this setting is required"
    if problem["type"] == "tuple_type":
        return f"{key}: expected a list (got {value!r})"
    shown = f" (got {value!r})" if isinstance(value, str | int | float | None) else ""
    return f"{key}: {problem['msg']}{shown}"


def nearest(kind: str, location: Sequence[str]) -> str:
    """The end of an error's line: the setting's name or section here; empty if no setting is similar.

    `kind` is the key of the settings in `RUNS`.
    """
    section, name = ".".join(location[:-1]), location[-1]
    if name in HABITS:
        return f"; here: {HABITS[name]}"
    keys = [key.rpartition(".") for key in keys_of(RUNS[kind]) if not key.startswith("changes.")]  # a mere record
    if elsewhere := ["".join(key) for key in keys if key[2] == name]:
        return f"; it is {' or '.join(elsewhere)}"
    if users := [key for key, run in RUNS.items() if ".".join(location) in keys_of(run)]:
        return f" of algorithm: {kind}; it is for {', '.join(users)}"
    runs = [*RUNS.items()][::-1]  # the first one with a setting is named
    others = {key: run for run, settings in runs for key in keys_of(settings) if key.rpartition(".")[2] == name}
    if others:
        return f" of algorithm: {kind}; it is {' or '.join(f'{key} of {run}' for key, run in others.items())}"
    if close := difflib.get_close_matches(name, [key[2] for key in keys if key[0] == section], n=1):
        return f"; did you mean {close[0]}?"
    close = difflib.get_close_matches(name, [key[2] for key in keys], n=1)
    return f"; did you mean {' or '.join(''.join(key) for key in keys if key[2] in close)}?" if close else ""
