"""tools/generate.py: a run and its export complete the same prompts, as the engine does; and what it refuses."""

import io
import json

import pytest
from flax import nnx
from runs import run
from tiny import ARCHITECTURE, config

from tools import export, generate

PROMPTS = [
    {"question": "1+2="},
    {"messages": [{"role": "user", "content": "7+7="}, {"role": "assistant", "content": "14"}]},
    {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, with an export."""
    folder = tmp_path_factory.mktemp("generate") / "run"
    spread = {"architecture": {**ARCHITECTURE, "initializer_range": 0.3}}  # else every completion is empty
    settings = {
        "model": spread,
        "optimizer": {"learning_rate": 1e-6},
        "task": {"system_prompt": "Sum."},
        "rollout": {"stop": ["~"]},
    }
    assert run(config("sft", run_dir=str(folder), steps=1, **settings)) == 0
    assert export.main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


def lines(model, prompts, out, *options):
    """What the tool writes for a file of prompts."""
    given = [str(model), "--prompts", str(prompts), "--out", str(out), "--max-tokens", "8", *options]
    assert generate.main(given) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_run_and_its_export_complete_a_file_of_prompts_alike(trained, prompts, tmp_path, capsys):
    of_run = lines(trained, prompts, tmp_path / "run.jsonl")
    said = capsys.readouterr().err
    of_export = lines(trained / "export", prompts, tmp_path / "export.jsonl", "--system", "Sum.", "--dtype", "float32")
    assert of_run == of_export
    assert [line["messages"][0]["content"] for line in of_run] == ["Sum.", "Sum.", "Add."]
    assert [line["messages"][-1] for line in of_run][1] == {"role": "user", "content": "7+7="}
    assert all(line["tokens"] == 8 or line["finished"] for line in of_run)
    assert all(line["completion"] for line in of_run)
    assert f"3 of 3 done, {sum(line['tokens'] for line in of_run)} tokens" in said


def test_one_prompt_is_printed_and_the_seed_chooses_what_is_sampled(trained, capsys):
    def printed(*options):
        assert generate.main([str(trained), "1+2=", "--max-tokens", "8", *options]) == 0
        return capsys.readouterr().out

    assert printed() == printed()
    hot = ("--temperature", "1")
    assert printed(*hot) == printed(*hot) != printed(*hot, "--seed", "1")


def test_another_dtype_changes_nothing_else_of_a_run_s_model(trained):
    own, other = (
        generate.load(generate.parse([str(trained), "hi", *dtype])) for dtype in ([], ["--dtype", "bfloat16"])
    )
    assert own[0].stop_ids == other[0].stop_ids
    assert own[0].tokenizer.convert_tokens_to_ids("~") in other[0].stop_ids
    assert own[2] == other[2] == "Sum."
    models = [nnx.merge(policy.graphdef, policy.params) for policy in (own[0], other[0])]
    assert [(model.dtype, model.residual_dtype) for model in models] == [
        ("float32", "float32"),
        ("bfloat16", "float32"),
    ]


def test_a_chat_goes_on_until_an_empty_line_begins_a_new_one_and_the_input_ends(trained, monkeypatch, capsys):
    asked, complete = [], generate.Generator.complete

    def recorded(self, chats, step):
        asked.extend(chats)
        return complete(self, chats, step)

    monkeypatch.setattr(generate.Generator, "complete", recorded)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+2=\nand now?\n\n1+2=\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert generate.main([str(trained), "--max-tokens", "8"]) == 0
    roles = [[message["role"] for message in chat] for chat in asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert asked[1][2]["content"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "error: PROMPT: give a prompt, or --prompts FILE, or start a chat on a terminal"),
        (["hi", "--max-tokens", "0"], "error: --max-tokens: 0: expected 1 or more"),
        (["hi", "--max-tokens", "50000"], "error: --max-tokens: 50000 after a prompt of"),
        (["hi", "--top-p", "0"], "error: --top-p: 0.0: expected more than 0, and 1 at most"),
        (["hi", "--prompts", "p.jsonl"], "error: --prompts: is instead of PROMPT: give one of them"),
        (["hi", "--out", "o.jsonl"], "error: --out: is for --prompts; other completions are printed"),
        (["--prompts", "missing.jsonl"], "error: --prompts: missing.jsonl can't be read"),
    ],
)
def test_what_can_t_be_done_is_one_line(trained, options, message, capsys):
    assert generate.main([str(trained), *options]) == 2
    output, said = capsys.readouterr()
    assert said.splitlines()[-1].startswith(message)
    assert output == ""


def test_an_earlier_output_is_not_overwritten(trained, prompts, tmp_path, capsys):
    (tmp_path / "out.jsonl").write_text("precious")
    assert generate.main([str(trained), "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    assert "exists, and would be overwritten" in capsys.readouterr().err
