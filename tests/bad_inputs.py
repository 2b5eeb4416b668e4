"""What is refused, by what is wrong with it, and the words that say so.

Tables of text come first: configurations, overrides, lines of data. Then what spoils a model's folder or its tokenizer,
and command lines of the tools. `{path}` is the file that is spoilt, `{model}` the folder. Whatever would run as code
writes the file that `mark` names, and a file that was not there before fails the test.
"""

import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

DEEP = "[" * 50 + "]" * 50
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"

CONFIGS: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "{path}: expected a mapping of settings at the top level"),
    "a list": (b"- steps\n", "{path}: expected a mapping of settings at the top level"),
    "no YAML": (b"steps: [\n", "{path}: not readable as YAML: "),
    "no UTF-8": (b"run_dir: \xff\xfe\n", "{path}: not readable as YAML: 'utf-8' codec can't decode"),
    "UTF-16": ("steps: 4\n".encode("utf-16"), "{path}: not readable as YAML: 'utf-8' codec can't decode"),
    "a NUL byte": (b"run_dir: a\x00b\n", "{path}: not readable as YAML: unacceptable character #x0000"),
    "a NUL by its escape": (b'run_dir: "a\\0b"\n', "{path}: not readable as YAML: line 1: no text may hold '\\x00'"),
    "half a surrogate pair": (b'run_dir: "\\ud800"\n', "line 1: no text may hold '\\ud800'"),
    "an alias": (b"seed: &a 1\nsteps: *a\n", "line 1: anchors and aliases are not read"),
    "aliases that explode": (BOMB.encode(), "line 1: anchors and aliases are not read"),
    "an alias of itself": (b"&a [*a]\n", "line 1: anchors and aliases are not read"),
    "a merge": (b"<<: {steps: 4}\n", "line 1: << is no name of a setting"),
    "a tag that makes Python objects": (
        b"run_dir: !!python/object/apply:os.system ['touch {mark}']\n",
        "line 1: tags are not read: remove tag:yaml.org,2002:python/object/apply:os.system",
    ),
    "a tag of YAML's own": (b"run_dir: !!binary aGk=\n", "line 1: tags are not read"),
    "a key that stands twice": (b"steps: 4\nseed: 1\nsteps: 5\n", "steps stands twice, at line 3"),
    "a key that is a number": (b"steps: 4\n7: 5\n", "line 2: 7 is no name of a setting"),
    "a key that is a list": (b"? [a]\n: 5\n", "line 1: a sequence is no name of a setting"),
    "two documents": (b"steps: 4\n---\nsteps: 5\n", "{path}: not readable as YAML: expected a single document"),
    "nesting without end": (f"model: {DEEP}\n".encode(), "line 1: more than 20 levels"),
    "a number of a thousand digits": (b"steps: " + b"9" * 1000, "line 1: " + "9" * 40 + " is no number"),
    "a number of ten thousand digits": (b"steps: 0x" + b"f" * 10_000, "line 1: 0x" + "f" * 38 + " is no number"),
    "a number that is none": (b"steps: .nan\n", "line 1: .nan is no number that settings take"),
    "a megabyte": (b"# " + b"x" * 2**20, "{path}: larger than 1 MiB, so it is no configuration"),
    "the weights of a model": (bytes(2**21), "{path}: larger than 1 MiB, so it is no configuration"),
}
"""Of `train.py --config FILE`: what the file is, its bytes, and what is said."""

