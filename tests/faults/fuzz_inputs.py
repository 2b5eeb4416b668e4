"""Inputs that are near to valid ones, for tests/faults/fuzz.py: trees with some changes, and texts with some."""

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

Draw = st.DrawFn

NASTY = (
    *("", " ", "\n", "null", "~", "true", "no", "=", "<<", "1e5", ".inf", "-.nan", "0x", "1:30", "010", "2024-01-01"),
    *("\x00", "\ud800", "\x85", "\u2028", "\ufeff", "\x1b[2J", "日本", "e\u0301", "{{ 9**9 }}", "%s", "${HOME}"),
    *("a" * 300, "..", "../x.safetensors", "/dev/zero", "~nobody/x", "a/b", "x.jsonl", "x.zip", "pytorch_model.bin"),
    *("!!python/object/apply:os.abort []", "&a [*a]", "task", "bytes", "gsm8k", "reasoning_gym:x", "os:abort"),
    *("<|im_end|>", "<answer>", "#### 7", "#### ,", "#### -", "system", "assistant", "user"),
)
"""Texts that something might take for something else."""

texts = st.one_of(st.sampled_from(NASTY), st.text(st.characters(), max_size=8))
numbers = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([16, 31, 32, 2**15, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**400]),
    st.floats(),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=5,
)


@st.composite
def near(draw: Draw, valid: Sequence[Any]) -> Any:
    """One of `valid`, trees of lists and mappings, with up to three changes."""
    tree = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        change(draw, tree)
    return tree


def change(draw: Draw, tree: Any) -> None:
    """Replace, remove, double or rename something."""
    there = places(tree)
    if not there:
        return
    node, key = draw(st.sampled_from(there))
    how = draw(st.sampled_from(["replace", "replace", "borrow", "remove", "rename"]))
    if how == "replace":
        node[key] = draw(values)
    elif how == "borrow":
        other, name = draw(st.sampled_from(there))
        node[key] = copy.deepcopy(other[name])
    elif isinstance(node, list):
        node.insert(0, node.pop(key))
    else:
        value = node.pop(key)
        if how == "rename":
            node[draw(st.one_of(texts, st.just(key[:-1]), st.just(key + "s")))] = value


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of the tree, with each of its keys."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [place for key in keys for place in places(tree[key])]


@st.composite
def spliced(draw: Draw, valid: Sequence[str], pieces: Sequence[str]) -> str:
    """One of `valid` with up to four pieces put in, taken out or doubled."""
    text = draw(st.sampled_from(valid))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 40)))
        piece = draw(st.one_of(st.sampled_from(pieces), texts, st.just(text[start:stop] * 2), st.just("")))
        text = text[:start] + piece + text[stop:]
    return text


def in_utf8(text: str) -> bytes:
    """Halves of surrogate pairs, too, which makes it no UTF-8."""
    return text.encode("utf-8", "surrogatepass")


def as_json(tree: Any) -> bytes:
    """With NaN and halves of surrogate pairs, as a careless program would write them."""
    return json.dumps(tree).encode()


@st.composite
def lines_of(draw: Draw, valid: Sequence[Any]) -> bytes:
    """A file of JSON lines, with up to two that are somehow wrong."""
    pieces = ["{", "}", '"', "\\", ",", "[" * 2000, "\\ud800"]
    wrong = st.one_of(
        near(valid).map(as_json),
        near(valid).map(lambda tree: in_utf8(json.dumps(tree, ensure_ascii=False))),
        spliced([json.dumps(tree) for tree in valid], pieces).map(in_utf8),
        st.binary(max_size=8),
        st.just(b""),
    )
    lines = draw(st.lists(st.sampled_from(valid).map(as_json), max_size=5))
    for line in draw(st.lists(wrong, max_size=2)):
        lines.insert(draw(st.integers(0, len(lines))), line)
    start = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"]))
    return start + draw(st.sampled_from([b"\n", b"\r\n", b"\n\n"])).join(lines)
