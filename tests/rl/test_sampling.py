"""Sampled tokens and their log-probabilities against the distribution, computed in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mllm.rl.sampling import exclude, greedy, sample, sequence_keys

DRAWS = 20_000
SETTINGS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.5, "top_k": 0, "top_p": 1.0},
    {"temperature": 2.0, "top_k": 4, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.8},
]


def distribution(logits, temperature, top_k, top_p):
    """Temperature, then the k likeliest, then the shortest of their prefixes that has top_p; renormalised."""
    probability = np.exp(np.float64(logits) / temperature)
    order = np.argsort(-probability)
    order = order[:top_k] if top_k else order
    mass = np.cumsum(probability[order]) / probability[order].sum()
    order = order[: np.searchsorted(mass, top_p) + 1] if top_p < 1 else order
    kept = np.zeros_like(probability)
    kept[order] = probability[order] / probability[order].sum()
    return kept


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_as_frequent_as_the_distribution_says(settings):
    logits = np.random.default_rng(0).normal(size=8).astype(np.float32)
    keys = sequence_keys(0, 0, jnp.arange(DRAWS))
    tokens, _ = sample(jnp.broadcast_to(logits, (DRAWS, 8)), keys, 0, **settings)
    counts, expected = np.bincount(tokens, minlength=8), DRAWS * distribution(logits, **settings)
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = np.sum((counts - expected)[possible] ** 2 / expected[possible])
    assert chi_square < 24.3  # exceeded once in a thousand with 7 degrees of freedom


@pytest.mark.parametrize("settings", SETTINGS)
def test_log_probabilities_are_those_of_the_distribution_drawn_from(settings):
    logits = np.random.default_rng(1).normal(scale=2, size=(50, 17)).astype(np.float32)
    tokens, logprobs = sample(jnp.asarray(logits), sequence_keys(0, 0, jnp.arange(50)), 0, **settings)
    expected = [np.log(distribution(row, **settings)[token]) for row, token in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-5)


def kept(probabilities, top_k=0, top_p=1.0):
    return np.flatnonzero(np.isfinite(exclude(jnp.log(jnp.array([probabilities])), top_k, top_p)[0])).tolist()


def test_the_token_that_reaches_top_p_is_kept():
    probabilities = [0.25, 0.5, 0.125, 0.125]
    assert kept(probabilities, top_p=0.49) == [1]
    assert kept(probabilities, top_p=0.51) == [0, 1]
    assert kept(probabilities, top_p=0.74) == [0, 1]
    assert kept(probabilities, top_p=0.76) == [0, 1, 2, 3]  # the last two are as likely as each other


def test_one_token_is_always_kept():
    assert kept([0.3, 0.7], top_p=1e-9) == [1]


def test_top_p_applies_to_the_tokens_that_top_k_keeps():
    probabilities = [0.4, 0.3, 0.2, 0.1]
    assert kept(probabilities, top_p=0.5) == [0, 1]
    assert kept(probabilities, top_k=2, top_p=0.5) == [0]  # 0.4 of 0.7 is more than half


def test_a_top_k_of_the_whole_vocabulary_or_more_keeps_every_token():
    assert kept([0.7, 0.3], top_k=2) == kept([0.7, 0.3], top_k=100) == [0, 1]


def draw(seed=0, step=0, sequences=range(30), position=0):
    sequences = jnp.array(sequences)
    keys = sequence_keys(seed, step, sequences)
    tokens, _ = sample(jnp.zeros((len(sequences), 50)), keys, position, temperature=1.0, top_k=0, top_p=1.0)
    return tokens.tolist()


def test_a_token_depends_on_seed_step_sequence_and_position():
    assert draw() == draw()
    others = [draw(), draw(seed=1), draw(step=1), draw(sequences=range(30, 60)), draw(position=1)]
    for i, one in enumerate(others):
        for other in others[:i]:
            assert np.mean(np.equal(one, other)) < 0.3


def test_a_token_does_not_depend_on_the_other_sequences():
    assert draw(sequences=[7, 3]) == [draw()[7], draw()[3]]


def test_a_token_does_not_depend_on_jax_s_default_generator():
    with jax.default_prng_impl("rbg"):
        other = draw()
    assert other == draw()


def test_greedy_takes_the_likeliest_token_with_certainty():
    tokens, logprobs = greedy(jnp.array([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]]))
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0, 0]
