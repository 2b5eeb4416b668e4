"""Evaluation gives mean rewards, and where there are answers a count of right completions with Wilson's interval."""

from dataclasses import replace

import numpy as np
import pytest

from mllm.config.grpo import RolloutConfig
from mllm.config.task import EvalConfig, TaskConfig
from mllm.data.tasks.task import Example
from mllm.model import tokenizer as tokenizers
from mllm.parallel.processes import ALL_ROWS
from mllm.rl.evaluation import make_evaluation, wilson
from mllm.rl.reward_process import NOT_APPLICABLE
from mllm.rl.rewards import RewardRunner
from mllm.rl.rollout import Completion, Sampler

EXAMPLES = [Example([{"role": "user", "content": f"{n}+0="}], str(n), answer_form="hashes") for n in (1, 2, 3, 4)]
GREEDY = ["#### 1", "2", "#### 4", "five"]
SAMPLED = ["1", "#### 2", "#### 3", "#### 4"]
BYTES = tokenizers.Renderer(tokenizers.bytes_tokenizer())
TOKENS = [tokenizers.encode_prompt(BYTES, example.prompt) for example in EXAMPLES]
TASK = TaskConfig(name="arithmetic")
CALLS = []


class FixedTexts(Sampler):
    """Completes each prompt with its text above, the i-th prompt's in i tokens, and records the calls."""

    def complete(self, params, prompts, *, step, first_sequence=0, greedy=False):
        CALLS.append((prompts, step, first_sequence, greedy))
        texts = GREEDY if greedy else SAMPLED
        numbers = [TOKENS.index(prompt) for prompt in prompts]
        return [Completion([0] * (i + 1), [0.0] * (i + 1), finished=True, text=texts[i]) for i in numbers]


class Lengths(RewardRunner):
    """Two rewards: the text's length, which fails for `five`, and half of it, which does not apply to `2`."""

    names, weights = ("length", "half"), np.array([1.0, 2.0])

    def __init__(self):
        pass

    def score(self, samples):
        texts = [sample.completion for sample in samples]
        lengths = [("raised", "no") if text == "five" else ("value", float(len(text))) for text in texts]
        halves = [(NOT_APPLICABLE, "") if text == "2" else ("value", len(text) / 2) for text in texts]
        return [*map(list, zip(lengths, halves, strict=True))]


def evaluate(problems=EXAMPLES, prefix="eval/", sampled=True):
    """The metrics of step 3."""
    sampler = FixedTexts(None, BYTES, (1,), RolloutConfig(max_prompt_length=8, max_completion_length=4), seed=0)
    return make_evaluation(EvalConfig(sampled=sampled), TASK, problems, sampler, Lengths(), ALL_ROWS, prefix)(None, 3)


def test_evaluation_completes_the_problems_in_order_with_sequence_numbers_that_training_never_uses():
    metrics = evaluate()
    assert (metrics["eval/greedy_accuracy"], metrics["eval/sampled_accuracy"]) == (1 / 4, 3 / 4)
    assert (metrics["eval/greedy_flexible_accuracy"], metrics["eval/sampled_flexible_accuracy"]) == (2 / 4, 1)
    assert (metrics["eval/greedy_accuracy_low"], metrics["eval/greedy_accuracy_high"]) == wilson(1, 4)
    assert metrics["eval/greedy_mean_length"] == 2.5
    assert metrics["eval/reward"] == (2 * 6 + 1 + 2 * 6) / 3
    assert metrics["eval/sampled_reward"] == (2 * 1 + 3 * 2 * 6) / 4
    assert metrics["eval/rewards/length/mean"] == (6 + 1 + 6) / 3
    assert metrics["eval/rewards/half/mean"] == (3 + 3 + 2) / 3
    assert (metrics["eval/rewards/length/raised"], metrics["eval/rewards/half/raised"]) == (1, 0)
    assert CALLS[-2:] == [(TOKENS, 3, 2**30, True), (TOKENS, 3, 2**30, False)]


def test_where_a_problem_has_no_answer_there_are_rewards_and_no_accuracy_and_long_prompts_are_left_out(caplog):
    long = replace(EXAMPLES[2], prompt=[{"role": "user", "content": "a long question"}])
    problems = [EXAMPLES[0], replace(EXAMPLES[1], answer=None), long]
    metrics = evaluate(problems, "test/", sampled=False)
    assert metrics["test/reward"] == (2 * 6 + 1) / 2
    assert metrics["test/greedy_mean_length"] == 1.5
    assert [name for name in metrics if "accuracy" in name or "sampled" in name] == []
    assert "1 of 3 test prompts of task arithmetic are longer than rollout.max_prompt_length" in caplog.text


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # z^2 / (n + z^2) with z = 1.95996
        (0, 250, 0.0, 0.015133),
        (10, 10, 0.722467, 1.0),
        # Newcombe 1998, Two-sided confidence intervals for the single proportion, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_wilsons(successes, trials, low, high):
    digits = 1e-6 if trials in (10, 250) else 5e-5
    assert wilson(successes, trials) == pytest.approx((low, high), abs=digits)