OVERRIDES: dict[str, str] = {
    # not key=value
    "steps": "steps: expected key.sub=value",
    "=4": "=4: expected key.sub=value",
    "model..source=x": "model..source=x: expected key.sub=value",
    "steps.x=1": "steps.x=1: steps is a value, not a section",
    "steps=[": "steps=[: the value is not readable as YAML",
    "steps=*a": "steps=*a: the value is not readable as YAML: line 1: anchors and aliases are not read",
    f"steps={DEEP}": "the value is not readable as YAML: line 1: more than 20 levels",
    "model={[a]: b}": "the value is not readable as YAML: line 1: a sequence is no name of a setting",
    # unknown, of the wrong type, out of bounds
    "rollout.temprature=2": "rollout.temprature: unknown setting; did you mean temperature?",
    "rollout=3": "rollout: expected a section of settings, got 3",
    "steps=many": "steps: Input should be a valid integer",
    "steps=0": "steps: Input should be greater than 0",
    "steps=3000000000": "steps: the number is too large: at most 2147483647",
    "steps='9999999999999999999999'": "steps: the number is too large: at most 2147483647",
    "optimizer.learning_rate=1.0e+400": "1.0e+400 is no number that settings take",
    "optimizer.learning_rate=-1": "optimizer.learning_rate: Input should be greater than 0",
    "task.name=chess": "task.name: String should match pattern",
    # what contradicts other settings, the machine or the data
    "grpo.num_generations=3": "batch_size: 8 is not divisible by grpo.num_generations (3)",
    "mesh.tp=16": "mesh: dp * fsdp * tp = 16, but there are 8 devices: set mesh.tp=8",
    "mesh.tp=8": "mesh.tp: 8 does not divide the model's num_attention_heads of 4; the nearest that works is 4",
    "rollout.max_prompt_length=3": "rollout.max_prompt_length: prompt 0 of task arithmetic has",
    "rollout.stop=['two tokens']": "rollout.stop: 'two tokens' is 10 tokens",
    "task.heldout=60": "task.heldout: 60 of arithmetic's 100 problems",
    "task.system_prompt='<|im_end|>'": "arithmetic[0]: messages: <|im_end|> is a control token",
    "task.rewards=[{name: exact}]": "task.rewards: there is no reward exact:",
    "task.rewards=[{name: 'no_such_module:f'}]": "task.rewards: no_such_module:f can't be imported",
    "task.rewards=[{name: 'user_rewards:f'}]": "task.rewards: user_rewards:f can't be imported",
    "task.rewards=[{name: task}]": "task.rewards: this task has no scorer of its own",
    "task={name: gsm8k, path: nowhere}": "task.path: nowhere/test.jsonl can't be read",
    # the model by its sizes
    "model.architecture.vocab_size=128": "model.tokenizer: its token '<|pad|>' has id 259",
    "model.architecture.hiden_size=8": "model.architecture: hiden_size is unknown; did you mean hidden_size?",
    "model.architecture.num_hidden_layers=20000": "num_hidden_layers must be a positive whole number up to 10000",
    "model.architecture={hidden_size: 1000000000, num_attention_heads: 4, vocab_size: 1000000000, "
    "intermediate_size: 4, num_hidden_layers: 1}": "model.architecture: ",
    # files that are none
    "model.tokenizer=nowhere": "model.tokenizer: none can be read from nowhere",
    f"model.tokenizer={'a' * 300}": "model.tokenizer: none can be read from aaa",
    f"model={{source: {'a' * 300}, init: pretrained}}": "aaa: no such folder",
    "model={source: '~nobody-here/model', init: pretrained}": "~nobody-here/model: no such folder",
}
"""Of a run that is right but for this setting; and what is said."""

GOOD = b'{"question": "1+1=", "answer": "2"}\n'


def chat(*messages: Any) -> bytes:
    return json.dumps({"messages": messages}).encode()


