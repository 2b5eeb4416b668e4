"""Readers take any input or refuse it in one line, in time.

`make test` tries the same twenty inputs of each kind every time; `make faults` tries thousands of new inputs.
Hypothesis makes the inputs, shows the smallest failing input, and tries it again in the next run. Left out: coverage as
a guide.
"""

import copy
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mllm.algorithms.documents import load_documents
from mllm.algorithms.sft.algorithm import DocumentBatches
from mllm.algorithms.table import RUNS
from mllm.config import load as config_file
from mllm.config.data import DataConfig
from mllm.config.section import keys_of
from mllm.config.task import AnswerForm
from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.task import Example
from mllm.errors import LONGEST, UserError
from mllm.model import tokenizer, weights
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.rewards.functions import exact_match, flexible_match, think_answer_format

ROOT = Path(__file__).parents[2]
DAILY = 20

# Inputs near to valid inputs: trees and texts with a few changes

TRAPS = (
    *("", " ", "\n", "null", "~", "true", "no", "=", "<<", "1e5", ".inf", "-.nan", "0x", "1:30", "010", "2024-01-01"),
    *("\x00", "\ud800", "\x85", "\u2028", "\ufeff", "\x1b[2J", "日本", "e\u0301", "{{ 9**9 }}", "%s", "${HOME}", "1_0"),
    *("a" * 300, "..", "../x.safetensors", "/dev/zero", "~nobody/x", "a/b", "x.jsonl", "x.zip", "pytorch_model.bin"),
    *("!!python/object/apply:os.abort []", "&a [*a]", "task", "bytes", "gsm8k", "os:abort"),
    *("<|im_end|>", "<answer>", "#### 7", "#### ,", "#### -", "system", "assistant", "user", "\\ud800", "\\", "\t"),
    *("{", "}", "[", "]", ",", ": ", "- ", "\n  ", "#", "'", '"', "|\n", ">-\n", "---\n", "...\n", "? ", "%TAG ! x\n"),
    *("&a ", "*a", "!!binary ", "!!set ", "!x ", "<<: ", "{" * 30, "- " * 30, "[" * 500, "[" * 2000),
)
"""Texts that a reader might take for something else, and the signs of YAML and JSON."""

