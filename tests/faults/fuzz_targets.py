"""What tests/faults/fuzz.py feeds: for each reader, inputs, and the rule that an input keeps which it accepts."""

import json
import tempfile
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from flax import nnx
from fuzz_engine import Target
from fuzz_inputs import as_json, in_utf8, lines_of, near, spliced, texts, values
from hypothesis import strategies as st

from mllm.config import load as config_file
from mllm.config.schema import DataConfig, TaskConfig
from mllm.data import tasks
from mllm.data.pipeline import prompt_batches, sft_batches
from mllm.data.tasks import Example, final_answer
from mllm.model import tokenizer, weights
from mllm.model.architecture import Qwen2Config
from mllm.model.decoder import Qwen2
from mllm.rl.reward_functions import BUILT_IN, exact_match, flexible_match, last_number

SCRATCH = tempfile.TemporaryDirectory(prefix="mllm-fuzz-")
"""Removed when the process ends."""


def written(name: str, content: bytes) -> Path:
    path = Path(SCRATCH.name, name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


# --- configurations -------------------------------------------------------------------------------------------------

CONFIGS = [path.read_text() for path in sorted(config_file.CONFIGS.glob("*.yaml")) if not path.stem.startswith("grad")]
SETTINGS = [yaml.safe_load(text) for text in CONFIGS]
YAML_PIECES = (
    *("{", "}", "[", "]", ": ", "- ", "\n", "\n  ", "#", "'", '"', "|\n", ">-\n", "---\n", "...\n", "? ", "%TAG ! x\n"),
    *("&a ", "*a", "!!binary ", "!!set ", "!x ", "<<: ", "\t", "\\", "{" * 30, "- " * 30, "[" * 500, "1_0", "\ufeff"),
)


def keys_of(tree: dict[str, Any], start: str = "") -> list[str]:
    """Every key of the settings, with dots."""
    sections = [(f"{start}{name}.", value) for name, value in tree.items() if isinstance(value, dict)]
    return [f"{start}{name}" for name in tree] + [key for name, below in sections for key in keys_of(below, name)]


KEYS = sorted({key for settings in SETTINGS for key in keys_of(settings)})
override = st.builds(
    lambda key, value: f"{key}={value}",
    st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS).map(lambda key: key[:-1]), texts),
    st.one_of(texts, values.map(lambda value: yaml.safe_dump(value, default_flow_style=True).strip())),
)


def take_config(content: bytes, overrides: list[str] | None = None) -> None:
    """What is written of a configuration is read as the same."""
    config = config_file.load(str(written("config.yaml", content)), overrides or [])
    written_again = config_file.dump(config)
    again = config_file.load(str(written("again.yaml", written_again.encode())))
    assert again == config, written_again
    assert config_file.dump(again) == written_again


def take_overrides(overrides: list[str]) -> None:
    take_config(CONFIGS[-1].encode(), overrides)


# --- data -----------------------------------------------------------------------------------------------------------

