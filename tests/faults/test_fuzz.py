"""Readers of input take it or refuse it in one line, in time, whatever is in it.

`make test` tries the same few hundred inputs of each kind every time, `make faults` thousands of new ones. Hypothesis
makes the inputs, shows the smallest that fails, and tries it again in the next run. Left out: coverage as a guide.
"""

import copy
import json
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.numpy
import yaml
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mllm.config import load as config_file
from mllm.config.data import DataConfig
from mllm.config.task import AnswerForm, TaskConfig
from mllm.data.prompts import training_prompts
from mllm.data.sft_source import SftBatches, load_documents
from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.load import load as load_task
from mllm.data.tasks.task import Example
from mllm.errors import LONGEST, UserError
from mllm.model import tokenizer, weights
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.rl.reward_functions import exact_match, flexible_match, think_answer_format

SECONDS = 2.0
"""Processor time that a reader may take for one input."""


@contextmanager
def time_limit():
    """Raises TimeoutError when this process has computed for SECONDS, in the midst of a regular expression, too."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# Inputs that are near to valid ones: trees and texts with a few changes

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
    keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))] if isinstance(tree, list) else []
    return [place for key in keys for place in ((tree, key), *places(tree[key]))]


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


def json_lines(valid: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """Files of JSON lines, some of which are wrong in some way."""
    line = st.one_of(
        st.sampled_from(valid).map(as_json),
        st.sampled_from(valid).map(as_json),
        changed(valid).map(as_json),
        changed(valid).map(lambda tree: in_utf8(json.dumps(tree, ensure_ascii=False))),
        spliced([json.dumps(tree) for tree in valid], ["{", "}", '"', "\\", ",", "[" * 2000, "\\ud800"]).map(in_utf8),
        st.binary(max_size=8),
    )
    starts, ends = st.sampled_from([b"", b"", b"\xef\xbb\xbf"]), st.sampled_from([b"\n", b"\r\n", b"\n\n"])
    return st.builds(lambda start, end, lines: start + end.join(lines), starts, ends, st.lists(line, max_size=6))


# Configurations

CONFIGS = [path.read_text() for path in sorted(config_file.CONFIGS.glob("*.yaml")) if not path.stem.startswith("grad")]
SETTINGS = [yaml.safe_load(text) for text in CONFIGS]
YAML_PIECES = (
    *("{", "}", "[", "]", ": ", "- ", "\n", "\n  ", "#", "'", '"', "|\n", ">-\n", "---\n", "...\n", "? ", "%TAG ! x\n"),
    *("&a ", "*a", "!!binary ", "!!set ", "!x ", "<<: ", "\t", "\\", "{" * 30, "- " * 30, "[" * 500, "1_0", "\ufeff"),
)


SECTIONS = [(f"{name}.", below) for tree in SETTINGS for name, below in tree.items() if isinstance(below, dict)]
keys = st.sampled_from(sorted({f"{name}{key}" for name, tree in [*SECTIONS, ("", SETTINGS[0])] for key in tree}))
overrides = st.builds(
    lambda key, value: f"{key}={value}",
    st.one_of(keys, keys.map(lambda key: key[:-1]), texts),
    st.one_of(texts, values.map(lambda value: yaml.safe_dump(value, default_flow_style=True).strip())),
)
contents = st.one_of(
    st.binary(max_size=50),
    spliced(CONFIGS, YAML_PIECES).map(in_utf8),
    changed(SETTINGS).map(yaml.safe_dump).map(in_utf8),
)


def read_config(folder: Path, given: tuple[bytes, list[str]]) -> None:
    """What is written of a configuration reads as the same configuration."""
    content, overridden = given
    (folder / "config.yaml").write_bytes(content)
    config = config_file.load(str(folder / "config.yaml"), overridden)
    (folder / "again.yaml").write_text(config_file.dump(config), encoding="utf-8")
    assert config_file.load(str(folder / "again.yaml")) == config


# Data

BYTES = tokenizer.bytes_tokenizer()


def messages(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant") if len(contents) % 2 == 0 else ("system", "user", "assistant", "user", "assistant")
    return {"messages": [{"role": role, "content": said} for role, said in zip(roles, contents, strict=True)]}


CHATS = [
    {"question": "1+1=", "answer": "2"},
    messages("Hi", "Hello."),
    messages("Be brief.", "2+2?", "4", "Sure?", "Yes."),
    {"prompt": "1+1=", "completion": "2"},
    {"prompt": messages("Hi", "Hello.")["messages"][:1], "completion": messages("Hi", "Hello.")["messages"][1:]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    {"text": "A text."},
]
OPTIONS = {"packing": [True, False], "shuffle": [True, False], "epochs": [1, 3], "max_length": [1, 8, 32, 64]}
OPTIONS["on_bad_line"] = ["error", "skip", "skip"]
data_settings = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()})


def read_chats(folder: Path, given: tuple[bytes, dict[str, Any], int]) -> None:
    """Batches keep their contract, and go on from a position that was written down."""
    content, options, batch_size = given
    (folder / "chats.jsonl").write_bytes(content)
    config = DataConfig(source=str(folder / "chats.jsonl"), **options)
    batches = SftBatches(config, load_documents(config, BYTES, None)[0], batch_size).train()
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


LISTED = [
    {"prompt": "1+1=", "answer": 2, "level": [None, 1.5, {"a": "b"}]},
    {"prompt": messages("Hi", "Hello.")["messages"][:1], "answer": None},
    messages("Be brief.", "2+2?", "4", "Sure?", "Yes.") | {"answer": "It is $\\boxed{4}$.\n#### 4"},
]


def read_listed(folder: Path, given: tuple[bytes, AnswerForm]) -> None:
    """No problem is held out and trained on, and prompts are made of all."""
    content, form = given
    (folder / "problems.jsonl").write_bytes(content)
    train = str(folder / "problems.jsonl")
    task = load_task(TaskConfig(name="jsonl", train=train, heldout=1, answer_form=form), seed=0)
    assert task.heldout[0].prompt not in [example.prompt for example in task.train]
    assert training_prompts(task, BYTES, max_prompt_length=300, seed=0).get_state()["content"] == task.content


# Completions

PIECES = (
    *("0", "7", "12", "345", "1,234", "1,2345", ".5", "-", "−", "$", "€", "%", ".", ",", " ", "\n", "=", "+", "x", "("),
    *("####", "#### ", "<answer>", "</answer>", "<think>", "</think>", "１", "٣", "²", "Answer: ", "\\boxed{", "}"),
)
pieces = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
repetitions = st.builds(lambda piece, count: piece * count, pieces, st.sampled_from([1, 100, 20_000]))


def read_completion(folder: Path, text: str) -> None:
    """Nothing raises, and rewards are in [0, 1]."""
    for form in get_args(AnswerForm):
        example = Example([], "7", answer_form=form)
        assert isinstance(final_answer(text, form), str | None)
        matches = [match(text, "7", example) for match in (exact_match, flexible_match)]
        assert all(0 <= reward <= 1 for reward in (*matches, think_answer_format(text)))


# Models

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
SIZES = Architecture(
    vocab_size=8, hidden_size=4, intermediate_size=6, num_hidden_layers=1, tie_word_embeddings=True, **HEADS
)
SHAPES = {name: shape for name, shape, _, _ in weights.tensors_of(nnx.state(Decoder.abstract(SIZES)))}


WEIGHTS = safetensors.numpy.save({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
DATA = 8 + int.from_bytes(WEIGHTS[:8], "little")
"""Where the header of a safetensors file with the model's tensors ends."""
HEADER = json.loads(WEIGHTS[8:DATA])
INDEX = {"metadata": {"total_size": len(WEIGHTS) - DATA}, "weight_map": dict.fromkeys(SHAPES, "a.safetensors")}
models = st.one_of(
    changed([SIZES.to_hf()]).map(lambda tree: {"config": tree}),
    changed([HEADER]).map(lambda tree: {"header": tree}),
    changed([INDEX]).map(lambda tree: {"index": tree}),
    st.sampled_from([0, 1, 7, 100, 2000, 2**31, 2**63, 2**64 - 1]).map(lambda length: {"length": length}),
    st.integers(0, 2**12).map(lambda missing: {"missing": missing}),
)
"""What differs in a model's folder: files, the header's length as its file states it, bytes that are cut off."""