texts = st.one_of(st.sampled_from(TRAPS), st.text(st.characters(), max_size=8))
numbers = st.one_of(st.integers(-2, 9), st.floats(), st.sampled_from([16, 2**31 - 1, 2**31, 2**63, -(2**63), 10**400]))
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
        if there := places(tree):
            (node, key), (other, name) = draw(st.sampled_from(there)), draw(st.sampled_from(there))
            copied, kept = copy.deepcopy(other[name]), node.pop(key)
            value = draw(st.one_of(values, values, st.sampled_from([copied, kept])))
            if isinstance(node, list):
                node.insert(draw(st.sampled_from([key, key, 0])), value)
            elif draw(st.sampled_from([True, True, False])):
                node[draw(st.one_of(st.just(key), st.sampled_from([key, key[:-1], key + "s"]), texts))] = value
    return tree


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of the tree, with each of its keys."""
    keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))] if isinstance(tree, list) else []
    return [place for key in keys for place in ((tree, key), *places(tree[key]))]


def spliced(valid: Sequence[str]) -> st.SearchStrategy[bytes]:
    """One of `valid` with a piece put in, in place of up to forty characters."""

    def splice(text: str, place: float, length: int, piece: str) -> bytes:
        start = int(place * len(text))
        return (text[:start] + piece + text[start + length :]).encode("utf-8", "surrogatepass")

    return st.builds(splice, st.sampled_from(valid), st.floats(0, 1), st.integers(0, 40), texts)


def as_json(tree: Any, ensure_ascii: bool = True) -> bytes:
    """JSON as a careless program would write it: with NaN, and with halves of surrogate pairs, invalid in UTF-8."""
    return json.dumps(tree, ensure_ascii=ensure_ascii).encode("utf-8", "surrogatepass")


def json_lines(valid: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """Files of JSON lines: of good lines, or with lines that are wrong in some way. One wrong line is enough."""
    whole = st.sampled_from(valid).map(as_json)
    wrong = spliced([json.dumps(tree) for tree in valid])
    line = st.one_of(whole, whole, st.builds(as_json, changed(valid), st.booleans()), wrong, st.binary(max_size=8))
    lines = st.one_of(st.lists(whole, min_size=1, max_size=6), st.lists(line, max_size=6))
    return st.builds(lambda start, end, lines: start + end.join(lines), start_of_file, end_of_line, lines)


start_of_file, end_of_line = st.sampled_from([b"", b"\xef\xbb\xbf"]), st.sampled_from([b"\n", b"\r\n", b"\n\n"])


# Configurations

CONFIGS = [path.read_text() for path in sorted(config_file.CONFIGS.glob("*.yaml")) if not path.stem.startswith("grad")]
contents = st.one_of(
    st.binary(max_size=50),
    spliced(CONFIGS),
    changed([config_file.parser().load(text) for text in CONFIGS]).map(
        lambda tree: json.dumps(tree, default=str).encode()
    ),
)
keys = st.sampled_from(sorted({key for run in RUNS.values() for key in keys_of(run)}))
overrides = st.builds(
    lambda key, value: f"{key}={value}",
    st.one_of(keys, keys.map(lambda key: key[:-1]), texts),
    st.one_of(texts, values.map(lambda value: json.dumps(value, default=str))),
)


def read_config(folder: Path, given: tuple[bytes, list[str]]) -> None:
    """A written configuration reads as the same configuration."""
    content, overridden = given
    (folder / "config.yaml").write_bytes(content)
    config = config_file.load(str(folder / "config.yaml"), overridden)
    (folder / "again.yaml").write_text(config_file.dump(config), encoding="utf-8")
    assert config_file.load(str(folder / "again.yaml")) == config


# Data

BYTES = tokenizer.bytes_tokenizer()
CHAT = [{"role": role, "content": "2+2?"} for role in ("system", "user", "assistant", "user", "assistant")]
CHATS = [*map(json.loads, (ROOT / "docs/examples/formats.jsonl").open()), {"messages": CHAT}]
OPTIONS = {"packing": [True, False], "shuffle": [True, False], "epochs": [1, 3], "max_length": [1, 8, 32, 64]}
data_settings = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()})


def read_chats(folder: Path, given: tuple[bytes, dict[str, Any], int]) -> None:
    """Batches keep their contract, and go on from a position that was written down."""
    content, options, batch_size = given
    (folder / "chats.jsonl").write_bytes(content)
    config = DataConfig(source=str(folder / "chats.jsonl"), **options)
    batches = DocumentBatches(config, load_documents(config, tokenizer.Renderer(BYTES), None)[0], batch_size).train()
    first = next(batches)
    assert abs(first.weights.sum() - 1) < 1e-4
    assert first.tokens.shape[0] == batch_size
    assert 0 <= first.tokens.min() <= first.tokens.max() < 260
    assert not first.weights[first.segments == 0].any()
    position = json.loads(json.dumps(batches.get_state()))
    second = next(batches, None)
    batches.set_state(position)
    again = next(batches, None)
    np.testing.assert_array_equal(*(None if batch is None else batch.tokens for batch in (second, again)))


# Completions

PIECES = (
    *("0", "7", "12", "345", "1,234", "1,2345", ".5", "-", "−", "$", "€", "%", ".", ",", " ", "\n", "=", "+", "x", "("),
    *("####", "#### ", "<answer>", "</answer>", "<think>", "</think>", "１", "٣", "²", "Answer: ", "\\boxed{", "}"),
)
pieces = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
repetitions = st.builds(lambda piece, count: piece * count, pieces, st.sampled_from([1, 100, 5_000]))


def read_completion(folder: Path, text: str) -> None:
    """Nothing raises, and rewards are in [0, 1]."""
    for form in get_args(AnswerForm):
        example = Example([], "7", answer_form=form)
        assert isinstance(final_answer(text, form), str | None)
        matches = [match(text, "7", example) for match in (exact_match, flexible_match)]
        assert all(0 <= reward <= 1 for reward in (*matches, think_answer_format(text)))


# Models

MODEL = {path.name: path.read_bytes() for path in (ROOT / "tests/fixtures/untied_sharded").glob("[cm]*")}
TREES = {name: json.loads(content) for name, content in MODEL.items() if name.endswith(".json")}
DECODER = Decoder.abstract(Architecture.from_hf(TREES["config.json"], "whole"))
SHAPES = {name: shape for name, shape, *_ in weights.tensors_of(nnx.state(DECODER), DECODER.config)}
SHARD = "model-00001-of-00003.safetensors"
WHOLE = MODEL[SHARD]
HEADER = WHOLE[8 : 8 + int.from_bytes(WHOLE[:8], "little")]
headers = changed([json.loads(HEADER)]).map(as_json)
shards = st.one_of(
    headers.map(lambda header: len(header).to_bytes(8, "little") + header + WHOLE[8 + len(HEADER) :]),
    st.sampled_from([0, 1, 7, 2000, 2**31, 2**64 - 1]).map(lambda length: length.to_bytes(8, "little") + WHOLE[8:]),
    st.integers(1, 2**12).map(lambda missing: WHOLE[:-missing]),
)
"""One of a model's files with another header, another length of the header, or an end that is missing."""
trees = {name: changed([tree]).map(as_json) for name, tree in TREES.items()}
models = st.fixed_dictionaries({}, optional={**trees, SHARD: shards})