BYTES = tokenizer.bytes_tokenizer()
CHATS: list[Any] = [
    {"question": "1+1=", "answer": "2"},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
        ]
    },
]
PROBLEMS: list[Any] = [
    {"question": "Tom has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "What is 1,000 + 234.5?", "answer": "#### 1,234.5"},
    {"question": "And 2 - 5?", "answer": "Less than none.\n#### -3"},
]
data_settings = st.fixed_dictionaries(
    {
        "max_length": st.sampled_from([1, 8, 32, 64]),
        "packing": st.booleans(),
        "shuffle": st.booleans(),
        "epochs": st.sampled_from([1, 3]),
        "on_bad_line": st.sampled_from(["error", "skip", "skip"]),
    }
)


class Chats(NamedTuple):
    content: bytes
    settings: dict[str, Any]
    batch_size: int


def take_chats(chats: Chats) -> None:
    """Batches are what the contract says, and go on from a position that was written down."""
    config = DataConfig(source=str(written("chats.jsonl", chats.content)), prefetch=0, **chats.settings)
    batches = sft_batches(config, BYTES, batch_size=chats.batch_size, seed=0)
    first = next(batches)
    assert abs(first.weights.sum() - 1) < 1e-4
    assert first.tokens.shape[0] == chats.batch_size
    assert ((first.tokens >= 0) & (first.tokens < 260)).all()
    assert not first.weights[first.segments == 0].any()
    position = json.loads(json.dumps(batches.get_state()))
    second = next(batches, None)
    batches.set_state(position)
    again = next(batches, None)
    assert (second is None) == (again is None)
    if second is not None and again is not None:
        np.testing.assert_array_equal(second.tokens, again.tokens)


def take_gsm8k(files: tuple[bytes, bytes]) -> None:
    """A solution gives its own answer, and prompts are made of all problems."""
    for name, content in zip(("train", "test"), files, strict=True):
        path = written(f"gsm8k/{name}.jsonl", content)
    task = tasks.load(TaskConfig(name="gsm8k", path=str(path.parent), heldout=1), seed=0)
    for example in [*task.train, *task.heldout]:
        assert example.solution is not None
        assert exact_match("", example.solution, example) == 1
    prompt_batches(task, BYTES, prompts_per_step=1, max_prompt_length=300, seed=0)


# --- answers --------------------------------------------------------------------------------------------------------

ANSWER_PIECES = (
    *("0", "7", "12", "345", "1,234", "1,2345", ".5", "-", "−", "$", "€", "%", ".", ",", " ", "\n", "=", "+", "x", "("),
    *("####", "#### ", "<answer>", "</answer>", "<think>", "</think>", "１", "٣", "²", "Answer: ", "\\boxed{", "}"),
)
repeated = st.builds(
    lambda piece, count, end: piece * count + end,
    st.lists(st.sampled_from(ANSWER_PIECES), min_size=1, max_size=3).map("".join),
    st.sampled_from([100, 1000, 20_000]),
    st.sampled_from(ANSWER_PIECES),
)
noise = st.one_of(st.lists(st.sampled_from(ANSWER_PIECES), max_size=30).map("".join), st.text(max_size=50))


class Said(NamedTuple):
    text: str
    number: str | None = None
    """The last that it states, as a dumb reader has it; None: not known."""


@st.composite
def plainly(draw: st.DrawFn) -> Said:
    """A completion that ends with a number, written in one of the ways that people write numbers."""
    whole = draw(st.one_of(st.integers(0, 10**4), st.integers(0, 10**40)))
    decimals = draw(st.one_of(st.none(), st.text("0123456789", min_size=1, max_size=30)))
    sign, currency = draw(st.sampled_from(["", "-", "−"])), draw(st.sampled_from(["", "", "$", "€"]))
    shown = f"{whole:,}" if draw(st.booleans()) else f"{whole}"
    tail = "" if decimals is None else f".{decimals}"
    front = draw(st.sampled_from(["", "The answer is ", "3 + 4 = ", "First 12, then\n", "x: ", "#### "]))
    end = draw(st.sampled_from(["", ".", " apples", "%", "\n", " .", "!", "</answer>"]))
    minus = "-" if sign else ""
    return Said(f"{front}{sign}{currency}{shown}{tail}{end}", f"{minus}{whole}{tail}")


def take_answer(said: Said) -> None:
    """Nothing raises, rewards are of [0, 1], and a plain number is read as what it is."""
    for form in ("whole", "hashes", "tags"):
        example = Example([], said.number or "7", None, {"form": form})
        answer = final_answer(said.text, example)
        assert answer is None or isinstance(answer, str)
        assert all(0 <= reward("", said.text, example) <= 1 for reward in BUILT_IN.values())
    found = last_number(said.text)
    assert found is None or found.is_finite()
    if said.number is not None:
        assert found == Decimal(said.number), found
        assert flexible_match("", said.text, Example([], said.number, None)) == 1


# --- models ---------------------------------------------------------------------------------------------------------

SIZES = Qwen2Config(
    vocab_size=8,
    hidden_size=4,
    intermediate_size=6,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
    tie_word_embeddings=True,
)
SHAPES = {name: shape for name, shape, _, _ in weights.tensors_of(nnx.state(Qwen2.abstract(SIZES)))}


def header_of(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], int]:
    """Of a safetensors file with these tensors in float32, and the bytes that they take."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}  # type: ignore[dict-item]
        end += size
    return header, end


HEADER, BYTES_OF_DATA = header_of(SHAPES)
INDEX = {"metadata": {"total_size": BYTES_OF_DATA}, "weight_map": dict.fromkeys(SHAPES, "a.safetensors")}


class Files(NamedTuple):
    config: Any = SIZES.to_hf()
    header: Any = HEADER
    index: Any = None
    """None: one file, without an index."""
    length: int | None = None
    """That the header claims to have; None: its own."""
    missing: int = 0
    """Bytes at the end."""


files = st.one_of(
    near([SIZES.to_hf()]).map(lambda tree: Files(config=tree)),
    near([HEADER]).map(lambda tree: Files(header=tree)),
    near([INDEX]).map(lambda tree: Files(index=tree)),
    st.sampled_from([0, 1, 7, 100, 2000, 2**31, 2**63, 2**64 - 1]).map(lambda length: Files(length=length)),
    st.integers(0, 2**12).map(lambda missing: Files(missing=missing)),
)


def take_model(given: Files) -> None:
    """The sizes survive being written, and every tensor has its shape."""
    place = written("model/config.json", as_json(given.config)).parent
    header = as_json(given.header)
    length = len(header) if given.length is None else given.length
    content = length.to_bytes(8, "little") + header + bytes(BYTES_OF_DATA)
    for name in ("a.safetensors", "model.safetensors", "model.safetensors.index.json"):
        (place / name).unlink(missing_ok=True)
    written(
        "model/model.safetensors" if given.index is None else "model/a.safetensors",
        content[: len(content) - given.missing],
    )
    if given.index is not None:
        written("model/model.safetensors.index.json", as_json(given.index))

    config = weights.read_config(place)
    assert Qwen2Config.from_hf(config.to_hf(), "again") == config
    with ExitStack() as opened:
        tensors = weights.open_tensors(place, opened)
        weights.check(tensors, SHAPES, place)
        for name, shape in SHAPES.items():
            assert tensors[name][(slice(None),) * len(shape)].shape == shape


yaml_texts = st.one_of(st.binary(max_size=50), spliced(CONFIGS, YAML_PIECES).map(in_utf8))
TARGETS = {
    target.name: target
    for target in (
        Target("yaml", yaml_texts, take_config),
        Target("settings", near(SETTINGS).map(yaml.safe_dump).map(in_utf8), take_config),
        Target("overrides", st.lists(override, max_size=3), take_overrides),
        Target("chats", st.builds(Chats, lines_of(CHATS), data_settings, st.integers(1, 3)), take_chats),
        Target("gsm8k", st.tuples(lines_of(PROBLEMS), lines_of(PROBLEMS)), take_gsm8k),
        Target("model", files, take_model),
        Target("answers", st.one_of(plainly(), noise.map(Said), repeated.map(Said)), take_answer),
    )
}
