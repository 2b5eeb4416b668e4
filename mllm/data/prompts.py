"""Batches of a task's prompts for GRPO. Every process makes the whole batch and keeps its own rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from mllm.data.iteration import CACHED_EXAMPLES, READ_IN_CALLER, DataIterator, example_indices, process_rows
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.model.tokenizer import Tokenizer, encode_prompt


@dataclass(frozen=True)
class PromptBatch:
    examples: list[Example]
    tokens: list[list[int]]


def prompt_batches(
    task: Task,
    tokenizer: Tokenizer,
    *,
    prompts_per_step: int,
    max_prompt_length: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> DataIterator[PromptBatch]:
    """This process's share of the task's prompts, for ever: each once in an epoch, in another order in each.

    UserError is raised if a prompt is longer than `max_prompt_length` tokens. If problems are made on demand, only
    the first hundred are checked here; a later one raises when its turn comes.
    """
    rows = process_rows(prompts_per_step, process_index, process_count, "batch_size / grpo.num_generations")
    prompt = lru_cache(CACHED_EXAMPLES)(partial(encode_task_prompt, task, tokenizer, max_prompt_length))
    for index in range(len(task.train) if isinstance(task.train, list) else min(len(task.train), 100)):
        prompt(index)

    def make_prompt_batch(prompts: Sequence[tuple[Example, list[int]]]) -> tuple[PromptBatch, int]:
        examples, tokens = zip(*prompts[rows], strict=True)
        return PromptBatch(list(examples), list(tokens)), len(prompts)

    prompts = example_indices(len(task.train), None, seed).map(prompt)
    batches = prompts.batch(prompts_per_step, batch_fn=make_prompt_batch).to_iter_dataset(READ_IN_CALLER)
    return DataIterator(batches, len(task.train), epochs=None, prefetch=2)


def encode_task_prompt(task: Task, tokenizer: Tokenizer, max_length: int, index: int) -> tuple[Example, list[int]]:
    """Training problem `index` of the task, and its prompt's tokens; UserError where they are too many."""
    example = task.train[index]
    try:
        tokens = encode_prompt(tokenizer, example.prompt)
    except UserError as error:
        raise UserError(f"{task.name}[{index}]: {error}") from None
    if len(tokens) > max_length:
        raise UserError(
            f"rollout.max_prompt_length: prompt {index} of task {task.name} has {len(tokens)} tokens, "
            f"and the limit is {max_length}"
        )
    return example, tokens
