"""Texts that are refused, with the message: configurations, settings, lines of data, command lines of the tools.

`{path}` is the file with the text; `{mark}` is a file that only code in the text would write.
"""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"

NOT_READ, NO_NUMBER = "anchors, aliases and tags are not read", "is no number that settings take"
CONFIGS: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "{path}: expected a mapping of settings at the top level"),
    "a list": (b"- steps\n", "{path}: expected a mapping of settings at the top level"),
    "no YAML": (b"steps: [\n", "{path}: not readable as YAML: "),
    "no UTF-8": (b"run_dir: \xff\xfe\n", "{path}: not readable as YAML: 'utf-8' codec can't decode"),
    "a NUL byte": (b"run_dir: a\x00b\n", "{path}: not readable as YAML: unacceptable character #x0000"),
    "a NUL by its escape": (b'run_dir: "a\\0b"\n', "{path}: not readable as YAML: line 1: no text may hold '\\x00'"),
    "half a surrogate pair": (b'run_dir: "\\ud800"\n', "line 1: no text may hold '\\ud800'"),
    "aliases that explode": (BOMB.encode(), f"line 1: {NOT_READ}"),
    "an alias of nothing": (b"steps: *a\n", f"line 1: {NOT_READ}"),
    "a merge": (b"<<: {steps: 4}\n", "line 1: << is no name of a setting"),
    "a tag that makes Python objects": (
        b"run_dir: !!python/object/apply:os.system ['touch {mark}']\n",
        f"line 1: {NOT_READ}",
    ),
    "a tag of YAML's own": (b"run_dir: !!bool maybe\n", f"line 1: {NOT_READ}"),
    "a key that stands twice": (b"steps: 4\nseed: 1\nsteps: 5\n", "line 3: steps stands twice"),
    "a key that is a number": (b"steps: 4\n7: 5\n", "line 2: 7 is no name of a setting"),
    "a key that is a list": (b"? [a]\n: 5\n", "line 1: a sequence is no name of a setting"),
    "two documents": (b"steps: 4\n---\nsteps: 5\n", "{path}: not readable as YAML: expected a single document"),
    "deep nesting": (b"model: " + b"[" * 2**19, "line 1: more than 20 levels"),
    "a number of ten thousand digits": (b"steps: 0x" + b"f" * 10_000, f"line 1: 0x{'f' * 38} {NO_NUMBER}"),
    "NaN": (b"steps: .nan\n", f"line 1: .nan {NO_NUMBER}"),
    "a megabyte": (b"# " + b"x" * 2**20, "{path}: larger than 1 MiB, so it is no configuration"),
}
"""Files for `train.py --config`: what the file is, its bytes, and the message."""