def read_model(folder: Path, given: dict[str, Any]) -> None:
    """The sizes survive being written, and every tensor has its shape."""
    for path in folder.iterdir():
        path.unlink()
    header = as_json(given.get("header", HEADER))
    content = given.get("length", len(header)).to_bytes(8, "little") + header + WEIGHTS[DATA:]
    (folder / "config.json").write_bytes(as_json(given.get("config", SIZES.to_hf())))
    name = "a.safetensors" if "index" in given else "model.safetensors"
    (folder / name).write_bytes(content[: len(content) - given.get("missing", 0)])
    if "index" in given:
        (folder / "model.safetensors.index.json").write_bytes(as_json(given["index"]))

    config = weights.read_config(folder)
    assert Architecture.from_hf(config.to_hf(), "again") == config
    tensors = weights.open_tensors(folder)
    weights.check(tensors, SHAPES, folder, "config.json")
    for name, shape in SHAPES.items():
        assert tensors[name][(slice(None),) * len(shape)].shape == shape


READERS = {
    "a configuration": (st.tuples(contents, st.just([])), read_config),
    "overrides": (st.tuples(st.just(CONFIGS[-1].encode()), st.lists(overrides, max_size=3)), read_config),
    "chats": (st.tuples(json_lines(CHATS), data_settings, st.integers(1, 3)), read_chats),
    "a task's file": (st.tuples(json_lines(LISTED), st.sampled_from(get_args(AnswerForm))), read_listed),
    "the files of a model": (models, read_model),
    "completions": (st.one_of(pieces, repetitions, st.text(max_size=50)), read_completion),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("examples", [100, pytest.param(10_000, marks=[pytest.mark.faults, pytest.mark.timeout(0)])])
def test_every_input_is_read_as_it_is_or_refused_in_one_line(name, examples, tmp_path):
    inputs, read = READERS[name]
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples == 100,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(inputs)
    def read_or_refuse(value: Any) -> None:
        said = ""
        try:
            with time_limit():
                read(tmp_path, value)
        except UserError as error:
            said = str(error)
        assert said.isprintable()
        assert len(said) < 10 * LONGEST
        outcomes["refused" if said else "read"] += 1

    read_or_refuse()
    assert outcomes["read"]
    assert outcomes["refused"] or read is read_completion