def said(role: Any, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


LINES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{'question': 1}", "not JSON in UTF-8"),
    "half a line": (b'{"question": "1+', "not JSON in UTF-8"),
    "two objects": (GOOD.strip() * 2, "not JSON in UTF-8 (Extra data"),
    "no UTF-8": (b'{"question": "\xff", "answer": "2"}', "not JSON in UTF-8"),
    "UTF-16": ('{"question": "1", "answer": "2"}'.encode("utf-16"), "not JSON in UTF-8"),
    "a number of ten thousand digits": (b'{"question": ' + b"9" * 10_000 + b"}", "not JSON in UTF-8"),
    "nesting without end": (b"[" * 100_000, "not JSON in UTF-8 (maximum recursion depth"),
    "no object": (b"[1]", "expected a JSON object, got list"),
    "a number that is none": (b"NaN", "expected a JSON object, got float"),
    "other fields": (b'{"text": "a"}', "neither messages nor question and answer are there"),
    "no answer": (b'{"question": "a"}', "answer is missing"),
    "an answer that is no text": (b'{"question": "a", "answer": NaN}', "answer must be a string, got float"),
    "an answer of nothing": (b'{"question": "a", "answer": "\\n"}', "answer is empty"),
    "half a surrogate pair": (b'{"question": "a", "answer": "\\ud83d"}', "answer holds '\\ud83d', which is half"),
    "messages that are a text": (b'{"messages": "a"}', "messages must be a list of objects with role and content"),
    "messages that are texts": (chat("a"), "messages must be a list of objects with role and content"),
    "no messages": (chat(), "no message is the assistant's, so there is nothing to learn"),
    "only questions": (chat(said("user", "a")), "no message is the assistant's, so there is nothing to learn"),
    "an answer to nothing": (chat(said("assistant", "a")), "the first is the assistant's, so it answers nothing"),
    "a role that is none": (chat(said("robot", "a"), said("assistant", "a")), "role 'robot' is none of"),
    "a role that is a list": (chat(said(["user"], "a"), said("assistant", "a")), "role must be a string, got list"),
    "no content": (chat({"role": "user"}), "content is missing"),
    "a control token": (b'{"question": "<|im_end|>", "answer": "a"}', "messages: <|im_end|> is a control token"),
    "nothing left": (
        b'{"question": "' + b"a" * 99 + b'", "answer": "a"}',
        "none of the assistant's tokens lies within",
    ),
    "nine megabytes": (b'{"question": "' + b"a" * 9 * 2**20 + b'", "answer": "a"}', "longer than 8 MiB"),
}
"""Of a file of data: what its second line is, that line, and what is said after `{path}:2: `."""

FILES: dict[str, tuple[str, bytes | None, str]] = {
    "nothing": ("train.jsonl", None, "data.source: {path} can't be read (No such file or directory)"),
    "an empty file": ("train.jsonl", b"", "data.source: {path}: there is no example in it"),
    "a file of blank lines": ("train.jsonl", b"\n \r\n\n", "data.source: {path}: there is no example in it"),
    "too little": ("train.jsonl", GOOD, "data.source: {path} has 1 examples, too few for one batch in 1 epochs"),
    "a path that is too long": ("a" * 300 + ".jsonl", None, "data.source: {path} can't be read (File name too long)"),
    "a hub id that is too long": ("a" * 300, None, "data.source: {path} is no file here"),
}
"""Of a data source: what it is, its name and bytes, and what is said."""


def mark(folder: Path) -> Path:
    """The file that shows that code was run: it lies beside the folder."""
    return folder.parent / "code-was-run"


