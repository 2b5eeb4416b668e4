"""A model is asked in the form that it learned: by later runs, by evaluation, and by the tools."""

import json
from pathlib import Path

import pytest
from runs import ROOT, changed, records, run, write_lines
from tiny import config

import train
from mllm.config.load import load
from mllm.data.tasks.load import load as load_task
from mllm.run.build import Run
from tools import export, generate

ANSWERS = {"3+4=": "7", "1+2=": "3", "5+3=": "8"}
TEXTS = [{"prompt": prompt, "completion": answer} for prompt, answer in ANSWERS.items()]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A run that has learned texts by heart, and measures them as a task's problems, with an export."""
    folder = tmp_path_factory.mktemp("texts")
    source = write_lines(folder / "data.jsonl", TEXTS)
    problems = write_lines(folder / "problems.jsonl", [{"prompt": p, "answer": a} for p, a in ANSWERS.items()])
    task, data = {"name": "jsonl", "train": problems, "heldout": 2}, {"max_length": 16, "packing": False}
    settings = config("sft", run_dir=str(folder / "run"), steps=40, data=data | {"source": source}, task=task)
    assert run(settings) == 0
    assert export.main([settings.run_dir]) == 0
    return settings


def answers(model, questions, folder, *options):
    """The answers of a model to questions."""
    out = folder / f"{len([*folder.iterdir()])}.jsonl"
    prompts = write_lines(folder / "prompts.jsonl", [{"question": question} for question in questions])
    given = ["--prompts", prompts, "--out", str(out), "--max-tokens", "4", "--dtype", "float32"]
    assert generate.main([str(model), *given, *options]) == 0
    completions = [json.loads(line)["completion"] for line in out.read_text().splitlines()]
    return dict(zip(questions, completions, strict=True))


def following(texts, folder, algorithm="grpo", model=None, **sections):
    source = {"init": "pretrained", "architecture": None, "source": model or texts.run_dir}
    return changed(config(algorithm, run_dir=str(folder)), model=source, **sections)


@pytest.mark.slow
def test_a_run_that_learned_texts_gets_text_prompts(texts, tmp_path, caplog):
    """Evaluation, generate and the export ask by texts."""
    assert records(texts)[-1]["eval/greedy_accuracy"] == 1
    assert json.loads(Path(texts.run_dir, "config.json").read_text())["mllm_learned"] == "texts"
    for model in (texts.run_dir, f"{texts.run_dir}/export"):
        assert answers(model, ANSWERS, tmp_path) == ANSWERS
    assert "knows" not in caplog.text
    assert answers(texts.run_dir, ANSWERS, tmp_path, "--chat-template", "always") != ANSWERS
    line = f"{texts.run_dir} knows texts, and prompts are chats: --chat-template never leaves them texts"
    assert line in caplog.messages
    assert "prompts without the chat template" in Path(texts.run_dir, "export", "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "form", "warned"),
    [
        ({}, "texts", ""),
        ({"task": {"system_prompt": "Add."}}, "chats", "the prompts of task arithmetic are chats: chat_template=never"),
    ],
)
def test_a_following_run_prompts_by_texts_or_warns(texts, tmp_path, caplog, sections, form, warned):
    settings = following(texts, tmp_path / "run", **sections)
    with Run.build(settings) as built:
        assert built.sampling.sampler.renderer.form == form
        assert json.loads(Path(settings.run_dir, "config.json").read_text()).get("mllm_learned", "chats") == form
    lines = [line for line in caplog.messages if "knows" in line]
    assert len(lines) == bool(warned)
    assert warned in "".join(lines)


EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.yaml"))


@pytest.mark.nightly
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_documented_template_examples_reach_their_accuracy(path, tmp_path):
    """The run begins with a model that can answer, so a few steps are enough."""
    options = [f"run_dir={tmp_path / 'run'}", *["task.heldout=16"] * ("heldout:" in path.read_text())]
    options += ["model.init=pretrained", "model.architecture=null", "steps=4", "optimizer.warmup_steps=0"]
    options += [f"model.source={ROOT / 'tests' / 'fixtures' / 'tiny_sft'}", "model.tokenizer=bytes", "batch_size=32"]
    assert train.main(["--config", str(path), *options]) == 0
    settings = load(str(path), options)
    if settings.task:
        problems = {one.prompt[-1]["content"]: one.answer for one in load_task(settings.task).heldout}
    else:
        problems = {"3+4=": "7", "1+2=": "3"}
    completions = answers(settings.run_dir, problems, tmp_path)
    right = sum(completions[prompt] == answer for prompt, answer in problems.items()) / len(problems)
    measured = [line["eval/greedy_accuracy"] for line in records(settings) if "eval/greedy_accuracy" in line]
    assert right == measured[-1] if measured else len(completions) == len(problems)
