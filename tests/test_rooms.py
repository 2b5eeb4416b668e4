"""The rooms of the house: imports run one way, without a circle, and files are read in one sitting."""

import ast
import gc
import re
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("kernels/lm_head", "mllm", "tools") for path in (ROOT / folder).rglob("*.py"))
ROOMS = ("config", "parallel", "model", "data", "rewards", "sampler", "training", "algorithms", "run", "plan")
SETTINGS = re.compile(r"mllm\.algorithms\.(\w+\.settings|table)\b")
"""The settings of an algorithm belong to the configuration, and import without JAX."""


def module_of(path: Path) -> str:
    """The name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part not in ("kernels", "__init__"))


MODULES = {module_of(path): path for path in FILES}


@pytest.fixture(autouse=True, scope="module")
def swept() -> None:
    """Garbage of other files' tests is collected now: Python 3.11's parser fails if a collection warns in it."""
    gc.collect()


@cache
def imported(module: str) -> set[str]:
    """The modules, and the names in modules, that a module imports anywhere in its file."""
    path, names = MODULES[module], set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def floor(module: str) -> int:
    """The place of a module in the order of imports; a module may import from its own place and from lower places."""
    top, _, rest = ("mllm.config" if SETTINGS.match(module) else module).partition(".")
    if top != "mllm":
        return {"lm_head": 0, "tools": 100, "train": 100}.get(top, -1)
    room = rest.partition(".")[0]
    return 2 + ROOMS.index(room) if room in ROOMS else 1


def test_imports_run_one_way() -> None:
    for module in MODULES:
        assert [name for name in imported(module) if floor(name) > floor(module)] == [], module


def test_imports_form_no_circle() -> None:
    """An import counts for the packages around it, except the packages around the module itself."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        names = {".".join(parts[:end]) for name in imported(module) for parts in [name.split(".")] for end in range(9)}
        graph[module] = {name for name in names & MODULES.keys() if not f"{module}.".startswith(f"{name}.")}
    TopologicalSorter(graph).prepare()  # its error lists the files of a circle


def test_files_have_at_most_400_lines() -> None:
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 400] == []
