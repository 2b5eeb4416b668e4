"""A task's prompts for GRPO, tokenized at the start, without prompts that are too long."""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import grain

from mllm.config.task import Form, TaskConfig
from mllm.data.dataset import DataIterator, training_order
from mllm.data.records import read_records, sound_records
from mllm.data.tasks.task import Example, Task
from mllm.data.turns import opens_thought
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, encode_prompt

log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """A problem and the token ids of its prompt."""

    example: Example
    tokens: Sequence[int]
    thinks: bool = False
    """Whether the prompt has opened a thought (`<think>`)."""


def task_renderer(config: TaskConfig, task: Task, renderer: Renderer, learned: Form | None) -> Renderer:
    """The renderer of a task's prompts, in the form that the model learned. UserError: an unused template argument."""
    args = config.template_args or {}
    for name in args:
        if name not in str(renderer.tokenizer.chat_template) or renderer.rule == "never":
            raise UserError(f"task.template_args: no chat template that is used has a variable {name}: remove it")
    given_messages = any(example.conversational for example in (*task.train, *task.heldout, *(task.test or ())))
    are_texts = config.system_prompt is None and not (given_messages or config.converses)
    return replace(renderer, args=args).for_prompts(learned, are_texts)


def prompt_iterator(task: Task, renderer: Renderer, *, max_prompt_length: int, seed: int) -> DataIterator[Prompt]:
    """An endless iterator over a task's usable prompts: each prompt once per epoch, shuffled anew."""
    prompts = usable_prompts(task.train, renderer, max_prompt_length, f"training prompts of task {task.name}")
    order = training_order(len(prompts), seed)
    items = order.map(prompts.__getitem__).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return DataIterator(items, order, len(prompts), content=task.content)


def usable_prompts(examples: Sequence[Example], renderer: Renderer, max_length: int, what: str) -> list[Prompt]:
    """The examples with their prompts' tokens. Prompts longer than `max_length` are left out, with a warning.

    `what` names the examples in errors: `held-out prompts of task gsm8k`. UserError is raised if every prompt is too
    long, or if examples can't be rendered as chats; it lists those examples.
    """
    results = read_records(((example.place, example) for example in examples), partial(prompt_of, renderer))
    prompts = [prompt for _, prompt in sound_records(results, what)]
    usable = [prompt for prompt in prompts if len(prompt.tokens) <= max_length]
    limit = "rollout.max_prompt_length"
    if prompts and not usable:
        shortest = min(len(prompt.tokens) for prompt in prompts)
        raise UserError(f"{limit}: all of the {len(prompts)} {what} are longer: the shortest has {shortest} tokens")
    if left_out := len(prompts) - len(usable):
        log.warning("%d of %d %s are longer than %s and are left out", left_out, len(prompts), what, limit)
    return usable


def prompt_of(renderer: Renderer, example: Example) -> Prompt:
    """The problem with its prompt's tokens; UserError if the chat template refuses the prompt."""
    tokens = encode_prompt(renderer, example.prompt)
    return Prompt(example, array("i", tokens), opens_thought(renderer, tokens))
