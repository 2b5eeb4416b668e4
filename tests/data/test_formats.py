"""Records of every format become the tokens that its field means by them, from files of every kind."""

import codecs
import gzip
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from mllm.config.data import DataConfig
from mllm.config.task import TaskConfig
from mllm.data import records
from mllm.data.cache import cached_documents
from mllm.data.formats import text, tools_of, turns
from mllm.data.records import Origin, bad_lines, read_records, sound_records
from mllm.data.tasks.load import load
from mllm.data.tokenizing import encode_record
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer

BYTES = bytes_tokenizer()
NAMES = {256: "<eot>", 257: "(", 258: ")"}
SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALLS_ADD = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
MARKED = bytes_tokenizer()
MARKED.chat_template = (
    "{% for m in messages %}<|im_start|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""Its template marks what is learned."""
ENDLESS = bytes_tokenizer()
ENDLESS.eos_token = None


def marked(record: dict[str, Any], tokenizer: Any = BYTES, rule: Any = "auto") -> str:
    """The record's text. Learned tokens are in capitals or in brackets of their own kind."""
    ids, learned, _ = encode_record(Renderer(tokenizer, rule), record)
    names = [NAMES.get(token, chr(token)) for token in ids]
    return "".join(n.upper().translate({40: 91, 41: 93}) if y else n for n, y in zip(names, learned, strict=True))


@pytest.mark.parametrize(
    ("rule", "record", "expected"),
    [
        ("auto", {"messages": SAID * 2}, "(a)(B](a)(B]"),
        ("auto", {"conversations": [{"from": "system", "value": "s"}, *SAID]}, "(s)(a)(B]"),
        ("auto", {"prompt": [*SAID, SAID[0]], "completion": SAID[1:]}, "(a)(b)(a)(B]"),
        ("auto", {"prompt": SAID[:1], "completion": SAID}, "(a)(B]"),
        ("auto", {"messages": SAID, "prompt": "x", "text": "y"}, "(a)(B]"),
        ("always", {"prompt": "a", "completion": "b"}, "(a)(B]"),
        ("never", {"messages": SAID}, "aB]"),
        ("never", {"question": "a", "answer": "b"}, "aB]"),
        ("never", {"prompt": SAID[:1], "completion": SAID[1:]}, "aB]"),
        ("never", {"text": "a"}, "A]"),
    ],
)
def test_the_expected_parts_of_chats_and_texts_are_learned(rule: str, record: dict[str, Any], expected: str) -> None:
    assert marked(record, BYTES, rule) == marked(record, MARKED, rule) == expected


def test_the_documentation_s_file_has_a_line_of_each_format() -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / "formats.jsonl"
    marks = [marked(record) for _, record in Origin("data.source", str(path)).records()]
    assert marks == ["(Add.)(3+4=)(7]", "(3+5=)(8]", "(3+6=)(9]", "(3+7=)(10]", "3+8=11]", "3+9=12]"]


@pytest.mark.parametrize(
    ("rule", "record", "message"),
    [
        ("always", {"text": "a"}, "text has no turns, which chat_template: always renders"),
        ("auto", {"text": "a"}, "model.tokenizer: it names no end of sequence"),
        ("never", {"messages": [SAID[0], CALLS_ADD]}, "only one of the user, and its answer"),
        ("auto", {"messages": [{**SAID[0], "content": None}, SAID[1]]}, "content must be a string"),
        ("auto", {"messages": [SAID[0], {**CALLS_ADD, "tool_calls": [{"name": "<|im_end|>"}]}]}, "is a control token"),
    ],
)
def test_a_record_that_a_rule_can_not_render_is_an_error(rule: str, record: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        marked(record, ENDLESS if "no end" in message else BYTES, rule)


def test_each_line_and_row_is_read_once_with_its_number(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(records, "PARQUET_ROWS", 3)
    rng = Random(0)
    rows = [{"n": "x" * rng.choice([0, 2, 7, 8, 9, 40])} for _ in range(200)]  # {"n": ""} and its end are 10 bytes
    blank = ["", "", "\r", "\n", "\n \t", "\n" * 20]
    lines = "\n".join(json.dumps(row) + rng.choice(blank) for row in rows)
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl", "d.parquet", "e.parquet")]
    files[0].write_text(f"\ufeff{lines}\n", newline="")
    files[1].write_bytes(gzip.compress(lines.encode()))
    files[2].write_text("")
    for file, size in zip(files[3:], (20, 2), strict=True):
        pa.parquet.write_table(pa.Table.from_pylist([{**row, "null": None} for row in rows]), file, row_group_size=size)
    numbered = [(number, json.loads(line)) for number, line in enumerate(lines.split("\n"), start=1) if line.strip()]
    expected = [(f"{path}:{number}", row) for path in files[:2] for number, row in numbered]
    expected += [(f"{path}:{number}", row) for path in files[3:] for number, row in enumerate(rows, start=1)]
    assert [*Origin("data.source", f"{tmp_path}/*").records()] == expected


def test_bad_lines_are_one_error_with_causes_and_places(tmp_path: Path) -> None:
    """The error comes after the good lines were read."""
    path = tmp_path / "train.jsonl"
    path.write_text('{"answer": "1"}\n' + '{"solution": "2", "level": 1}\n' * 3 + '{"answer": 1}\n{\n{"answer": 2}\n')
    answers = read_records(Origin("task.train", str(path)).records(), lambda r: text(r, "answer"))
    read = sound_records(answers, "task.train")
    assert next(read) == (f"{path}:1", "1")
    faults = f"answer is missing ({path}:2, 3, 4)", f"answer must be a string, got int ({path}:5, 7)"
    parsing = f"not JSON: Expecting property name enclosed in double quotes, at character 3 ({path}:6)"
    with pytest.raises(UserError) as error:
        next(read)
    assert str(error.value) == f"task.train: {'; '.join([*faults, parsing])}; the fields there are solution, level"


def test_very_many_bad_lines_and_faults_are_counted() -> None:
    bad = [(f"a:{number}", UserError(f"fault {number % 7}")) for number in range(7 * 60)]
    message = str(bad_lines(bad, "data.source"))
    assert message.startswith("data.source: fault 0 (a:0, 7, 14, ")
    assert message.count("and 20 more)") == 5
    assert message.endswith("; and 2 other faults")


def test_a_csv_file_has_texts_named_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_bytes('\ufeffquestion,answer\r\n"1,5 +\n1 = ""?""","2,5"\r\n\r\nä,3\n4\n'.encode())
    assert [*Origin("task.train", str(path)).records()] == [
        (f"{path}:2", {"question": '1,5 +\n1 = "?"', "answer": "2,5"}),
        (f"{path}:4", {"question": "ä", "answer": "3"}),
        (f"{path}:5", {"question": "4"}),
    ]


def test_a_missing_package_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r": a.parquet .*\[hub\]"):
        next(records.read_parquet(Path("a.parquet"), "--prompts"))
    with pytest.raises(UserError, match=r"task.path: openai/gsm8k; a hub id .*\.\[hub\]"):
        load(TaskConfig(name="gsm8k"))


def test_a_record_of_too_many_levels_is_a_bad_line(tmp_path: Path) -> None:
    message = json.dumps(SAID[1])[:-1] + ', "thoughts": ' + 5000 * "[" + 5000 * "]" + "}"
    path = tmp_path / "deep.jsonl"
    path.write_text(f'{{"messages": [{json.dumps(SAID[0])}, {message}]}}\n')
    with pytest.raises(UserError, match=r"task.train: not JSON .* \(.*deep.jsonl:1\)"):
        load(TaskConfig(name="jsonl", train=str(path)))


def test_a_field_can_exclude_an_assistant_message() -> None:
    for unlearned in ({"weight": 0}, {"train": False}, {"weight": 1, "train": 0}):
        chat = [SAID[0], SAID[1] | unlearned, SAID[0], SAID[1] | {"weight": 1}]
        assert marked({"messages": chat}) == marked({"messages": chat}, MARKED) == "(a)(b)(a)(B]"
        with pytest.raises(UserError, match="no message is the assistant's and learned"):
            marked({"messages": chat[:2]})
    with pytest.raises(UserError, match=r"weight is 0.5: give true or false, 1 or 0"):
        marked({"messages": [SAID[0], SAID[1] | {"weight": 0.5}]})


def test_falsy_message_fields_reach_the_template() -> None:
    (message,) = turns({"messages": [SAID[0] | {"a": 0, "b": False, "c": "", "d": [], "e": None}]}, "messages")
    assert message == SAID[0] | {"a": 0, "b": False, "c": "", "d": []}


def test_nulls_of_arrow_are_left_out_at_any_level(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a", "calls": [{"x": 1}, {"y": 2}]}, {"role": "user", "name": "b"}]
    rows = [{"messages": messages, "text": "c"}, {"messages": []}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), path := tmp_path / "a.parquet")
    assert [row for _, row in Origin("data.source", str(path)).records()] == rows


# Calls of tools, and tools, reach the template as they were meant, in any form of a record

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"x": 1, "y": {"z": "10001"}}


def tokenizer(tools: str = "{{ tools | tojson if tools }}") -> Any:
    byte_tokenizer = bytes_tokenizer()
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    byte_tokenizer.chat_template = (
        f"{tools}{{% for m in messages %}}<|im_start|>{{{{ m.content }}}}{calls}<|im_end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    return byte_tokenizer


def chat(call: Any) -> list[dict[str, Any]]:
    called = {"role": "assistant", "content": None, "tool_calls": call}
    return [SAID[0], called, {"role": "tool", "content": "7"}, SAID[1]]


def call(arguments: Any, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments, **others}, **others}


def test_a_call_in_any_form_is_learned_as_its_object() -> None:
    renderer = Renderer(tokenizer())
    ids, learned, _ = encode_record(renderer, {"messages": chat([call(ARGUMENTS)])})
    text = bytes(token for token, is_learned in zip(ids, learned, strict=True) if is_learned and token < 256).decode()
    assert text == f"add{json.dumps(ARGUMENTS)}b"
    texts = [call(json.dumps(ARGUMENTS))], json.dumps([call(ARGUMENTS)]), [json.dumps(call(ARGUMENTS))]
    for calls in texts:
        assert encode_record(renderer, {"messages": chat(calls)})[:2] == (ids, learned)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([call("[1]")], "arguments must be an object"),
        ([call("{")], "tool_calls: arguments is no JSON"),
        ([call('{"x": 1e999}')], "tool_calls: arguments is no JSON"),
        ([call({"x": float("nan")})], "tool_calls is no JSON"),
        ([{"type": "function"}], "must have a function with name"),
        ([7], "must be a list of objects"),
        (0, "must be a list of objects"),
        ([call(False)], "arguments must be an object"),
    ],
)
def test_a_malformed_call_is_an_error(calls: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        turns({"messages": chat(calls)}, "messages")


def test_empty_calls_are_dropped_and_null_arguments_kept() -> None:
    for calls in ("[]", "null", "", [], None):
        turn = {"role": "assistant", "content": "b", "tool_calls": calls}
        assert turns({"messages": [turn]}, "messages") == [{"role": "assistant", "content": "b"}]
        assert tools_of({"tools": calls}) == []
    for arguments in ('{"x": null}', {"x": None}):
        (_, message, *_) = turns({"messages": chat([call(arguments)])}, "messages")
        assert message["tool_calls"][0]["function"]["arguments"] == {"x": None}


def test_calls_and_tool_answers_may_have_no_content() -> None:
    messages = chat([call(ARGUMENTS)])
    del messages[1]["content"], messages[2]["content"]
    assert [message["content"] for message in turns({"messages": messages}, "messages")] == ["a", "", "", "b"]
    with pytest.raises(UserError, match="content must be a string, got int"):
        turns({"messages": [*messages, {"role": "tool", "content": 0}]}, "messages")


def test_tools_may_be_a_text_and_are_never_left_out_in_silence() -> None:
    parameters = json.dumps(TOOL["function"]["parameters"])
    in_text = {**TOOL, "function": {**TOOL["function"], "parameters": parameters}}
    for tools in (json.dumps([TOOL]), [json.dumps(TOOL)], [in_text]):
        assert tools_of({"tools": tools}) == [TOOL]
    record = {"messages": chat([call(ARGUMENTS)]), "tools": [TOOL]}
    assert encode_record(Renderer(tokenizer()), record)[0][:9] == [*b'[{"type":']
    silent = Renderer(tokenizer(tools=""))
    with pytest.raises(UserError, match="tools: the tokenizer's chat template leaves them out"):
        encode_record(silent, record)
    with pytest.raises(UserError, match="tools: texts have no chat template"):
        encode_record(silent, {"text": "a", "tools": [TOOL]})


ALPACA = {"question": "instruction", "input": "input", "answer": "output"}


def documents(tmp_path, name, *rows, **settings):
    path = tmp_path / name
    path.write_text(json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(source=str(path), max_length=64, cache=str(tmp_path / "cache"), **settings)
    learned = cached_documents(Origin("data.source", str(path)), config, Renderer(BYTES, "never"))
    return [bytes(one.tokens.tolist()[:-1]).decode() for one in learned.read(range(len(learned)))]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_columns_map_fields_and_input_follows_the_question(tmp_path, name):
    first, second = ("Add.", "1, 2", "3"), ("Say hi.", "", "hi")
    rows = [dict(zip(("instruction", "input", "output"), row, strict=True)) for row in (first, second)]
    assert documents(tmp_path, name, *rows, columns=ALPACA) == ["Add.\n\n1, 23", "Say hi.hi"]
    with pytest.raises(UserError, match=r"instruction is missing, which data.columns.question names"):
        documents(tmp_path, name, rows[0], {"output": "3"}, columns=ALPACA)
    with pytest.raises(UserError, match=r"data.columns says what they are called .*the fields there are instruction, "):
        documents(tmp_path, name, *rows)
    with pytest.raises(UserError, match=r"answer must be a string, got int .*the fields there are instruction, output"):
        documents(tmp_path, name, {"instruction": "1+1=", "output": 2}, columns=ALPACA)


@pytest.mark.parametrize("columns", [{"prompt": "question", "completion": "cot"}, {"text": "cot"}, {"answer": "cot"}])
def test_only_the_fields_that_columns_name_are_learned(tmp_path, columns):
    row = {"messages": SAID, "question": "1+1=", "answer": "2", "cot": "1+1 is 2", "text": "no", "prompt": "no"}
    row = row if "answer" not in columns else {"question": "1+1=", "answer": "no", "cot": "1+1 is 2"}
    learned = documents(tmp_path, "rows.jsonl", row, columns=columns)
    assert learned == ["1+1 is 2" if "text" in columns else "1+1=1+1 is 2"]


def test_a_json_file_may_hold_json_lines_and_nothing_else(tmp_path):
    path = tmp_path / "rows.json"
    origin = Origin("data.source", str(path))
    path.write_text('\n{"text": "a"}\n{"text": "b"}\n')
    assert list(origin.records()) == [(f"{path}:2", {"text": "a"}), (f"{path}:3", {"text": "b"})]
    path.write_bytes(codecs.BOM_UTF8 + b'\n[{"text":\n"a"}, {}]')
    assert [record for _, record in origin.records()] == [{"text": "a"}, {}]
    for content, fault in (
        ('{\n"text": "a"}', r"not JSON: .*rows.json:1"),
        ("[1]", r"expected a JSON object, got int .*rows.json"),
        ("\n\n[{}\n1", r".*rows.json can't be read \(Expecting ',' delimiter: line 4 "),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=rf"data\.source: {fault}"):
            [*records.sound_records(origin.records(), "data.source")]
    path.write_text("\n")
    assert list(origin.records()) == []
