"""A task's prompts for GRPO, without prompts that are too long.

Problems that are made on demand can't all be checked before training. A problem that later can't be made, or is no chat
that the model's template takes, is left out like one with a long prompt.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import grain

from mllm.config.task import Form, TaskConfig
from mllm.data.dataset import DataIterator, training_order
from mllm.data.records import sound_records
from mllm.data.tasks.task import Example, Task
from mllm.data.turns import opens_thought
from mllm.errors import UserError
from mllm.model.tokenizer import MessagesError, Renderer, encode_prompt

log = logging.getLogger(__name__)

CHECKED = 100
"""How many problems that are made on demand are checked before training begins."""
MOST_SKIPPED = 1000
"""How many prompts in a row may be left out."""


class Prompt(NamedTuple):
    """A problem and the token ids of its prompt."""

    example: Example
    tokens: list[int]
    thinks: bool = False
    """Whether it has opened a thought, in which a completion begins."""


def task_renderer(config: TaskConfig, task: Task, renderer: Renderer, learned: Form | None) -> Renderer:
    """The renderer of a task's prompts for what a model has learned; UserError if an argument would have no effect."""
    args = config.template_args or {}
    for name in args:
        if name not in str(renderer.tokenizer.chat_template) or renderer.rule == "never":
            raise UserError(f"task.template_args: no chat template that is used has a variable {name}: remove it")
    lists = [part for part in (task.train, task.heldout, task.test) if isinstance(part, list)]
    given_messages = any(example.conversational for part in lists for example in part)
    are_texts = config.system_prompt is None and not (given_messages or config.converses)
    return replace(renderer, args=args).for_prompts(learned, are_texts)


class PromptIterator(DataIterator[Prompt]):
    """A task's prompts, for ever: each once in an epoch, in another order in each.

    A prompt that can't be used is left out, which a warning says the first time; the position counts it, too.
    """

    def __init__(self, task: Task, renderer: Renderer, *, max_prompt_length: int, seed: int, ahead: int = 2) -> None:
        """Check all prompts of a list, or the first hundred of problems that are made on demand: UserError as by
        `usable_prompts`. `ahead` prompts are read before they are needed."""
        examples, self.task, self.max_length = task.train, task.name, max_prompt_length
        checked = examples if isinstance(examples, list) else examples[:CHECKED]
        usable = usable_prompts(checked, renderer, max_prompt_length, f"training prompts of task {task.name}")
        self.warned = len(usable) < len(checked)
        order = training_order(len(examples), seed)
        prompts = order.map(partial(read_prompt, examples, renderer))
        ordered = prompts.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        super().__init__(ordered, order, len(examples), content=task.content, ahead=ahead)

    def take(self) -> Prompt:
        for _ in range(MOST_SKIPPED):
            location, prompt = next(self.items)
            if isinstance(prompt, Prompt):
                if len(prompt.tokens) <= self.max_length:
                    return prompt
                excess = f"{len(prompt.tokens)} tokens, and the limit is {self.max_length}"
                prompt = UserError(f"rollout.max_prompt_length: it has {excess}")
            problem = f"{location}: {prompt}"
            if not self.warned:
                log.warning("a prompt of task %s is left out: %s (prompts_skipped counts them)", self.task, problem)
                self.warned = True
        raise UserError(f"task {self.task}: {MOST_SKIPPED} prompts in a row can't be used, the last: {problem}")


def usable_prompts(examples: Sequence[Example], renderer: Renderer, max_length: int, what: str) -> list[Prompt]:
    """The examples with their prompts' tokens, without longer ones than `max_length`, which a warning counts.

    `what` names the examples in messages: `held-out prompts of task gsm8k`. UserError is raised if all are too
    long, and lists the examples that can't be written as a chat.
    """
    results = (read_prompt(examples, renderer, index) for index in range(len(examples)))
    prompts = [prompt for _, prompt in sound_records(results, what)]
    usable = [prompt for prompt in prompts if len(prompt.tokens) <= max_length]
    limit = "rollout.max_prompt_length"
    if prompts and not usable:
        shortest = min(len(prompt.tokens) for prompt in prompts)
        raise UserError(f"{limit}: all of the {len(prompts)} {what} are longer: the shortest has {shortest} tokens")
    if left_out := len(prompts) - len(usable):
        log.warning("%d of %d %s are longer than %s and are left out", left_out, len(prompts), what, limit)
    return usable


def read_prompt(examples: Sequence[Example], renderer: Renderer, index: int) -> tuple[str, Prompt | UserError]:
    """The place of example `index`, and its prompt, or an error if the problem can't be made or is no chat.

    UserError is raised where the tokenizer is at fault.
    """
    try:
        example = examples[index]
    except UserError as error:
        return f"problem {index}", error
    try:
        tokens = encode_prompt(renderer, example.prompt)
        return example.place, Prompt(example, tokens, opens_thought(renderer, tokens))
    except MessagesError as error:
        return example.place, error
