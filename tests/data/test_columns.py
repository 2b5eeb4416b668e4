"""Examples whose fields have other names, and files that hold one list of objects."""

import json

import pytest

from mllm.config.data import DataConfig
from mllm.data.cache import cached_documents
from mllm.data.formats import renamed
from mllm.data.records import Origin
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer

ALPACA = {"question": "instruction", "input": "input", "answer": "output"}
ROWS = [
    {"instruction": "Add.", "input": "1, 2", "output": "3"},
    {"instruction": "Say hi.", "input": "", "output": "hi"},
]
RENDERER = Renderer(bytes_tokenizer(), "never")


def documents(tmp_path, name, rows, **settings):
    path = tmp_path / name
    path.write_text(json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(source=str(path), max_length=64, cache=str(tmp_path / "cache"), **settings)
    found = cached_documents(Origin("data.source", str(path)), config, RENDERER)
    return [bytes(one.tokens.tolist()[:-1]).decode() for one in found.read(range(len(found)))]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_columns_give_fields_their_names_and_an_input_follows_its_question(tmp_path, name):
    assert documents(tmp_path, name, ROWS, columns=ALPACA) == ["Add.\n\n1, 23", "Say hi.hi"]


def test_other_columns_are_other_examples(tmp_path):
    rows = [{"a": "x", "b": "y"}]
    for text in ("a", "b"):
        assert documents(tmp_path, "rows.jsonl", rows, columns={"text": text}) == [rows[0][text]]


def test_a_column_that_is_missing_and_fields_without_columns_are_errors_with_the_way_out(tmp_path):
    with pytest.raises(UserError, match=r"instruction is missing, which data.columns.question names"):
        renamed(ALPACA, {"output": "3"})
    with pytest.raises(UserError, match=r"data.columns says what they are called .*the fields there are instruction, "):
        documents(tmp_path, "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(UserError, match=r"rows.json can't be read"):
        list(Origin("data.source", str(tmp_path / "rows.json")).records())
