"""Inputs that are near to valid ones: trees and texts with a few changes."""

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

TRAPS = (
    *("", " ", "\n", "null", "~", "true", "no", "=", "<<", "1e5", ".inf", "-.nan", "0x", "1:30", "010", "2024-01-01"),
    *("\x00", "\ud800", "\x85", "\u2028", "\ufeff", "\x1b[2J", "日本", "e\u0301", "{{ 9**9 }}", "%s", "${HOME}"),
    *("a" * 300, "..", "../x.safetensors", "/dev/zero", "~nobody/x", "a/b", "x.jsonl", "x.zip", "pytorch_model.bin"),
    *("!!python/object/apply:os.abort []", "&a [*a]", "task", "bytes", "gsm8k", "reasoning_gym:x", "os:abort"),
    *("<|im_end|>", "<answer>", "#### 7", "#### ,", "#### -", "system", "assistant", "user"),
)
"""Texts that a reader might take for something else."""

texts = st.one_of(st.sampled_from(TRAPS), st.text(st.characters(), max_size=8))
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
def changed(draw: st.DrawFn, valid: Sequence[Any]) -> Any:
    """One of `valid`, trees of lists and mappings, with up to three places replaced, removed, moved or renamed."""
    tree = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        if not (there := places(tree)):
            break
        node, key = draw(st.sampled_from(there))
        change = draw(st.sampled_from(["replace", "replace", "copy", "remove", "rename"]))
        if change == "replace":
            node[key] = draw(values)
        elif change == "copy":
            other, name = draw(st.sampled_from(there))
            node[key] = copy.deepcopy(other[name])
        elif isinstance(node, list):
            node.insert(0, node.pop(key))
        else:
            value = node.pop(key)
            if change == "rename":
                node[draw(st.one_of(texts, st.just(key[:-1]), st.just(key + "s")))] = value
    return tree


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of the tree, with each of its keys."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [place for key in keys for place in places(tree[key])]


@st.composite
def spliced(draw: st.DrawFn, valid: Sequence[str], pieces: Sequence[str]) -> str:
    """One of `valid` with up to four pieces put in, taken out or doubled."""
    text = draw(st.sampled_from(valid))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 40)))
        piece = draw(st.one_of(st.sampled_from(pieces), texts, st.just(text[start:stop] * 2), st.just("")))
        text = text[:start] + piece + text[stop:]
    return text


def in_utf8(text: str) -> bytes:
    """UTF-8, which halves of surrogate pairs make invalid."""
    return text.encode("utf-8", "surrogatepass")


def as_json(tree: Any) -> bytes:
    """JSON as a careless program would write it: with NaN, and with halves of surrogate pairs."""
    return json.dumps(tree).encode()


@st.composite
def json_lines(draw: st.DrawFn, valid: Sequence[Any]) -> bytes:
    """A file of JSON lines, up to two of which are wrong in some way."""
    wrong = st.one_of(
        changed(valid).map(as_json),
        changed(valid).map(lambda tree: in_utf8(json.dumps(tree, ensure_ascii=False))),
        spliced([json.dumps(tree) for tree in valid], ["{", "}", '"', "\\", ",", "[" * 2000, "\\ud800"]).map(in_utf8),
        st.binary(max_size=8),
    )
    lines = draw(st.lists(st.sampled_from(valid).map(as_json), max_size=5))
    for line in draw(st.lists(wrong, max_size=2)):
        lines.insert(draw(st.integers(0, len(lines))), line)
    start = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"]))
    return start + draw(st.sampled_from([b"\n", b"\r\n", b"\n\n"])).join(lines)
