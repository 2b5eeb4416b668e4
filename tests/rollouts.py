"""GRPO's source without a model, with random completions and rewards by their numbers; a token's distribution."""

from typing import ClassVar

import jax
import numpy as np
from jax.sharding import Mesh
from tiny import config, make_forward

from mllm.data.tasks.load import load as load_task
from mllm.model import tokenizer as tokenizers
from mllm.parallel.mesh import AXES
from mllm.rl.grpo_source import GrpoSource
from mllm.rl.rewards import Failure, RewardRunner, Scores
from mllm.rl.rollout import Completions, Sampler

BYTES = tokenizers.bytes_tokenizer()
GROUP, LIMIT = 4, 4


class RandomCompletions(Sampler):
    """Completions of 1 to 4 tokens that depend on the step; those of 4 are cut off."""

    def complete(self, params, prompts, *, step, first_sequence=0, greedy=False):
        rng = np.random.default_rng(step + first_sequence)
        lengths = rng.integers(1, LIMIT + 1, len(prompts), dtype=np.int32)
        tokens = rng.integers(1, 256, (len(prompts), LIMIT), dtype=np.int32)
        logprobs = -rng.random(tokens.shape, dtype=np.float32) - 1
        return Completions(tokens, logprobs, lengths, lengths < LIMIT, texts=[f"{i}" for i in range(len(prompts))])


class SquareRewards(RewardRunner):
    """The reward of a completion is its number in the batch, squared; it fails for the numbers in `bad`."""

    codes: ClassVar = {}

    def __init__(self, bad=(), weight=1.0):
        self.names, self.weights = ["exact_match"], np.array([weight])
        self.bad = {str(number) for number in bad}

    def score(self, examples, completions):
        values = np.array([[np.nan if text in self.bad else float(text) ** 2] for text in completions.texts])
        kinds = np.where(np.isnan(values), "raised", "value")
        return Scores(values, kinds, [Failure("exact_match", "raised", "too many")] * int(np.isnan(values).sum()))


def linear_logprobs(params, batch):
    """Stands in for the log-prob pass: token t of any row has -params - t."""
    return np.broadcast_to(-params - np.arange(batch.tokens.shape[1], dtype=np.float32), batch.tokens.shape)


def sequences(batch):
    """Each sequence of a packed batch by its tokens: its fields as rows of an array, [fields, tokens]."""
    found = {}
    for row in zip(*(field for field in batch if field is not None), strict=True):
        for segment in range(1, row[2].max() + 1):
            fields = np.array([field[row[2] == segment] for field in row], np.float64)
            found[*fields[0].astype(int), int(fields[3, -1])] = fields
    return found


def sampling_logprobs(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The distribution of a token: temperature, the k likeliest, the fewest of these that have top_p; float64."""
    probability = np.exp(np.float64(logits) / temperature)
    order = np.argsort(-probability)[: top_k or None]
    mass = np.cumsum(probability[order]) / probability[order].sum()
    order = order[: np.searchsorted(mass, top_p) + 1] if top_p < 1 else order
    result = np.full(probability.shape, -np.inf)
    result[order] = np.log(probability[order] / probability[order].sum())
    return result


def grpo_source(samples=None, rewards=None, sampler=RandomCompletions, **grpo):
    """The source with SquareRewards, unless others are given; `grpo` are settings of that section."""
    settings = config(grpo={"num_generations": GROUP, **grpo})
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), AXES)  # also where there are several processes
    source = GrpoSource(
        settings.grpo,
        load_task(settings.task, seed=0),
        sampler(None, BYTES, (258,), settings.rollout, 0),
        rewards or SquareRewards(),
        make_forward(settings, None, mesh),
        batch_size=settings.batch_size,
        steps=settings.steps,
        seed=0,
        logged_samples=samples,
    )
    source.logprob_pass = linear_logprobs
    return source
