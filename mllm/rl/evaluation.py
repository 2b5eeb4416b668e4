"""Accuracy on problems that training never sees, with its confidence interval."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mllm.config.task import EvalConfig
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.model.tokenizer import encode_prompt
from mllm.parallel.processes import ALL_ROWS, RowShare
from mllm.rl.reward_functions import exact_match, flexible_match
from mllm.rl.sampler import Sampler

FIRST_SEQUENCE = 2**30
Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


def make_evaluation(
    options: EvalConfig, task: Task, sampler: Sampler, rows: RowShare
) -> Callable[[Params, int], dict[str, float]]:
    """The function (parameters, step) -> metrics that evaluates on the problems that the task holds out.

    UserError is raised if a held-out prompt is longer than `rollout.max_prompt_length`, or can't be written as a
    chat.
    """
    examples = [task.heldout[i] for i in range(options.prompts or len(task.heldout))]
    limit = sampler.options.max_prompt_length
    for index, example in enumerate(examples):
        length = len(encode_prompt(sampler.tokenizer, example.prompt))
        if length > limit:
            raise UserError(
                f"rollout.max_prompt_length: held-out prompt {index} of task {task.name} has {length} tokens, "
                f"and the limit is {limit}"
            )
    return partial(evaluate, sampler, examples, sampled=options.sampled, rows=rows)


def evaluate(
    sampler: Sampler,
    examples: Sequence[Example],
    params: Params,
    step: int,
    *,
    sampled: bool,
    rows: RowShare = ALL_ROWS,
) -> dict[str, float]:
    """Complete each problem greedily and, if `sampled`, once at the rollout's temperature; each process its share.

    The metrics are `eval/greedy_accuracy` (the answer in the task's exact form) with the ends `_low` and `_high` of
    its 95 % interval, `eval/greedy_flexible_accuracy` (the last number counts), the mean length in tokens; likewise
    `eval/sampled_...`.
    """
    share = -(-len(examples) // rows.count)
    mine = examples[rows.index * share :][:share]
    # Every process completes as many prompts. The repeated problem that fills a share up is dropped below.
    mine = [*mine, *[examples[0]] * (share - len(mine))]
    prompts = [encode_prompt(sampler.tokenizer, example.prompt) for example in mine]
    first = FIRST_SEQUENCE + rows.index * share
    metrics: dict[str, float] = {}
    for mode in ("greedy", "sampled") if sampled else ("greedy",):
        completions, texts = sampler.complete(params, prompts, step=step, first_sequence=first, greedy=mode == "greedy")
        answers = [(e.prompt[-1]["content"], text, e) for e, text in zip(mine, texts, strict=True)]
        matches = [(exact_match(*answer) == 1, flexible_match(*answer) == 1) for answer in answers]
        gathered = rows.gather((np.array(matches), completions.lengths))
        (exact, flexible), lengths = (np.concatenate(part)[: len(examples)].T for part in zip(*gathered, strict=True))
        correct = int(exact.sum())
        low, high = wilson(correct, len(examples))
        metrics |= {
            f"eval/{mode}_accuracy": correct / len(examples),
            f"eval/{mode}_accuracy_low": low,
            f"eval/{mode}_accuracy_high": high,
            f"eval/{mode}_flexible_accuracy": int(flexible.sum()) / len(examples),
            f"eval/{mode}_mean_length": float(lengths.mean()),
        }
    return metrics


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927; Newcombe 1998, method 3): sound at 0 and 1, too."""
    share, denominator = successes / trials, 2 * (trials + Z**2)
    center = (2 * trials * share + Z**2) / denominator
    half_width = Z / denominator * math.sqrt(4 * trials * share * (1 - share) + Z**2)
    return 0.0 if successes == 0 else center - half_width, 1.0 if successes == trials else center + half_width