OVERRIDES: dict[str, str] = {
    # not key=value
    "steps": "steps: expected key.sub=value",
    "steps.x=1": "steps.x=1: steps is a value, not a section",
    "steps=[": "steps=[: the value is not readable as YAML",
    # unknown, of the wrong type, out of bounds
    "rollout=3": "rollout: expected a section of settings, got 3",
    "steps=many": "steps: Input should be a valid integer",
    "steps='9999999999999999999999'": "steps: the number is too large: at most 2147483647",
    "task.name=chess": "task.name: there is no task chess: give arithmetic, gsm8k",
    "task={name: jsonl, train: a.jsonl, columns: {promt: a}}": "task.columns.promt: unknown setting; did you",
    # what contradicts the machine or the data
    "mesh.tp=16": "mesh: dp * fsdp * tp = 16, but there are 8 devices: set mesh.tp=8",
    "mesh.tp=8": "mesh.tp: 8 does not divide the model's num_attention_heads of 4",
    "rollout.max_prompt_length=3": "rollout.max_prompt_length: all of the 84 training prompts of task arithmetic are",
    "rollout.stop=['two tokens']": "rollout.stop: 'two tokens' is 10 tokens",
    "task.heldout=60": "task.heldout: 60 of arithmetic's 100 problems",
    "task.system_prompt='<|im_end|>'": "arithmetic[0]: messages: <|im_end|> is a control token",
    "eval={test: true}": "eval.test: task arithmetic has no test set",
    "task.rewards=[{name: exact}]": "task.rewards: there is no reward exact:",
    "task={name: gsm8k, path: nowhere}": "task.path: nowhere/train.jsonl can't be read",
    "task={name: jsonl, train: nowhere-*.jsonl}": "task.train: no file matches nowhere-*.jsonl",
    "task={name: hub}": "task.id: task hub needs the id of a data set",
    "task={name: 'no_such_module:f'}": "task.name: no_such_module:f can't be used: ModuleNotFoundError",
    # the model by its sizes
    "model.architecture.vocab_size=128": "model.tokenizer: its token '<|pad|>' has id 259",
    "model.architecture.hiden_size=8": "model.architecture: hiden_size is unknown; did you mean hidden_size?",
    "model.architecture={hidden_size: 1000000000, num_attention_heads: 4, vocab_size: 1000000000, "
    "intermediate_size: 4, num_hidden_layers: 1}": "model.architecture: ",
    # the checkpoint of a run that is the model's source
    "model.step=3": "model.step: is not used with init: random: remove it",
    "model={source: '.', init: pretrained, step: last}": "model.step: 'last' is none of newest, best and the number",
    # adapters
    "model.lora={rank: 2}": "model.lora.alpha: this setting is required, or lora.source",
    "model.lora={rank: 2, alpha: 2, targets: []}": "model.lora.targets: name at least one product, and each once",
    "model.lora={source: nowhere}": "nowhere: no such folder; give a local folder or a hub id",
    "model.lora={source: '.'}": "adapter_config.json: missing; a folder in PEFT's format has it (",
    # files that are none
    "model.tokenizer=nowhere": "model.tokenizer: nowhere: no such folder",
}
"""A setting that spoils a good configuration, and the message."""

GOOD = b'{"question": "1+1=", "answer": "2"}\n'


def chat(*messages: Any) -> bytes:
    return json.dumps({"messages": messages}).encode()


def said(role: Any, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


LINES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{'question': 1}", "not JSON in UTF-8"),
    "no UTF-8": (b'{"question": "\xff", "answer": "2"}', "not JSON in UTF-8"),
    "a number of ten thousand digits": (b'{"question": ' + b"9" * 10_000 + b"}", "not JSON in UTF-8"),
    "deep nesting": (b"[" * 100_000, "not JSON in UTF-8 ("),
    "no object": (b"[1]", "expected a JSON object, got list"),
    "other fields": (b'{"txt": "a"}', "none of messages, conversations, question and answer, prompt and completion"),
    "a conversation without roles": (b'{"conversations": [{"value": "a"}]}', "role is missing"),
    "a tool's turn": (b'{"conversations": [{"from": "tool", "value": "a"}]}', "role 'tool' is none of"),
    "a completion alone": (b'{"completion": "a"}', "prompt is missing"),
    "a control token in a text": (b'{"text": "a<|im_end|>"}', "text: <|im_end|> is a control token: give messages"),
    "no answer": (b'{"question": "a"}', "answer is missing"),
    "an answer that is no text": (b'{"question": "a", "answer": NaN}', "answer must be a string, got float"),
    "half a surrogate pair": (b'{"question": "a", "answer": "\\ud83d"}', "answer holds '\\ud83d', which is half"),
    "no messages": (chat(), "no message is the assistant's, so there is nothing to learn"),
    "an answer to nothing": (chat(said("assistant", "a")), "the first is the assistant's, so it answers nothing"),
    "a role that is none": (chat(said("robot", "a"), said("assistant", "a")), "role 'robot' is none of"),
    "a control token": (b'{"question": "<|im_end|>", "answer": "a"}', "messages: <|im_end|> is a control token"),
    "nothing left": (b'{"question": "' + b"a" * 99 + b'", "answer": "a"}', "none of the tokens to learn lies"),
    "nine megabytes": (b'{"question": "' + b"a" * 9 * 2**20 + b'", "answer": "a"}', "longer than 8 MiB"),
}
"""The second line of a file of data: what it is, its bytes, and the message after `{path}:2: `."""

