"""A step's batch: read one ahead under SFT, sampled and laid out token by token under GRPO."""

import numpy as np
import pytest
from tiny import config

from mllm import data, objectives
from mllm import tokenizer as tokenizers
from mllm.batch import padded_length
from mllm.config import DataConfig
from mllm.metrics import Stopwatch
from mllm.rewards import RewardRunner, Scores
from mllm.rollout import Completions
from mllm.sampler import Sampler
from mllm.sources import GrpoSource, SftSource, weighted_sum
from mllm.tasks import Example, Task
from mllm.tasks import load as load_task

BYTES = tokenizers.bytes_tokenizer()
GROUP, LIMIT = 4, 4


class Dice(Sampler):
    """Completions of 1 to 4 tokens that depend on the step; those of 4 are cut off."""

    def complete(self, params, prompts, *, step, first=0, greedy=False):
        rng = np.random.default_rng(step)
        lengths = rng.integers(1, LIMIT + 1, len(prompts), dtype=np.int32)
        tokens = rng.integers(1, 256, (len(prompts), LIMIT), dtype=np.int32)
        logprobs = -rng.random(tokens.shape, dtype=np.float32) - 1
        return Completions(tokens, logprobs, lengths, lengths < LIMIT), [f"{i}" for i in range(len(prompts))]


class Judge(RewardRunner):
    """The number of a completion in the batch, squared; number 2 fails."""

    def __init__(self):
        pass

    def score(self, prompts, completions, examples):
        values = np.array([[float(text) ** 2 if text != "2" else np.nan for text in completions]])
        failures = {"exact_match": {"raised": 1, "timed_out": 0, "not_a_number": 0}}
        return Scores(values, failures, {"exact_match": {"raised": "it was 2"}})


def minus_place(params, batch):
    """Instead of a log-prob pass: under parameters p, token t of any row has -p - t."""
    return np.broadcast_to(-params - np.arange(batch.tokens.shape[1], dtype=np.float32), batch.tokens.shape)


def grpo_source(reference_params=None, samples=None, **grpo):
    settings = config(grpo={"num_generations": GROUP, **grpo})
    task = load_task(settings.task, seed=0)
    prompts = data.prompt_batches(task, BYTES, prompts_per_step=2, max_prompt_length=16, seed=0)
    sampler = Dice(None, BYTES, (258,), settings.rollout, 0)
    return GrpoSource(settings.grpo, settings.task, prompts, sampler, Judge(), minus_place, reference_params, samples)


def rolled_out(**grpo):
    """The step's batch, and the prompts and completions that it was made of."""
    source = grpo_source(**grpo)
    state = source.prompts.get_state()
    step = source.next(np.float32(0), 0, Stopwatch())
    source.prompts.set_state(state)
    prompts = [tokens for tokens in next(source.prompts).tokens for _ in range(GROUP)]
    return step, prompts, source.sampler.complete(None, prompts, step=0)[0]


def test_every_token_stands_where_the_batch_says():
    step, prompts, completions = rolled_out()
    batch = step.batch
    rewards = np.array([i**2 if i != 2 else np.nan for i in range(8)], np.float32).reshape(2, GROUP)
    advantages = np.asarray(objectives.advantages(rewards, "group").values).reshape(-1)
    for row, prompt in enumerate(prompts):
        length = int(completions.lengths[row])
        whole = [*prompt, *completions.tokens[row, :length].tolist()]
        for place in range(batch.tokens.shape[1]):
            assert batch.tokens[row, place] == (whole[place] if place < len(whole) else 0)
            assert batch.segments[row, place] == (place < len(whole))
            assert batch.positions[row, place] == place
            said = place + 1 - len(prompt)  # the completion's token that is predicted here
            if not 0 <= said < length or row == 2:  # whose reward failed
                assert batch.weights[row, place] == batch.labels[row, place] == 0
            else:
                assert batch.labels[row, place] == whole[place + 1]
                assert batch.weights[row, place] == pytest.approx(1 / (8 * length))
                assert batch.advantages[row, place] == advantages[row]
                assert batch.sampler_logprobs[row, place] == completions.logprobs[row, said]
    assert batch.old_logprobs is None
    assert batch.reference_logprobs is None
    assert [field.dtype for field in batch[:7]] == [np.int32] * 4 + [np.float32] * 3


def test_completions_that_were_cut_off_weigh_nothing_where_they_are_masked():
    step, _, completions = rolled_out(mask_truncated_completions=True)
    counts = step.batch.weights.any(axis=1)
    assert not completions.finished.all()
    np.testing.assert_array_equal(counts, completions.finished & (np.arange(8) != 2))


def test_failed_rewards_are_counted_and_left_out_of_the_means():
    step, _, completions = rolled_out()
    others = [float(i**2) for i in range(8) if i != 2]
    assert step.metrics["reward"] == pytest.approx(np.mean(others))
    assert step.metrics["rewards/exact_match/mean"] == pytest.approx(np.mean(others))
    assert step.metrics["rewards/exact_match/raised"] == 1
    assert step.metrics["completions/clipped_ratio"] == pytest.approx(1 - completions.finished.mean())
    assert step.metrics["num_tokens"] == np.count_nonzero(step.batch.segments)


