"""Evaluation gives mean rewards, and where there are answers a count of right completions with Wilson's interval."""

from array import array
from dataclasses import replace

import numpy as np
import pytest
from rollouts import InstantRewards

from mllm.config.rollout import RolloutConfig
from mllm.config.task import EvalConfig, TaskConfig
from mllm.data.tasks.task import Example
from mllm.model import tokenizer as tokenizers
from mllm.parallel.processes import ALL_ROWS, RowShare
from mllm.rewards.functions import BUILT_IN
from mllm.rewards.scores import NOT_APPLICABLE
from mllm.run.evaluation import make_evaluation, wilson
from mllm.sampler.completion import Completion
from mllm.sampler.sampler import Sampler

EXAMPLES = [Example([{"role": "user", "content": f"{n}+0="}], str(n), answer_form="hashes") for n in (1, 2, 3, 4)]
GREEDY = ["#### 1", "2", "#### 4", "five"]
SAMPLED = [["1"] * 4, ["#### 2"] + ["5"] * 3, ["#### 3", "5"] * 2, ["#### 4"] * 4]
BYTES = tokenizers.Renderer(tokenizers.bytes_tokenizer())
TOKENS = [tokenizers.encode_prompt(BYTES, example.prompt) for example in EXAMPLES]
REWARDS = [{"name": "m:length"}, {"name": "m:half", "weight": 2}, {"name": "exact_match", "weight": 0}]
CALLS = []


class FixedTexts(Sampler):
    """Completes each prompt with its text above, its n-th sample with the n-th, the i-th prompt's in i tokens."""

    def complete(self, params, prompts, *, step, first_sequence=0, greedy=False, ended=None):
        CALLS.append((prompts, step, first_sequence, greedy))
        numbers = [TOKENS.index(prompt) for prompt in prompts]
        texts = [GREEDY[i] if greedy else SAMPLED[i][numbers[:n].count(i)] for n, i in enumerate(numbers)]
        made = zip(numbers, texts, strict=True)
        zeros = lambda i: (array("i", [0] * (i + 1)), array("f", [0.0] * (i + 1)))  # noqa: E731
        return [Completion(*zeros(i), finished=True, text=text) for i, text in made]


class Lengths(InstantRewards):
    """The text's length, which fails for `five`, and half of it, which does not apply to `2`; and built-in matches."""

    def __init__(self, task):
        self.names = [reward.name.removeprefix("m:") for reward in task.rewards]
        self.weights = np.array([reward.weight for reward in task.rewards])

    def score(self, samples):
        return [[self.answer(name, sample) for name in self.names] for sample in samples]

    def answer(self, name, sample):
        text, example = sample.completion, sample.example
        if name == "length":
            return ("raised", "no") if text == "five" else ("value", float(len(text)))
        if name == "half":
            return (NOT_APPLICABLE, "") if text == "2" else ("value", len(text) / 2)
        if example.answer is None:
            return "raised", "no answer"
        return "value", BUILT_IN[name](text, example.answer, *[example] * (name != "math"))


def evaluate(problems=EXAMPLES, prefix="eval/", samples=1, rewards=REWARDS):
    """The metrics of step 3."""
    sampler = FixedTexts(None, BYTES, (1,), RolloutConfig(max_prompt_length=8, max_completion_length=4), seed=0)
    options, task = EvalConfig(samples=samples), TaskConfig(name="arithmetic", rewards=rewards)
    return make_evaluation(options, task, problems, sampler, Lengths(task), ALL_ROWS, prefix)(None, 3)


