"""Extreme but finite numbers give finite losses and gradients, with every loss type and through a whole step.

Softmaxes that are certain, policies that are far apart, batches in which nothing counts, completions without a token
and of the greatest length. Left out: numbers that aren't finite to begin with (such an update is skipped:
test_train_step), and the heads against float64 (tests/kernels).
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollouts import RandomCompletions, grpo_source, sequences
from tiny import config, make_trainer

from mllm.model.layout import parameter_name
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.rl import sampling
from mllm.stopwatch import Stopwatch
from mllm.train.step import init_state

OPTIMIZER = {"learning_rate": 1e-2, "weight_decay": 0.1}
EVERYTHING = {"num_iterations": 2, "beta": 0.1, "reference": "initial", "entropy_coef": 0.01, "epsilon_high": 0.3}
GRPO = ("grpo", "dapo", "prompt_mean", "dr_grpo", "gspo")
SETTINGS = {
    "sft in bfloat16": config("sft", optimizer=OPTIMIZER, model={"dtype": "bfloat16"}),
    **{loss: config(optimizer=OPTIMIZER, grpo={**EVERYTHING, "loss_type": loss}) for loss in ("grpo", "gspo")},
}
"""The other loss types differ in the tokens' weights alone, which the batch holds."""
QUICKLY = {"xla_backend_optimization_level": 0}
"""Compiled in half the time."""


class FixedLengths(RandomCompletions):
    """Completions of these lengths. A rollout's own completions have at least the token that ended them."""

    LENGTHS = (0, 1, 4, 2, 4, 4, 1, 3)

    def complete(self, params, prompts, *, step, first_sequence=0, greedy=False):
        completions, texts = super().complete(params, prompts, step=step)
        lengths = np.array(self.LENGTHS, np.int32)
        return completions._replace(lengths=lengths, finished=lengths < 4), texts


@cache
def make_batch(loss_type):
    """A batch with completions without a token, of one token and of the greatest length."""
    source = grpo_source(sampler=FixedLengths, **EVERYTHING, loss_type=loss_type)
    return source.next(np.float32(5), 0, Stopwatch(), np.float32(5)).batch


def batch_for(name):
    return make_batch("gspo" if name == "gspo" else "grpo")


@cache
def trainer(name):
    """A function that makes the first state, whose memory an update takes, and the update."""
    settings = SETTINGS[name]
    mesh = make_mesh(settings.mesh)
    policy, optimizer, train_step = make_trainer(settings, mesh)
    first = init_state(policy.initial_params(), optimizer)
    shardings, values = jax.tree.map(lambda leaf: leaf.sharding, first), jax.device_get(first)

    def state(**factors):
        """The first state with some parameters multiplied."""
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf * np.float32(factors.get(parameter_name(path), 1)), values.params
        )
        return jax.device_put(values._replace(params=params), shardings)

    program = train_step.lower(first, shard_batch(mesh, batch_for(name))).compile(QUICKLY)
    return state, lambda state, batch: program(state, shard_batch(mesh, batch))


def update(name, batch, **factors):
    """Parameters before, and state and metrics after the first update; some parameters are multiplied before it."""
    state, train_step = trainer(name)
    before = jax.device_get(state(**factors).params)
    after, metrics = train_step(state(**factors), batch)
    return before, jax.device_get(after), {metric: float(value) for metric, value in metrics.items()}


def assert_sound(state, metrics):
    assert metrics["skipped"] == 0
    assert {metric: value for metric, value in metrics.items() if not np.isfinite(value)} == {}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("where", ["norm", "embed"])
@pytest.mark.parametrize("name", SETTINGS)
def test_softmaxes_that_are_certain_give_finite_updates(name, where):
    """Large hidden states or a large vocabulary matrix give logits from 1e4 to 1e11."""
    losses = []
    for factor in (1e6, 1e12):
        _, state, metrics = update(name, batch_for(name), **{where: factor})
        assert_sound(state, metrics)
        assert 0 <= metrics["entropy"] < 1e-3
        losses.append(metrics["loss"])
        # GRPO clips these tokens: their probabilities are far from those that they were sampled with.
        assert (metrics["grad_norm"] > 0) == (SETTINGS[name].algorithm == "sft")
    if SETTINGS[name].algorithm == "sft":
        assert 1e4 < losses[0] < 1e9 < losses[1]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 0.9), (0, 0.9)])
@pytest.mark.parametrize("scale", [1e4, 1e11])
def test_a_token_drawn_from_a_certain_softmax_is_the_likeliest_and_certain(scale, top_k, top_p):
    logits = scale * jax.random.normal(jax.random.key(0), (4, 260))
    keys = sampling.sequence_keys(0, 0, jnp.arange(4))
    first = jnp.zeros(len(keys), jnp.int32)
    tokens, logprobs, _ = sampling.sample(logits, keys, first, temperature=0.5, top_k=top_k, top_p=top_p)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_array_equal(logprobs, 0)


@pytest.mark.parametrize("loss_type", GRPO)
def test_policies_that_are_far_apart_give_finite_updates(loss_type):
    """Trainer, sampler, old and reference policy differ by up to 1e12 nats; exp overflows float32 from 89 on."""
    batch, rng = make_batch(loss_type), np.random.default_rng(0)
    name = "gspo" if loss_type == "gspo" else "grpo"
    distances = np.array([0, 30, 89, 1e4, 1e12], np.float32)
    for _ in range(4):
        sampler, old, reference = rng.choice([*distances, *-distances], (3, *batch.weights.shape)) - 5.5
        if name == "gspo":
            old[:] = old[:, :1]  # for a sequence's mean to be as far away
        far = batch._replace(sampler_logprobs=sampler, old_logprobs=old, reference_logprobs=reference)
        assert_sound(*update(name, far)[1:])


@pytest.mark.parametrize("name", SETTINGS)
def test_completions_without_a_token_and_of_the_greatest_length_give_an_update(name):
    batch = batch_for(name)
    if name in GRPO:
        learned = [np.count_nonzero(fields[4]) for fields in sequences(batch).values()]
        assert sorted(learned) == sorted(FixedLengths.LENGTHS)[1:]  # nothing can be learned without a token
    _, state, metrics = update(name, batch)
    assert_sound(state, metrics)
    assert metrics["grad_norm"] > 0
