"""A task's prompts for GRPO, without those that are too long.

Problems that are made on demand can't all be checked before training. One that later can't be made, or is no chat that
the model's template takes, is left out like a long one.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from mllm.config.task import LongPrompts
from mllm.data.iteration import CACHED_EXAMPLES, DataIterator, example_index
from mllm.data.records import bad_lines
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.model.tokenizer import MessagesError, Tokenizer, encode_prompt

log = logging.getLogger(__name__)

CHECKED = 100
"""How many problems that are made on demand are checked before training begins."""
MOST_SKIPPED = 1000
"""How many prompts in a row may be left out."""
OR_SKIP = ": set task.long_prompts=skip to leave such prompts out"


class Prompt(NamedTuple):
    """A problem and the token ids of its prompt."""

    example: Example
    tokens: list[int]


class LongPrompt(UserError):
    """A prompt has more tokens than `rollout.max_prompt_length`."""

    def __init__(self, place: str, tokens: int, limit: int) -> None:
        super().__init__(f"rollout.max_prompt_length: {place} has {tokens} tokens, and the limit is {limit}")
        self.tokens = tokens


def training_prompts(
    task: Task,
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    long_prompts: LongPrompts = "skip",
    seed: int,
    prefetch: int = 2,
) -> DataIterator[Prompt]:
    """The task's prompts, for ever: each once in an epoch, in another order in each.

    All prompts of a list, and the first hundred of problems that are made on demand, are checked at once: UserError
    as for `usable_prompts`. Of the others, one that can't be used is left out or raises, as `long_prompts` says. The
    iterator's position counts those that are left out, too.
    """
    count, name = len(task.train), task.name
    read = lru_cache(CACHED_EXAMPLES)(partial(read_prompt, task.train, tokenizer, max_prompt_length))
    checked = count if isinstance(task.train, list) else min(count, CHECKED)
    usable = select(map(read, range(checked)), f"training prompts of task {name}", long_prompts)
    warned = len(usable) < checked

    def next_usable(position: int) -> tuple[Prompt, int]:
        nonlocal warned
        for place in range(position, position + MOST_SKIPPED):
            prompt = read(example_index(place, count, seed))
            if isinstance(prompt, Prompt):
                return prompt, place + 1
            if long_prompts == "error":
                raise UserError(f"{prompt}{OR_SKIP}")
            if not warned:
                log.warning("a prompt of task %s is left out: %s (prompts_skipped counts them)", name, prompt)
                warned = True
        raise UserError(f"task {name}: {MOST_SKIPPED} prompts in a row can't be used, the last: {prompt}")

    return DataIterator(next_usable, count, None, prefetch, task.content)


def usable_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, what: str, long_prompts: LongPrompts = "skip"
) -> list[Prompt]:
    """The examples with their prompts' tokens, without those of more than `max_length`, which a warning counts.

    `what` names the examples in messages: `held-out prompts of task gsm8k`. UserError is raised if all are too
    long, or one is under `long_prompts: error`, and lists those that can't be written as a chat.
    """
    read = partial(read_prompt, examples, tokenizer, max_length)
    return select(map(read, range(len(examples))), what, long_prompts)


def select(prompts: Iterable[Prompt | UserError], what: str, long_prompts: LongPrompts) -> list[Prompt]:
    """The prompts among what `read_prompt` gave; messages and errors are those of `usable_prompts`."""
    usable: list[Prompt] = []
    long: list[LongPrompt] = []
    bad: list[UserError] = []
    for prompt in prompts:
        if isinstance(prompt, Prompt):
            usable.append(prompt)
        elif isinstance(prompt, LongPrompt):
            long.append(prompt)
        else:
            bad.append(prompt)
    if bad:
        raise bad_lines([(str(error).partition(": ")[0], error) for error in bad], what)
    if long and long_prompts == "error":
        raise UserError(f"{long[0]}{OR_SKIP}")
    if long and not usable:
        shortest = min(error.tokens for error in long)
        raise UserError(
            f"rollout.max_prompt_length: all of the {len(long)} {what} are longer: the shortest has {shortest} tokens"
        )
    if long:
        limit = "rollout.max_prompt_length"
        log.warning("%d of %d %s are longer than %s and are left out", len(long), len(long) + len(usable), what, limit)
    return usable


def read_prompt(examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, index: int) -> Prompt | UserError:
    """Example `index` with its prompt's tokens; an error if the problem can't be made or used.

    UserError is raised where the tokenizer is at fault.
    """
    try:
        example = examples[index]
    except UserError as error:
        return UserError(str(error))  # without a traceback, which would keep the frames that it came through
    try:
        tokens = encode_prompt(tokenizer, example.prompt)
    except MessagesError as error:
        return UserError(f"{example.place}: {error}")
    return LongPrompt(example.place, len(tokens), max_length) if len(tokens) > max_length else Prompt(example, tokens)
