"""A task's prompts for GRPO, without prompts that are too long."""

import logging
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

CHECKED = 100
"""The number of problems made on demand that are checked before training begins."""


class Prompt(NamedTuple):
    """A problem and the token ids of its prompt."""

    example: Example
    tokens: list[int]
    thinks: bool = False
    """Whether the prompt has opened a thought (`<think>`)."""


def task_renderer(config: TaskConfig, task: Task, renderer: Renderer, learned: Form | None) -> Renderer:
    """The renderer of a task's prompts, in the form that the model learned. UserError: an unused template argument."""
    args = config.template_args or {}
    for name in args:
        if name not in str(renderer.tokenizer.chat_template) or renderer.rule == "never":
            raise UserError(f"task.template_args: no chat template that is used has a variable {name}: remove it")
    lists = [part for part in (task.train, task.heldout, task.test) if isinstance(part, list)]
    given_messages = any(example.conversational for part in lists for example in part)
    are_texts = config.system_prompt is None and not (given_messages or config.converses)
    return replace(renderer, args=args).for_prompts(learned, are_texts)


class PromptIterator(DataIterator[Prompt]):
    """An endless iterator over a task's prompts: each prompt once per epoch, shuffled anew.

    A prompt that is too long is left out, but counts in the position.
    """

    def __init__(self, task: Task, renderer: Renderer, *, max_prompt_length: int, seed: int, ahead: int = 2) -> None:
        """Checks all listed prompts, or the first hundred made on demand; UserError as in `usable_prompts`.
        `ahead` prompts are prefetched."""
        examples, self.max_length = task.train, max_prompt_length
        checked = examples if isinstance(examples, list) else examples[:CHECKED]
        usable_prompts(checked, renderer, max_prompt_length, f"training prompts of task {task.name}")
        order = training_order(len(examples), seed)
        prompts = order.map(examples.__getitem__).map(partial(prompt_of, renderer))
        ordered = prompts.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        super().__init__(ordered, order, len(examples), content=task.content, ahead=ahead)

    def take(self) -> Prompt:
        while len((prompt := next(self.items)).tokens) > self.max_length:
            pass  # `usable_prompts` found at least one shorter prompt
        return prompt


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
    return Prompt(example, tokens, opens_thought(renderer, tokens))