def read_model(folder: Path, given: dict[str, bytes]) -> None:
    """The sizes survive being written, and every tensor has its shape."""
    for name, content in (MODEL | given).items():
        (folder / name).write_bytes(content)
    config = weights.read_config(folder)
    assert Architecture.from_hf(config.to_hf(), "again") == config
    tensors = weights.open_tensors(folder)
    assert {tensor.file.parent for tensor in tensors.values()} <= {folder}
    weights.check(tensors, SHAPES, folder, "config.json")
    for name, shape in SHAPES.items():
        assert tensors[name][(slice(None),) * len(shape)].shape == shape


READERS = {
    "a configuration": (st.tuples(contents, st.just([])), read_config),
    "overrides": (st.tuples(st.just(CONFIGS[-1].encode()), st.lists(overrides, max_size=3)), read_config),
    "chats": (st.tuples(json_lines(CHATS), data_settings, st.integers(1, 3)), read_chats),
    "the files of a model": (models, read_model),
    "completions": (st.one_of(pieces, repetitions, st.text(max_size=50)), read_completion),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("examples", [DAILY, pytest.param(10_000, marks=[pytest.mark.faults, pytest.mark.timeout(0)])])
def test_every_input_is_read_unchanged_or_refused_in_one_line(name, examples, tmp_path):
    inputs, read = READERS[name]
    outcomes = set()

    def stop(*_: object) -> None:
        raise TimeoutError

    @settings(max_examples=examples, derandomize=examples == DAILY, suppress_health_check=list(HealthCheck))
    @given(inputs)
    def read_or_refuse(value: Any) -> None:
        message = ""
        signal.setitimer(signal.ITIMER_PROF, 20.0)  # seconds of processor time; it also ends a regular expression
        try:
            read(tmp_path, value)
        except UserError as error:
            message = str(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        assert message.isprintable()
        assert len(message) < 10 * LONGEST
        outcomes.add("refused" if message else "read")

    signal.signal(signal.SIGPROF, stop)
    read_or_refuse()
    assert outcomes == ({"read"} if read is read_completion else {"read", "refused"})
