"""The rooms of the house: imports run one way, and files are read in one sitting."""

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"lm_head": ROOT / "kernels", "mllm": ROOT, "tools": ROOT}  # the folder that each package is in
FILES = sorted(path for name, folder in SOURCES.items() for path in (folder / name).rglob("*.py"))
ROOMS = ("config", "parallel", "model", "data", "rewards", "sampler", "training", "algorithms", "run", "plan")
SETTINGS = re.compile(r"mllm\.algorithms\.(\w+\.settings|table)\b")
"""The settings of an algorithm belong to the configuration, and import without JAX."""


def module_of(path: Path) -> str:
    """The name that a file is imported by."""
    folder = ROOT / "kernels" if path.is_relative_to(ROOT / "kernels") else ROOT
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@pytest.fixture(autouse=True, scope="module")
def swept() -> None:
    """What other files' tests have left is collected now: Python 3.11's parser fails where a collection warns in it."""
    gc.collect()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All that a file says, in no order."""
    return list(ast.walk(ast.parse(path.read_text())))


def package_of(path: Path) -> str:
    """The package that a file's relative imports begin in."""
    return module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = resolve_name("." * node.level, package_of(path)) if node.level else ""
            origin = ".".join(filter(None, (package, node.module)))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def floor(module: str) -> int:
    """The place of a module in the order of imports; a module may import those of its own place and of lower ones."""
    top, _, rest = ("mllm.config" if SETTINGS.match(module) else module).partition(".")
    if top != "mllm":
        return {"lm_head": 0, "tools": 100, "train": 100}.get(top, -1)
    room = rest.partition(".")[0]
    return 2 + ROOMS.index(room) if room in ROOMS else 1


def test_imports_run_one_way() -> None:
    for path in FILES:
        own = floor(module_of(path))
        assert [name for name in imported(path) if floor(name) > own] == [], path


def imported_files(module: str) -> set[str]:
    """The modules of the house that one imports, with the packages around them that it is not inside of itself."""
    found = set()
    for name in imported(MODULES[module]):
        while name:
            if name in MODULES and not f"{module}.".startswith(f"{name}."):
                found.add(name)
            name = name.rpartition(".")[0]
    return found


def test_imports_form_no_circle() -> None:
    """Imports inside functions count, too."""
    graph = {module: {*imported_files(module)} for module in MODULES}
    TopologicalSorter(graph).prepare()  # its error lists the files of a circle


def test_files_are_read_in_one_sitting() -> None:
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 400] == []
