"""Tokenizers and chat templates that are refused, in the folder of a model that is whole besides, with the message."""

import json
from pathlib import Path
from typing import Any

from bad_models import Spoil, edit, file, mark


def template(text: str) -> Spoil:
    def spoil(model: Path) -> None:
        (model / "chat_template.jinja").write_text(text.replace("{mark}", str(mark(model))))

    return spoil


def tokenizer(**changes: Any) -> Spoil:
    return lambda model: edit(model / "tokenizer.json", **changes)


def no_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def no_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


def code_in_place_of_a_tokenizer(model: Path) -> None:
    """Make a folder that asks for its own code to be run, as folders do that want trust_remote_code."""
    no_tokenizer(model)
    (model / "vocab.json").write_text("{}")
    (model / "merges.txt").write_text("")
    (model / "evil.py").write_text(f"open({str(mark(model))!r}, 'w')\nclass Evil: pass\n")
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": auto_map}))
    edit(model / "config.json", auto_map=auto_map)


BROKEN = "model.tokenizer: none can be read from {model} ("
REFUSES = "messages: the tokenizer's chat template refuses them: "
CHARACTER_MAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
EXPRESSION = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
TOKENIZERS: dict[str, tuple[Spoil, str]] = {
    "none": (no_tokenizer, BROKEN + "it has no file of one"),
    "its own code": (code_in_place_of_a_tokenizer, BROKEN),
    "half a file": (file("tokenizer.json", b'{"version": "1.0", "model": {'), BROKEN),
    "deep nesting": (file("tokenizer.json", b"[" * 100_000), BROKEN),
    "an unknown kind": (tokenizer(model={"type": "Evil"}), BROKEN),
    "a character map that is damaged": (tokenizer(normalizer=CHARACTER_MAP), BROKEN),
    "an expression that is damaged": (tokenizer(pre_tokenizer=EXPRESSION), BROKEN),
    "an empty vocabulary": (
        tokenizer(model={"type": "BPE", "vocab": {}, "merges": []}),
        "model.tokenizer: it can't write user: its vocabulary is damaged",
    ),
    "more tokens than the model": (
        file("tokenizer_config.json", b'{"eos_token": "<|one more|>"}'),
        "model.tokenizer: its token '<|one more|>' has id 260, but the embedding has 260 rows",
    ),
    "settings that are a list": (file("tokenizer_config.json", b"[]"), BROKEN),
    "an end token that is a number": (file("tokenizer_config.json", b'{"eos_token": 5}'), BROKEN),
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
    "a template that leaves its sandbox": (
        template("{{ cycler.__init__.__globals__.os.system('touch {mark}') }}"),
        REFUSES + "access to attribute '__init__' of 'type' object is unsafe",
    ),
    "an end of sequence that is no token": (
        file("generation_config.json", b'{"eos_token_id": -1}'),
        "{model}/generation_config.json: eos_token_id: -1 is no id of the tokenizer",
    ),
}
"""By what is wrong: how to spoil a whole folder, and the message."""
