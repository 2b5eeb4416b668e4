"""GRPO's source without a model, with random completions and rewards by their numbers; a token's distribution."""

from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import Mesh
from tiny import TEACHER, config, forward_of

from mllm.algorithms.recipes import recipe_of
from mllm.data.tasks.load import load as load_task
from mllm.model import tokenizer as tokenizers
from mllm.parallel.mesh import AXES
from mllm.rewards.runner import RewardRunner
from mllm.sampler.completion import Completion
from mllm.sampler.sampler import Sampler
from mllm.training.recipe import Parts, Sampling

BYTES = tokenizers.bytes_tokenizer()
GROUP, LIMIT = 4, 4


class RandomCompletions(Sampler):
    """Completions of 1 to 4 tokens by the step. A completion of 4 tokens is cut off. A longer completion keeps more."""

    def complete(self, params, prompts, *, step, first_sequence=0, greedy=False, ended=None):
        rng = np.random.default_rng(step + first_sequence)
        completions = []
        for number in range(len(prompts)):
            length = int(rng.integers(1, LIMIT + 1))
            tokens, logprobs = rng.integers(1, 256, length).tolist(), (-rng.random(length, np.float32) - 1).tolist()
            kept, text = [length / LIMIT] * length, f"{first_sequence + number}"
            norms = [token / 256 for token in tokens]
            sampled = array("i", tokens), *(array("f", x) for x in (logprobs, kept, norms))
            completions.append(Completion(*sampled, finished=length < LIMIT, text=text))
        return completions


class InstantRewards(RewardRunner):
    """Rewards with a `score` that needs no process."""

    def scoring(self, count):
        return nullcontext(SimpleNamespace(finish=self.score))


class SquareRewards(InstantRewards):
    """The reward of a completion is its number in the batch, squared; it fails for the numbers in `bad`."""

    def __init__(self, bad=(), weight=1.0):
        self.names, self.weights = ["exact_match"], np.array([weight])
        self.bad = {str(number) for number in bad}

    def score(self, samples):
        self.samples = samples
        texts = [sample.completion for sample in samples]
        return [[("raised", "too many") if text in self.bad else ("value", float(text) ** 2)] for text in texts]


def linear_logprobs(params, batch):
    """Stands in for the log-prob pass: token t of any row has -params - t."""
    return np.broadcast_to(-params - np.arange(batch.tokens.shape[1], dtype=np.float32), batch.tokens.shape)


def sequences(batch):
    """Each sequence of a packed batch by its tokens: its fields as rows of an array, [fields, tokens]."""
    packed = {}
    fields = [*batch[:5], *(batch.inputs or ())]
    for row in zip(*(field for field in fields if field is not None), strict=True):
        for segment in range(1, row[2].max() + 1):
            fields = np.array([field[row[2] == segment] for field in row], np.float64)
            packed[*fields[0].astype(int), int(fields[3, -1])] = fields
    return packed


def sampling_logprobs(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of a token, float64. The filters apply in order: temperature, top_k, top_p, min_p."""
    logits = np.array(logits, np.float64)
    probability = np.exp(logits / temperature)
    order = np.argsort(-probability)[: top_k or None]
    mass = np.cumsum(probability[order]) / probability[order].sum()
    order = order[: np.searchsorted(mass, top_p) + 1] if top_p < 1 else order
    order = [token for token in order if probability[token] >= min_p * probability.max()]
    result = np.full(probability.shape, -np.inf)
    result[order] = np.log(probability[order] / probability[order].sum())
    return result


def grpo_source(samples=None, rewards=None, sampler=RandomCompletions, logprobs=None, algorithm="grpo", **grpo):
    """The source, by default with SquareRewards; `grpo` are settings of that section."""
    settings = config(
        algorithm,
        grpo={"num_generations": GROUP, **grpo},
        rollout={"max_completion_length": 2 * LIMIT},
        log={"samples": samples},
        **({"distill": {}, "teacher": TEACHER} if algorithm == "distill" else {}),
    )
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), AXES)  # also where there are several processes
    renderer = tokenizers.Renderer(BYTES)
    completing = sampler(None, renderer, (258,), settings.rollout, 0)
    sampling = Sampling(load_task(settings.task), completing, rewards or SquareRewards())
    source = recipe_of(settings).source(Parts(mesh, forward_of(None, mesh, settings), renderer, None, sampling))
    if hasattr(source.learning.ask_policies, "logprobs"):
        source.learning.ask_policies.logprobs = logprobs or linear_logprobs
    return source
