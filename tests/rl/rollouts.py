"""A source of rollouts in which no model has a part: completions by dice, rewards by number."""

import numpy as np
from tiny import config

from mllm.data import pipeline as data
from mllm.data.tasks import load as load_task
from mllm.model import tokenizer as tokenizers
from mllm.rl.grpo_source import GrpoSource
from mllm.rl.rewards import Failure, RewardRunner, Scores
from mllm.rl.rollout import Completions
from mllm.rl.sampler import Sampler

BYTES = tokenizers.bytes_tokenizer()
GROUP, LIMIT = 4, 4


class Dice(Sampler):
    """Completions of 1 to 4 tokens that depend on the step; those of 4 are cut off."""

    def complete(self, params, prompts, *, step, first_sequence=0, greedy=False):
        rng = np.random.default_rng(step)
        lengths = rng.integers(1, LIMIT + 1, len(prompts), dtype=np.int32)
        tokens = rng.integers(1, 256, (len(prompts), LIMIT), dtype=np.int32)
        logprobs = -rng.random(tokens.shape, dtype=np.float32) - 1
        return Completions(tokens, logprobs, lengths, lengths < LIMIT), [f"{i}" for i in range(len(prompts))]


class Judge(RewardRunner):
    """The number of a completion in the batch, squared; the numbers in `bad` fail."""

    def __init__(self, bad):
        self.bad = {str(number) for number in bad}

    def score(self, prompts, completions, examples, poll=lambda: None):
        poll()
        values = np.array([[np.nan if text in self.bad else float(text) ** 2 for text in completions]])
        failures = [Failure("exact_match", "raised", "too many") for text in completions if text in self.bad]
        return Scores(values, failures)


def minus_place(params, batch):
    """Instead of a log-prob pass: under parameters p, token t of any row has -p - t."""
    return np.broadcast_to(-params - np.arange(batch.tokens.shape[1], dtype=np.float32), batch.tokens.shape)


def grpo_source(reference_params=None, samples=None, bad=(), task=None, poll=lambda: None, sampler=Dice, **grpo):
    settings = config(grpo={"num_generations": GROUP, **grpo}, task=task or {})
    problems = load_task(settings.task, seed=0)
    prompts = data.prompt_batches(problems, BYTES, prompts_per_step=2, max_prompt_length=16, seed=0)
    dice = sampler(None, BYTES, (258,), settings.rollout, 0)
    places = settings.grpo, settings.task, prompts, dice, Judge(bad), minus_place, reference_params, samples
    return GrpoSource(*places, poll=poll)