class Bomb:
    """A pickle of it writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def archive(kind: str, folder: Path) -> bytes:
    """A file that holds something, as its kind has it."""
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("config.json", "{}")
    elif kind == "tar":
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            tar.addfile(tarfile.TarInfo("config.json"))
    elif kind == "npz":
        np.savez(buffer, weights=np.array([Bomb(mark(folder))], dtype=object))
    elif kind == "bin":
        buffer.write(pickle.dumps(Bomb(mark(folder))))
    else:
        buffer.write(b"GGUF\x03\x00\x00\x00" + bytes(100))
    return buffer.getvalue()


ARCHIVES = ("zip", "tar", "npz", "gguf", "bin", "safetensors", "jsonl")

# A model's folder: each function spoils one and returns what must be said of it

Spoil = Callable[[Path], str]


def edit(path: Path, **changes: Any) -> None:
    """Settings in a JSON file; those that are None are removed."""
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def with_header(file: Path, change: Callable[[dict[str, Any]], Any], length: int | None = None) -> None:
    header, data = header_of(file)
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def with_index(model: Path, places: Any) -> Path:
    """Its tensors in one shard, and an index that says `places` (of the names of the tensors) of them."""
    names = list(load_file(model / "model.safetensors"))
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places(names)}))
    return index


def without_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return f"{model}: has neither model.safetensors nor model.safetensors.index.json"


def without_config(model: Path) -> str:
    (model / "config.json").unlink()
    return f"{model / 'config.json'}: missing"


def with_pickled_weights_alone(model: Path) -> str:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(archive("bin", model))
    return f"{model}: only pickled weights (pytorch_model.bin), which are never opened"


def with_a_pickle_under_the_name_of_safetensors(model: Path) -> str:
    (model / "model.safetensors").write_bytes(archive("bin", model))
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def with_a_pickle_in_the_index(model: Path) -> str:
    (model / "pytorch_model.bin").write_bytes(archive("bin", model))
    index = with_index(model, lambda names: dict.fromkeys(names, "pytorch_model.bin"))
    return f"{index}: 'pytorch_model.bin' is no safetensors file, and others are never opened"


def with_an_index_that_leaves_the_folder(model: Path) -> str:
    index = with_index(model, lambda names: dict.fromkeys(names, "../whole/model.safetensors"))
    return f"{index}: '../whole/model.safetensors' is not the name of a file in this folder"


def with_an_index_of_absolute_paths(model: Path) -> str:
    index = with_index(model, lambda names: dict.fromkeys(names, "/etc/passwd"))
    return f"{index}: '/etc/passwd' is not the name of a file in this folder"


def with_an_index_of_numbers(model: Path) -> str:
    index = with_index(model, lambda names: dict.fromkeys(names, 1))
    return f"{index}: weight_map is missing or not a mapping of tensors to files"


def with_an_index_of_what_is_not_there(model: Path) -> str:
    index = with_index(
        model, lambda names: dict.fromkeys([*names, "no.such.tensor"], "model-00001-of-00001.safetensors")
    )
    return f"tensor no.such.tensor is missing; {index.name} says that it is there"


def with_a_damaged_index(model: Path) -> str:
    index = with_index(model, dict.fromkeys)
    index.write_text("[" * 100_000)
    return f"{index}: not readable as JSON"


def without_a_shard(model: Path) -> str:
    with_index(model, lambda names: dict.fromkeys(names, "model-00002-of-00002.safetensors"))
    return f"{model / 'model-00002-of-00002.safetensors'}: this shard is missing"


def with_a_link_to_something_else(model: Path) -> str:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("/etc/passwd")
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def truncated(model: Path) -> str:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return f"{path}: truncated or not a safetensors file"


def with_a_header_longer_than_the_file(model: Path) -> str:
    with_header(model / "model.safetensors", lambda header: None, length=2**40)
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def with_overlapping_tensors(model: Path) -> str:
    with_header(model / "model.safetensors", lambda header: header.update({"one.more": header["model.norm.weight"]}))
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def with_negative_offsets(model: Path) -> str:
    lie = {"dtype": "F32", "shape": [32], "data_offsets": [-128, 0]}
    with_header(model / "model.safetensors", lambda header: header.update({"model.norm.weight": lie}))
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def with_weights_of_another_dtype(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    save_file(tensors, model / "model.safetensors")
    return "tensor model.norm.weight is stored as I32; only F32, BF16, F16 can be read"


def without_a_tensor(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    return "tensor model.norm.weight is missing"


def with_a_tensor_too_many(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "lm_head.bias": np.ones(260, np.float32)}, model / "model.safetensors")
    return "tensor lm_head.bias is not part of this model"


def with_a_head_that_is_not_the_embedding(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + np.float32(1)
    save_file({**tensors, "lm_head.weight": head}, model / "model.safetensors")
    return "tensor lm_head.weight is not the embedding, but config.json says tie_word_embeddings"


def with_a_tensor_of_another_shape(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    save_file(tensors, model / "model.safetensors")
    return "tensor model.norm.weight has shape [31]; by config.json it must be [32]"


def config_with(said: str, **changes: Any) -> Spoil:
    """A config.json with these settings; `said` follows its name."""

    def spoil(model: Path) -> str:
        edit(model / "config.json", **changes)
        return f"{model / 'config.json'}: {said}"

    spoil.__name__ = "config_with_" + "_".join(f"{key}_{value!r:.40}" for key, value in changes.items())
    return spoil


def file_with(name: str, content: bytes, said: str) -> Spoil:
    """A file of the folder with this content; `said` may name it as {path}, and the folder as {model}."""

    def spoil(model: Path) -> str:
        (model / name).write_bytes(content)
        return said.format(path=model / name, model=model)

    spoil.__name__ = f"{name}_with_{content[:20]!r}"
    return spoil


def with_the_config_a_pipe(model: Path) -> str:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    return f"{model / 'config.json'}: missing"


MODELS: tuple[Spoil, ...] = (
    without_weights,
    without_config,
    with_pickled_weights_alone,
    with_a_pickle_under_the_name_of_safetensors,
    with_a_pickle_in_the_index,
    with_an_index_that_leaves_the_folder,
    with_an_index_of_absolute_paths,
    with_an_index_of_numbers,
    with_an_index_of_what_is_not_there,
    with_a_damaged_index,
    without_a_shard,
    with_a_link_to_something_else,
    truncated,
    with_a_header_longer_than_the_file,
    with_overlapping_tensors,
    with_negative_offsets,
    with_weights_of_another_dtype,
    without_a_tensor,
    with_a_tensor_too_many,
    with_a_head_that_is_not_the_embedding,
    with_a_tensor_of_another_shape,
    with_the_config_a_pipe,
    file_with("config.json", b"{'hidden_size': 32}", "{path}: not readable as JSON"),
    file_with("config.json", b"[" * 100_000, "{path}: not readable as JSON: maximum recursion depth"),
    file_with("config.json", b"\xff\xfe{}", "{path}: not readable as JSON: 'utf-8' codec can't decode"),
    file_with("config.json", b"[]", "{path}: expected a JSON object"),
    config_with("model_type is 'llama'; this model supports only 'qwen2'", model_type="llama"),
    config_with("hidden_size is missing", hidden_size=None),
    config_with("hidden_size must be a positive whole number up to 2147483647, not '32'", hidden_size="32"),
    config_with("hidden_size must be a positive whole number up to 2147483647, not -32", hidden_size=-32),
    config_with("num_attention_heads must be a positive whole number", num_attention_heads=0),
    config_with("hidden_size 32 is not divisible by num_attention_heads (5)", num_attention_heads=5, head_dim=None),
    config_with("num_hidden_layers must be a positive whole number up to 10000", num_hidden_layers=10**9),
    config_with("rope_scaling is {'type': 'yarn', 'factor': 4.0}", rope_scaling={"type": "yarn", "factor": 4.0}),
    config_with("rope_parameters must be a mapping", rope_parameters=[1]),
    config_with("rms_norm_eps must be a positive number", rms_norm_eps=float("nan")),
    config_with("layer_types must be a list, not 5", layer_types=5),
    config_with("tie_word_embeddings must be true or false, not 'yes'", tie_word_embeddings="yes"),
    config_with("quantization_config is {'bits': 4}", quantization_config={"bits": 4}),
    config_with("use_sliding_window is True", use_sliding_window=True),
)


# The tokenizer and the chat template in a model's folder


def template(text: str) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        (model / "chat_template.jinja").write_text(text.replace("{mark}", str(mark(model))))

    return spoil


def tokenizer(**changes: Any) -> Callable[[Path], None]:
    return lambda model: edit(model / "tokenizer.json", **changes)


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda model: (model / name).write_text(text) and None


def no_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def no_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


def code_in_place_of_a_tokenizer(model: Path) -> None:
    """A folder that asks for its own code, as those do that want trust_remote_code."""
    no_tokenizer(model)
    (model / "vocab.json").write_text("{}")
    (model / "merges.txt").write_text("")
    (model / "evil.py").write_text(f"open({str(mark(model))!r}, 'w')\nclass Evil: pass\n")
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": auto_map}))
    edit(model / "config.json", auto_map=auto_map)


BROKEN = "model.tokenizer: none can be read from {model} ("
REFUSES = "messages: the tokenizer's chat template refuses them: "
TOKENIZERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "none": (no_tokenizer, BROKEN + "it has no file of one"),
    "code of the folder's own": (code_in_place_of_a_tokenizer, BROKEN),
    "half a file": (written("tokenizer.json", '{"version": "1.0", "model": {'), BROKEN),
    "nesting without end": (written("tokenizer.json", "[" * 100_000), BROKEN),
    "an unknown kind": (tokenizer(model={"type": "Evil"}), BROKEN),
    "a character map that is damaged": (
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        BROKEN + "Precompiled: Error",
    ),
    "an expression that is damaged": (
        tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        BROKEN,
    ),
    "a vocabulary of nothing": (
        tokenizer(model={"type": "BPE", "vocab": {}, "merges": []}),
        "model.tokenizer: it can't write user: its vocabulary is damaged",
    ),
    "more tokens than the model": (
        written("tokenizer_config.json", '{"eos_token": "<|one more|>"}'),
        "model.tokenizer: its token '<|one more|>' has id 260, but the embedding has 260 rows",
    ),
    "settings that are a list": (written("tokenizer_config.json", "[]"), BROKEN),
    "an end that is a number": (written("tokenizer_config.json", '{"eos_token": 5}'), BROKEN),
    "no template": (no_template, "model.tokenizer: it has no chat template"),
    "a template that is damaged": (template("{% for"), REFUSES + "unexpected 'end of template'"),
    "a template that refuses": (template("{{ raise_exception('only tools') }}"), REFUSES + "only tools"),
    "a template that fails": (template("{{ 1 / 0 }}"), REFUSES + "division by zero"),
    "a template that calls itself": (template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), REFUSES + "maximum"),
    "a template that never ends": (
        template("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"),
        "model.tokenizer: its chat template took longer than 0.1 s",
    ),
    "a template of a huge power": (template("{{ 9**9**9**9 }}"), "model.tokenizer: its chat template takes a power"),
    "a template of two megabytes": (template("x" * 2**21), "model.tokenizer: its chat template is no text of up to"),
    "a template that reads files": (
        template("{% include '/etc/passwd' %}"),
        REFUSES + "no loader for this environment",
    ),
    "a template that wants out": (
        template("{{ cycler.__init__.__globals__.os.system('touch {mark}') }}"),
        REFUSES + "access to attribute '__init__' of 'type' object is unsafe",
    ),
    "a template that wants out by a filter": (
        template("{{ (''|attr('__class__')).__mro__[1].__subclasses__() }}"),
        REFUSES + "",
    ),
    "an end of sequence that is none": (
        written("generation_config.json", '{"eos_token_id": -1}'),
        "{model}/generation_config.json: eos_token_id: -1 is no id of the tokenizer",
    ),
}
"""Of a folder that is whole but for this; and what is said."""


# Command lines of the tools, in a folder with `run`, whose checkpoints hold nothing, and `damaged`, whose files are

TOOLS: tuple[tuple[str, str, str], ...] = (
    ("export", "", "the following arguments are required: RUN"),
    ("export", "nowhere", "nowhere: no config.yaml; give a run_dir"),
    ("export", "run/config.yaml", "run/config.yaml: no config.yaml; give a run_dir"),
    ("export", f"{'a' * 300}", "no config.yaml; give a run_dir"),
    ("export", "run --step x", "argument --step: invalid int value: 'x'"),
    ("export", "run --dtype float8", "argument --dtype: invalid choice: 'float8'"),
    ("export", "run", "run/checkpoints: no checkpoint"),
    ("export", "damaged", "damaged/config.yaml: not readable as YAML"),
    ("plot", "", "the following arguments are required: RUN"),
    ("plot", "nowhere", "nowhere: no metrics.jsonl with a line in it; give a run_dir"),
    ("plot", f"{'a' * 300}", "no metrics.jsonl with a line in it; give a run_dir"),
    ("plot", "run run/config.yaml", "run/config.yaml: no metrics.jsonl with a line in it"),
    ("plot", "damaged", "damaged/metrics.jsonl: damaged: a line is no record of a step"),
    ("plot", "run --out run/checkpoints", "--out: run/checkpoints can't be written"),
    ("plot", "run --out run/metrics.jsonl/a.png", "--out: run/metrics.jsonl/a.png can't be written"),
    ("plot", "run --out curves.exe", "--out: curves.exe can't be written"),
    ("memory", "", "the following arguments are required: --config"),
    ("memory", "--config nowhere", "--config nowhere: no such file, here or in configs/"),
    ("memory", "--config damaged/config.yaml", "damaged/config.yaml: not readable as YAML"),
    ("memory", "--config tiny_sft steps=x", "steps: Input should be a valid integer"),
    ("memory", "--config tiny_sft --micro-batches 0", "--micro-batches: 0: expected 1 or more"),
    ("memory", "--config tiny_sft --micro-batches x", "argument --micro-batches: invalid int value: 'x'"),
    ("memory", "--config tiny_sft --measure --target v6e", "--measure: is for the devices at hand"),
    ("memory", "--config tiny_sft --target v9", "--target: target 'v9'"),
    ("memory", "--config tiny_sft --out run/config.yaml/x", "--out: run/config.yaml/x can't be written"),
    ("memory", "--config tiny_sft --out .", "--out: . names no file"),
    ("gradcheck", "", "--shape: give N,D,V, or a --config"),
    ("gradcheck", "--sahpe 1,2,3", "unrecognized arguments: --sahpe 1,2,3"),
    ("gradcheck", "--shape 1,2", "--shape: shape: expected N,D,V: three whole numbers"),
    ("gradcheck", "--shape 2147483648,1,1", "--shape: shape.0: Input should be less than 2147483648"),
    ("gradcheck", "--shape 2147483647,2147483647,2147483647", "--shape: too large for this machine"),
    ("gradcheck", "--shape 8,8,8 --temperature .nan", "--temperature: temperature=.nan: the value is not readable"),
    ("gradcheck", "--shape 8,8,8 --json run", "--json: run is a folder; give a file"),
    ("gradcheck", "--config damaged/config.yaml", "damaged/config.yaml: not readable as YAML"),
    ("gradcheck", "--config tiny_sft", "algorithm: unknown setting"),
    ("bench", "--shape 1,2", "argument --shape: '1,2' is not N,D,V: three whole numbers"),
    ("bench", "--shape 1,0,2", "argument --shape: '1,0,2' has a size below 1"),
    ("bench", "--shape 9999999999,1,1", "has a size that is no index of 32 bits"),
    ("bench", "--repeats 0", "--repeats: 0 rounds give no time"),
    ("bench", "--seed -1", "--seed: -1 is not from 0"),
    ("bench", "--json nowhere/figures.json", "--json: there is no folder nowhere"),
    ("bench", "--json run", "--json: run is a folder; give a file"),
    ("bench", "--target v9", "argument --target: invalid choice: 'v9'"),
    ("tune", "", "--target: there is no TPU here; name one to compile for"),
    ("tune", f"--shape 1,1,{'9' * 5000}", "is not N,D,V: three whole numbers from 1"),
    ("tune", "--shape １,１,１", "is not N,D,V: three whole numbers from 1"),
    ("tune", "--dtype int8", "--dtype: 'int8' is not bfloat16 or float32"),
    ("tune", "--kernel none", "--kernel: there is no 'none'"),
    ("tune", "--most 0", "--most: 0 tilings are none"),
    ("tune", "--target v6e --table damaged/metrics.jsonl", "--table: damaged/metrics.jsonl is not JSON"),
    ("tune", "--target v6e --table run", "--table: run can't be read"),
    ("tune", "--target v6e --table run/tiles.json", "--table: run/tiles.json holds no list of tilings"),
    ("fuzz", "--seconds 0", "--seconds: 0: expected a number above 0"),
    ("fuzz", "--seconds soon", "argument --seconds: invalid float value: 'soon'"),
    ("fuzz", "--target everything", "--target: there is no 'everything'; there are yaml"),
)
"""The tool, its arguments, and what is said."""
