"""The dependencies of a run outside its folder, compared at a resume.

The tokenizer and the chat template are compared by their results on probe texts, not by their files. Parameters are
compared by checksums and shapes, examples by the sources. A tokenizer that differs only on other texts is not noticed.
"""

from dataclasses import asdict
from typing import Any

from mllm.data.tasks.task import Task
from mllm.model.load import Policy
from mllm.model.tokenizer import MessagesError, Renderer, encode, render

TEXTS = (
    "The quick brown fox jumps over the lazy dog. THE END!",
    "0123456789 3.14159 -1,000 + 2*(7-5) = 1e-5 50%",
    "def f(x):\n    return {'a': [x, \"b\"]}\n\n\n\t// <think> </think> <tool_call> #### \\boxed{}\r\n",
    "Größe naïve Łódź Привет мир こんにちは世界 你好 안녕 مرحبا हिन्दी 🙂👩‍💻 e\u0301 \u00a0\u200b",
)
"""Probe texts, to compare their tokens."""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "content": "<think>\n6 * 7\n</think>\n\n42"},
    {"role": "user", "content": " And 6 * 8? "},
]
"""A probe chat, to compare its rendering with and without the system message, which some templates refuse."""


def dependencies(policy: Policy, renderer: Renderer, task: Task | None) -> dict[str, Any]:
    """The dependencies that must be equal at a resume, as JSON, by their names for the user."""
    known = {
        "model.source: the architecture": asdict(policy.architecture),
        "model.tokenizer: the tokenizer": [encode(policy.tokenizer, text) for text in TEXTS],
        "model.tokenizer: the chat template": [rendered(renderer, CHAT), rendered(renderer, CHAT[1:])],
        "model.source: what ends a completion": [sorted(policy.stop_ids), sorted(policy.stop_texts)],
    }
    return known | ({"task: the list of problems": task.content} if task and task.content else {})


def rendered(renderer: Renderer, messages: list[dict[str, Any]]) -> str | None:
    """The rendered chat; None if the template refuses it, or there is no template."""
    if not renderer.tokenizer.chat_template:
        return None
    try:
        return render(renderer, messages, add_generation_prompt=True)
    except MessagesError:
        return None
