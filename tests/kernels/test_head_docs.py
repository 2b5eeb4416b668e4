"""Every Python snippet of docs/head.md runs as it stands; those over a mesh take four of the tests' virtual devices."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/head.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[f"snippet {i + 1}" for i in range(len(SNIPPETS))])
@pytest.mark.nightly
def test_a_snippet_runs(snippet: str) -> None:
    exec(compile(snippet, str(PAGE), "exec"), {"__name__": "snippet"})
