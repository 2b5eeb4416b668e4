"""Accuracy is a count of right completions, greedy and sampled, with Wilson's interval."""

import numpy as np
import pytest

from mllm.config.schema import RolloutConfig
from mllm.data.tasks import Example
from mllm.model import tokenizer as tokenizers
from mllm.rl.evaluation import evaluate, wilson
from mllm.rl.rollout import Completions
from mllm.rl.sampler import Sampler

EXAMPLES = [Example([{"role": "user", "content": f"{n}+0="}], str(n), None, {"form": "hashes"}) for n in (1, 2, 3, 4)]
GREEDY = ["#### 1", "2", "#### 4", "five"]
SAMPLED = ["1", "#### 2", "#### 3", "#### 4"]
ASKED = []


class Parrot(Sampler):
    """Says what is written above, in 1, 2, 3 and 4 tokens, and remembers how it was asked."""

    def complete(self, params, prompts, *, step, first_sequence=0, greedy=False):
        ASKED.append((prompts, step, first_sequence, greedy))
        tokens = np.zeros((len(prompts), 4), np.int32)
        lengths = np.arange(1, len(prompts) + 1, dtype=np.int32)
        return Completions(tokens, np.zeros(tokens.shape, np.float32), lengths, lengths > 0), [SAMPLED, GREEDY][greedy]


@pytest.fixture
def parrot():
    ASKED.clear()
    options = RolloutConfig(max_prompt_length=8, max_completion_length=4)
    return Parrot(None, tokenizers.bytes_tokenizer(), (1,), options, seed=0)


def test_strict_and_flexible_answers_are_counted_apart(parrot):
    metrics = evaluate(parrot, EXAMPLES, None, 3, sampled=False)
    assert metrics == {
        "eval/greedy_accuracy": 1 / 4,
        "eval/greedy_accuracy_low": wilson(1, 4)[0],
        "eval/greedy_accuracy_high": wilson(1, 4)[1],
        "eval/greedy_flexible_accuracy": 2 / 4,
        "eval/greedy_mean_length": 2.5,
    }


def test_sampled_completions_are_judged_beside_the_greedy_ones_on_request(parrot):
    metrics = evaluate(parrot, EXAMPLES, None, 3, sampled=True)
    assert (metrics["eval/greedy_accuracy"], metrics["eval/sampled_accuracy"]) == (1 / 4, 3 / 4)
    assert metrics["eval/sampled_flexible_accuracy"] == 1


def test_evaluation_asks_for_the_problems_in_order_and_draws_none_of_trainings_random_numbers(parrot):
    evaluate(parrot, EXAMPLES, None, 3, sampled=True)
    prompts = [tokenizers.encode_prompt(parrot.tokenizer, example.prompt) for example in EXAMPLES]
    expected = [(prompts, 3, 2**30, True), (prompts, 3, 2**30, False)]
    assert expected == ASKED


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # z^2 / (n + z^2) with z = 1.95996
        (0, 250, 0.0, 0.015133),
        (10, 10, 0.722467, 1.0),
        (0, 10, 0.0, 0.277533),
        # Newcombe 1998, Two-sided confidence intervals for the single proportion, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_wilsons(successes, trials, low, high):
    digits = 1e-6 if trials in (10, 250) else 5e-5
    assert wilson(successes, trials) == pytest.approx((low, high), abs=digits)