def test_evaluation_takes_problems_in_order_under_own_numbers():
    """Training never uses the sequence numbers of an evaluation."""
    metrics = evaluate()
    assert (metrics["eval/greedy_accuracy"], metrics["eval/avg@1"]) == (1 / 4, 3 / 4)
    for name, right in (("greedy_accuracy", 1), ("avg@1", 3)):
        assert (metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"]) == pytest.approx(wilson(right, 4))
    assert not [name for name in metrics if "pass@" in name]
    assert metrics["eval/greedy_mean_length"] == 2.5
    assert metrics["eval/reward"] == (2 * 6 + 1 + 2 * 6 + 0) / 4  # a failure counts as 0
    assert metrics["eval/sampled_reward"] == (2 * 1 + 3 * 2 * 6) / 4
    assert metrics["eval/rewards/length/mean"] == (6 + 1 + 6 + 0) / 4
    assert metrics["eval/rewards/half/mean"] == (3 + 3 + 2) / 3
    assert (metrics["eval/rewards/length/raised"], metrics["eval/rewards/half/raised"]) == (1, 0)
    assert CALLS[-2:] == [(TOKENS, 3, 2**30, True), (TOKENS, 3, 2**30, False)]


@pytest.mark.parametrize(
    ("rewards", "greedy", "sampled"),
    [
        ([{"name": "exact_match"}, {"name": "flexible_match", "weight": 0}], 1 / 4, 3 / 4),
        ([{"name": "exact_match", "weight": 0}, {"name": "flexible_match"}], 2 / 4, 1),
        ([{"name": "m:length", "weight": 9}, {"name": "math"}], 2 / 4, 1),
        ([{"name": "m:length"}], None, None),  # which judges no answer
    ],
)
def test_an_answer_is_right_as_the_rewards_of_the_task_judge_it(rewards, greedy, sampled):
    metrics = evaluate(rewards=rewards, samples=1)
    assert (metrics.get("eval/greedy_accuracy"), metrics.get("eval/avg@1")) == (greedy, sampled)


def test_missing_answers_give_rewards_without_accuracy(caplog):
    long = replace(EXAMPLES[2], prompt=[{"role": "user", "content": "a long question"}])
    problems = [EXAMPLES[0], replace(EXAMPLES[1], answer=None), long]
    metrics = evaluate(problems, "test/", samples=0)
    assert metrics["test/reward"] == (2 * 6 + 1) / 2
    assert metrics["test/greedy_mean_length"] == 1.5
    assert [name for name in metrics if "accuracy" in name or "sampled" in name] == []
    assert "1 of 3 test prompts of task arithmetic are longer than rollout.max_prompt_length" in caplog.text


def test_samples_of_each_problem_give_avg_at_k_and_pass_at_k():
    metrics = evaluate(samples=4)
    assert CALLS[-1] == ([tokens for tokens in TOKENS for _ in range(4)], 3, 2**30, False)
    measured = {name: value for name, value in metrics.items() if "@" in name and name[-1].isdecimal()}
    # The problems have 0, 1, 2 and 4 right samples of four.
    expected = {"avg@4": 7 / 16, "pass@2": (0 + 3 / 6 + 5 / 6 + 1) / 4, "pass@4": 3 / 4}
    assert measured == pytest.approx({f"eval/{name}": value for name, value in expected.items()})
    ends = [(metrics[f"{name}_low"], metrics[f"{name}_high"]) for name in measured]
    # As many trials as give the variance of these means over problems: p (1 - p) 4 / variance.
    shares = [(7 / 16, 7.2), (7 / 12, 20 / 3), (3 / 4, 4)]
    assert ends == [pytest.approx(wilson(share * trials, trials)) for share, trials in shares]
    assert metrics["eval/sampled_rewards/length/mean"] == (4 * 1 + 6 + 3 + 2 * 7 + 4 * 6) / 16


def test_one_process_scores_all_samples_of_a_problem(monkeypatch):
    calls, part_of = [], RowShare.part_of
    monkeypatch.setattr(RowShare, "part_of", lambda self, *sizes: calls.append(sizes) or part_of(self, *sizes))
    evaluate(samples=3)
    assert calls == [(4, 1), (12, 3)]


def test_the_interval_is_wilsons():
    assert wilson(0, 250) == pytest.approx((0.0, 0.015133), abs=1e-6)  # z^2 / (n + z^2) with z = 1.95996
    # Newcombe 1998, Two-sided confidence intervals for the single proportion, table I, method 3
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