def test_samples_say_prompt_completion_and_rewards_and_null_where_one_failed():
    samples = grpo_source(samples=3).next(np.float32(0), 0, Stopwatch()).samples
    assert [sample["completion"] for sample in samples] == ["0", "1", "2"]
    assert [sample["rewards"] for sample in samples] == [{"exact_match": value} for value in (0.0, 1.0, None)]
    assert len({sample["prompt"] for sample in samples}) == 1


def test_a_rollout_serves_its_iterations_and_holds_the_policy_that_it_began_with():
    source = grpo_source(num_iterations=2)
    first, second, third = (source.next(np.float32(step), step, Stopwatch()) for step in range(3))
    assert second.batch is first.batch
    assert (first.batch.old_logprobs[:, 0] == 0).all()
    assert (third.batch.old_logprobs[:, 0] == -2).all()
    assert (len(first.samples), len(second.samples), len(third.samples)) == (8, 0, 8)
    assert [source.resumable(step) for step in range(5)] == [True, False, True, False, True]


@pytest.mark.parametrize(("iterations", "passes"), [(1, 0), (2, 1)])
def test_the_old_policy_s_pass_is_made_only_where_the_update_is_not_that_pass_itself(iterations, passes):
    """With one update to a rollout its own log-probabilities are the old ones; the sampler's may differ."""
    source, calls = grpo_source(num_iterations=iterations), []
    source.logprob_pass = lambda params, batch: calls.append(params) or minus_place(params, batch)
    for step in range(iterations):
        batch = source.next(np.float32(step), step, Stopwatch()).batch
    assert calls == [0.0] * passes
    assert (batch.old_logprobs is not None) == bool(passes)


def test_a_reference_gives_its_own_log_probabilities():
    source = grpo_source(np.float32(7), beta=0.1, reference="initial")
    batch = source.next(np.float32(3), 0, Stopwatch()).batch
    np.testing.assert_array_equal(batch.reference_logprobs, minus_place(np.float32(7), batch))


def test_a_source_of_rollouts_goes_on_from_its_position():
    source = grpo_source()
    source.next(np.float32(0), 0, Stopwatch())
    position = source.position()
    expected = source.next(np.float32(0), 1, Stopwatch())
    other = grpo_source()
    other.seek(position)
    got = other.next(np.float32(0), 1, Stopwatch())
    np.testing.assert_array_equal(got.batch.tokens, expected.batch.tokens)
    assert got.metrics == expected.metrics


@pytest.mark.parametrize(
    ("length", "padded"), [(1, 16), (16, 16), (17, 24), (24, 24), (25, 32), (33, 48), (1025, 1536)]
)
def test_rows_are_padded_to_a_power_of_two_or_half_as_much_again(length, padded):
    assert padded_length(length, 2048) == padded


def test_rows_are_never_padded_beyond_the_longest_that_there_can_be():
    assert padded_length(1100, 1200) == 1200
    assert padded_length(3, 9) == 9


def sft_source(epochs=1):
    problems = [Example([{"role": "user", "content": f"{i}"}], "x", "x") for i in range(8)]
    settings = DataConfig(source="task", max_length=8, packing=False, epochs=epochs)
    return SftSource(data.sft_batches(settings, BYTES, task=Task("eight", problems, []), batch_size=2, seed=0))


def read(source):
    """All that is left: the tokens of each batch, and whether it was called the last."""
    steps = []
    while not (steps and steps[-1].last):
        steps.append(source.next(None, len(steps), Stopwatch()))
    return steps


def test_the_last_batch_is_known_to_be_the_last():
    source = sft_source()
    assert [step.last for step in read(source)] == [False, False, False, True]
    with pytest.raises(StopIteration):
        source.next(None, 4, Stopwatch())


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_source_of_data_goes_on_from_its_position_though_it_reads_ahead(done):
    source = sft_source(epochs=2)
    for step in range(done):
        source.next(None, step, Stopwatch())
    position = source.position()
    other = sft_source(epochs=2)
    other.seek(position)
    for got, expected in zip(read(other), read(source), strict=True):
        np.testing.assert_array_equal(got.batch.tokens, expected.batch.tokens)
        assert got.metrics == expected.metrics


def test_a_reward_of_weight_zero_is_watched_and_never_counts():
    values = np.array([[1.0, 2.0, np.nan], [np.nan, 5.0, 6.0]])
    np.testing.assert_array_equal(weighted_sum(values, np.array([2.0, 0.0])), [2.0, 4.0, np.nan])
    np.testing.assert_array_equal(weighted_sum(values, np.array([1.0, 1.0])), [np.nan, 7.0, np.nan])
