"""The rooms of the house: imports run one way, files are read in one sitting, docstrings are sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("kernels", "mllm", "tools") for path in (ROOT / folder).rglob("*.py"))
ROOMS = ("config", "parallel", "model", "data", "train", "rl", "run", "plan")
HEADLESS = re.compile(r"(Of|Those|That of) ")


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(module: str) -> int:
    """The place of a module in the order of imports; a module may import those of its own place and of lower ones."""
    top, _, rest = module.partition(".")
    if top != "mllm":
        return {"kernels": 0, "tools": 100, "train": 100}.get(top, -1)
    room = rest.partition(".")[0]
    return 2 + ROOMS.index(room) if room in ROOMS else 1


def test_imports_run_one_way() -> None:
    for path in FILES:
        own = floor(".".join(path.relative_to(ROOT).with_suffix("").parts))
        assert [name for name in imported(ast.parse(path.read_text())) if floor(name) > own] == [], path


def test_files_are_read_in_one_sitting() -> None:
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 400] == []


def test_docstrings_are_sentences() -> None:
    for path in (*FILES, *(ROOT / "tests").rglob("*.py")):
        nodes = [
            n
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)
        ]
        assert [text for node in nodes if HEADLESS.match(text := ast.get_docstring(node) or "")] == [], path
