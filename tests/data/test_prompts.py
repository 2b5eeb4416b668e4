"""Prompts come in a random order that is resumed exactly. Prompts that are too long are left out."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from mllm.config.task import TaskConfig
from mllm.data.dataset import DataIterator
from mllm.data.prompts import Prompt, prompt_iterator, task_renderer, usable_prompts
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer

BYTES = Renderer(bytes_tokenizer())
LONG, BAD = "a" * 30, "<|im_end|>"


def problem(text: str, number: int = 0) -> Example:
    return Example([{"role": "user", "content": text}], None, place=f"data:{number}")


def listed(*texts: str) -> Task:
    return Task("listed", [problem(text, number) for number, text in enumerate(texts)], [])


def prompts_of(task: Task, seed: int = 0) -> DataIterator[Prompt]:
    return prompt_iterator(task, BYTES, max_prompt_length=16, seed=seed)


def texts(prompts: DataIterator[Prompt], count: int) -> list[str]:
    return [next(prompts).example.prompt[0]["content"] for _ in range(count)]


def test_long_prompts_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    longest = "c" * 13  # as a chat it has the 16 tokens that are permitted
    task = listed("a", "b" * 14, longest, "d" * 40)
    drawn = texts(prompts_of(task), 10)
    assert [sorted(drawn[i : i + 2]) for i in range(0, 10, 2)] == [["a", longest]] * 5
    usable = usable_prompts(task.train, BYTES, 16, "held-out prompts")
    assert [prompt.example.prompt[0]["content"] for prompt in usable] == ["a", longest]
    for name in ("training prompts of task listed", "held-out prompts"):
        assert f"2 of 4 {name} are longer than rollout.max_prompt_length and are left out" in caplog.text


def test_prompts_resume_where_they_stopped() -> None:
    bad = set(range(100, 190, 3))
    task = listed(*(LONG if i in bad else f"{i}" for i in range(190)))
    prompts, resumed = prompts_of(task), prompts_of(task)
    drawn = texts(prompts, 160)
    assert sorted(drawn) == sorted(str(i) for i in range(190) if i not in bad)
    assert texts(prompts_of(task, seed=1), 160) != drawn
    resumed.set_state(json.loads(json.dumps(prompts.get_state())))
    for _ in range(160):
        assert next(resumed) == next(prompts)
        assert prompts.get_state() == resumed.get_state()


TEXT, MESSAGES = problem("a"), replace(problem("a"), conversational=True)


@pytest.mark.parametrize(
    ("rule", "learned", "problems", "settings", "form"),
    [
        ("auto", "texts", [TEXT], {}, "texts"),
        ("auto", "chats", [TEXT], {}, "chats"),
        ("auto", "texts", [TEXT, MESSAGES], {}, "chats"),
        ("auto", "texts", [TEXT], {"system_prompt": "Add."}, "chats"),
        ("auto", "texts", [TEXT], {"template_args": {"messages": []}}, "chats"),
        ("always", "texts", [TEXT], {}, "chats"),
        ("never", "chats", [TEXT], {}, "texts"),
    ],
)
def test_prompts_are_texts_if_all_are_and_the_model_saw_texts(rule, learned, problems, settings, form):
    config = TaskConfig(name="arithmetic", **settings)
    renderer = task_renderer(config, Task("listed", problems, []), Renderer(BYTES.tokenizer, rule), learned)
    assert renderer.form == form
    (prompt,) = usable_prompts([TEXT], replace(renderer, args={}), 16, "prompts")
    assert BYTES.tokenizer.decode(prompt.tokens) == {"texts": "a", "chats": "<|im_start|>a<|im_end|><|im_start|>"}[form]


@pytest.mark.parametrize(("rule", "name"), [("auto", "enable_thinkin"), ("never", "messages")])
def test_a_template_argument_without_effect_is_refused(rule: Any, name: str) -> None:
    config = TaskConfig(name="arithmetic", template_args={name: False})
    with pytest.raises(UserError, match=f"task.template_args: no chat template .* has a variable {name}: remove it"):
        task_renderer(config, Task("listed", [TEXT], []), Renderer(BYTES.tokenizer, rule), "chats")


def test_bad_chats_and_empty_prompts_are_errors_at_once() -> None:
    with pytest.raises(UserError, match=r"training prompts .*: messages: <.*> is .* \(data:1, 3\)$"):
        prompts_of(listed("a", BAD, "b", BAD))
    with pytest.raises(UserError, match="makes nothing of them"):
        usable_prompts([problem("")], Renderer(BYTES.tokenizer, "never"), 16, "prompts")


def test_a_prompt_knows_whether_its_template_opens_a_thought() -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    for renderer, thinks in ((Renderer(tokenizer), True), (BYTES, False)):
        (prompt,) = usable_prompts([problem("a")], renderer, 30, "prompts")
        assert prompt.thinks == thinks


@pytest.mark.slow
def test_a_program_that_ends_without_training_says_nothing():
    """Grain's iterator would close itself when Python has taken its modules apart."""
    program = """
from mllm.config.task import TaskConfig
from mllm.data.prompts import prompt_iterator
from mllm.data.tasks.load import load
from mllm.model.tokenizer import Renderer, bytes_tokenizer
renderer = Renderer(bytes_tokenizer(), "always")
prompts = prompt_iterator(load(TaskConfig(name="arithmetic")), renderer, max_prompt_length=9, seed=0)
next(prompts)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