HALF = gzip.compress(GOOD * 9)[:30]
FILES: dict[str, tuple[str, bytes | Callable[[Path], object] | None, str]] = {
    "nothing": ("train.jsonl", None, "data.source: {path} can't be read (No such file or directory)"),
    "an empty file": ("train.jsonl", b"", "data.source: {path}: there is no example in it"),
    "too little": ("train.jsonl", GOOD, "data.source: {path} has 1 examples, too few for one batch in 1 epochs"),
    "a pattern without files": ("train-*.jsonl", None, "data.source: no file matches {path}: give a file of JSON"),
    "gzip that is none": ("train.jsonl.gz", GOOD, "data.source: {path} can't be read (Not a gzipped file"),
    "half of gzip": ("train.jsonl.gz", HALF, "data.source: {path} can't be read (Compressed file"),
    "parquet that is none": ("train.parquet", GOOD, "data.source: {path} can't be read (Parquet"),
    "a hub id that is too long": ("a" * 300, None, "data.source: {path} is no file here"),
    "a folder": ("data", Path.mkdir, "data.source: {path} is no regular file: give a file of JSON"),
    "a pipe": ("data", os.mkfifo, "data.source: {path} is no regular file"),
}
"""Data sources: what the source is, its name, its bytes or how it is made, and the message."""


# In a folder with `run`, which has no checkpoint, and `damaged`, whose files are damaged

TOOLS: tuple[tuple[str, str, str], ...] = (
    ("export", "nowhere", "nowhere: no config.yaml; give a run_dir"),
    ("export", "run", "run: no checkpoint; there are []"),
    ("export", "run --adapter", "--adapter: run trained the whole model (no model.lora): leave it out"),
    ("export", "run --adapter --dtype float32", "--dtype: adapters are exported as they are trained, in float32"),
    ("export", "damaged", "damaged/config.yaml: not readable as YAML"),
    ("plot", "nowhere", "nowhere: no metrics.jsonl with a line in it; give a run_dir"),
    ("plot", "damaged", "damaged/metrics.jsonl: damaged: a line is no record of a step"),
    ("plot", "run --out run/checkpoints", "--out: run/checkpoints can't be written"),
    ("plot", "run --out curves.exe", "--out: curves.exe can't be written"),
    ("plot", "begun", "begun: metrics.jsonl has nothing to draw yet"),
    ("samples", "damaged", "damaged/samples.jsonl: damaged: line 1: prompt: Field required"),
    ("samples", "run --step 3", "--step: is for --print; the page has filters of its own"),
    ("samples", "run --print --limit 0", "--limit: 0: expected 1 or more"),
    ("generate", "run", "--prompts: is instead of PROMPT: give one of them"),
    ("generate", "run hi --max-tokens 0", "argument --max-tokens: 0 is not a number above 0"),
    ("generate", "run hi --top-p 0", "argument --top-p: 0 is not a number above 0, at most 1"),
    ("generate", "run hi --out o.jsonl", "--out: is for --prompts; other completions are printed"),
    ("generate", "run --prompts missing.jsonl", "--prompts: missing.jsonl can't be read"),
    ("memory", "--config nowhere", "--config nowhere: no such file, here or in configs/"),
    ("memory", "--config tiny_sft --out run/x/y", "--out: run/x/y names no file in a folder that is there"),
    ("bench.head", "--shape 1,0,2", "argument --shape: '1,0,2' has a size that isn't from 1 to 2147483647"),
    ("bench.head", "--live 0", "argument --live: 0 is not a number above 0, at most 1"),
    ("bench.head", "--target v9", "--target: target 'v9': there are v5e"),
    ("bench.head", "--target v6e --live 1", "--live: has no meaning with --target, which times nothing"),
    ("tune", "", "there is no TPU or Hopper GPU here"),
    ("tune", f"--shape 1,1,{'9' * 5000}", "is not N,D,V: three whole numbers"),
    ("replay", "run/skipped/step_1.npz", "run/skipped/step_1.npz: not found"),
    ("replay", "run/config.yaml", "run/config.yaml: not a batch that a run has kept"),
)
"""The tool, its command line, and the message."""
