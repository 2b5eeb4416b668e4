"""tools/samples.py: the page holds the samples and no text in it is obeyed; learned tokens are marked."""

import json
import re
import shutil

import pytest

from tools import samples

HOSTILE = '</script><script>0</script> <!-- <img src=x onerror=alert(2)> \x1b[31m\x07\x00 \u202eabc\u2028 漢字 "\\'


def sample(step, prompt="1+1=", completion="2", reward=1.0, advantage=0.5, truncated=False, turns=()):
    rewards, total = {"exact_match": reward}, None if reward is None else reward / 2
    line = {"step": step, "prompt": prompt, "completion": completion, "rewards": rewards, "reward": total}
    return line | {"advantage": advantage, "length": len(completion), "truncated": truncated, "turns": [*turns]}


def turn(role, content, reward=None, tool_errors=0):
    return {"role": role, "content": content, "reward": reward, "tool_errors": tool_errors}


def write(folder, lines, tail=""):
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines) + tail
    (folder / "samples.jsonl").write_text(text, encoding="utf-8")


def page(folder):
    """The text of a page, and the data in it."""
    text = (folder / "samples.html").read_text(encoding="utf-8")
    return text, json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script', text, re.DOTALL)[1])


def test_hostile_text_stays_text(tmp_path, capsys):
    plain, hostile = tmp_path / "plain", tmp_path / "hostile"
    for folder, text in ((plain, "2"), (hostile, HOSTILE)):
        folder.mkdir()
        write(folder, [sample(1, text, text, None, None, turns=[turn(text, text)])], tail='{"step": 2, "half')
        assert samples.main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{'samples':<18} {hostile}/samples.html (1 completions)"
    text, data = page(hostile)
    hostile_sample = sample(1, HOSTILE, HOSTILE, None, None, turns=[turn(HOSTILE, HOSTILE)])
    assert data == {"run": str(hostile), "left_out": 0, "samples": [hostile_sample]}
    template, _ = page(plain)
    assert text.count("<") == template.count("<")  # no element more
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|https?:|src=|href=", template)


def test_a_page_that_would_be_too_large_holds_the_newest_samples(tmp_path, capsys, monkeypatch):
    lines = [sample(step, f"{step % 50}+{step % 50}=", str(i)) for step in range(1, 201) for i in range(4)]
    write(tmp_path, lines)
    monkeypatch.setattr(samples, "LARGEST", 20_000)
    assert samples.main([str(tmp_path)]) == 0
    _, data = page(tmp_path)
    assert data["samples"] == lines[data["left_out"] :]
    sizes = [len(samples.embedded(line)) for line in lines[::-1]]
    assert sum(sizes[: len(data["samples"])]) <= 20_000 < sum(sizes[: len(data["samples"]) + 1])
    assert f"({len(data['samples'])} completions, {data['left_out']} left out)" in capsys.readouterr().out


POLICY = "model={source: tests/fixtures/tiny_grpo}"
CHAT = "  <|im_start|>7+1+4=<|im_end|><|im_start|>⟦12<|im_end|>⟧"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["docs/examples/sft.yaml"], ["example: 8 tokens, 3 learned", "  4+39=⟦43<|im_end|>⟧"]),
        (["tiny_sft"], ["example: 12 tokens, 3 learned", CHAT]),
        (["tiny_grpo", POLICY], ["prompt: 9 tokens, 0 learned", "  <|im_start|>7+1+4=<|im_end|><|im_start|>"]),
        (["docs/examples/dpo.yaml", POLICY], ["chosen: 12 tokens, 3 learned", CHAT]),
    ],
)
def test_the_first_examples_are_printed_with_marks(arguments, expected, capsys):
    name, *settings = arguments
    assert samples.main(["--config", name, *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(expected)] == expected
    assert len([line for line in lines if " learned" in line]) == (6 if "dpo" in name else 3)


def test_first_examples_are_printed_by_source_and_column(tmp_path, capsys):
    (tmp_path / "alpaca.json").write_text('[{"instruction": "1+1=", "output": "2"}]')
    (tmp_path / "mine.jsonl").write_text('{"question": "2+2=", "answer": "4"}')
    alpaca = f"{{source: {tmp_path}/alpaca.json, columns: {{question: instruction, answer: output}}}}"
    settings = [f"data.source=[{alpaca}, {tmp_path}/mine.jsonl]", "data.epochs=null", "steps=30"]
    assert samples.main(["--config", "docs/examples/sft.yaml", *settings]) == 0
    assert re.findall("⟦.", capsys.readouterr().out) == ["⟦2", "⟦4"]


def test_the_tool_uses_the_prompts_of_the_run(tmp_path, capsys):
    """All problems are trained on without an evaluation, and a model that has learned texts gets texts."""
    shutil.copytree("tests/fixtures/tiny_grpo", model := tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"mllm_learned": "texts"}))
    (tmp_path / "one.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    options = [f"model={{source: {model}}}", f"task={{name: jsonl, train: {tmp_path}/one.jsonl}}", "eval=null"]
    assert samples.main(["--config", "tiny_grpo", *options]) == 0
    assert capsys.readouterr().out.splitlines() == ["prompt: 4 tokens, 0 learned", "  1+1=", ""]


def test_learning_nothing_of_the_first_examples_is_an_error(capsys):
    assert samples.main(["--config", "docs/examples/sft.yaml", "data.max_length=4"]) == 2
    assert capsys.readouterr().err.startswith("error: data.max_length: nothing to learn of the first 100")
