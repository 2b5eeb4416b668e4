"""Sampled tokens and their log-probabilities against the distribution, computed in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollouts import sampling_logprobs

from mllm.config.rollout import RolloutConfig
from mllm.sampler.sampling import draw, exclude, greedy, gumbel_noise, sample, sequence_keys

sampled = jax.jit(sample, static_argnames="options")
DRAWS = 20_000
LIMITS = {"max_prompt_length": 1, "max_completion_length": 1}
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 6, "top_p": 0.9, "min_p": 0.35},
    {"temperature": 1.0, "min_p": 0.35},
]


def test_large_noise_has_all_bits():
    ends = np.arange(2000, dtype=np.uint32)
    bits = np.concatenate([ends, np.random.default_rng(0).integers(2**32, size=4000, dtype=np.uint32), ~ends[::-1]])
    noise = np.asarray(gumbel_noise(jnp.asarray(bits)))
    u = (bits + 0.5) * 2.0**-32  # float64
    exact = -np.log(-np.log1p(u - 1))
    rounded = 2.0**-24 * np.minimum(1, 1 - u + 2.0**-24) / (-u * np.log1p(u - 1))  # 1 - u is, to float32
    assert (np.abs(noise - exact) <= rounded + 2.0**-22 * (1 + np.abs(exact)))[2000:].all()
    assert -3 < noise[:2000].min() <= noise[:2000].max() < -2.5  # 1 - u has 24 bits there
    assert (np.diff(noise[-2000:]) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_as_frequent_as_their_distribution(settings):
    """The log-probabilities also tell kept tokens from the rest."""
    logits = np.random.default_rng(0).normal(size=8).astype(np.float32)
    rows, keys = jnp.broadcast_to(logits, (DRAWS, 8)), sequence_keys(0, 0, jnp.arange(DRAWS))
    options = RolloutConfig(**LIMITS, **settings)
    drawn = jax.tree.map(np.asarray, sampled(rows, keys, jnp.zeros(DRAWS, jnp.int32), options))
    drawn_from, whole = sampling_logprobs(logits, **settings), sampling_logprobs(logits, settings["temperature"])
    counts, expected = np.bincount(drawn.tokens, minlength=8), DRAWS * np.exp(drawn_from)
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = np.sum((counts - expected)[possible] ** 2 / expected[possible])
    assert chi_square < 24.3  # exceeded once in a thousand with 7 degrees of freedom
    np.testing.assert_allclose(drawn.logprobs, whole[drawn.tokens], rtol=1e-5, atol=1e-5)
    if settings == SETTINGS[0]:
        assert drawn.kept is None
    else:
        np.testing.assert_allclose(drawn.kept, np.exp(whole - drawn_from)[drawn.tokens], rtol=1e-5)
        assert drawn.kept.max() < 0.9


@pytest.mark.parametrize(
    ("probabilities", "top_k", "top_p", "kept"),
    [
        # The token that reaches top-p is kept.
        ([0.25, 0.5, 0.125, 0.125], 0, 0.49, [1]),
        ([0.25, 0.5, 0.125, 0.125], 0, 0.76, [0, 1, 2, 3]),  # the last two are as likely as each other
        # top-p applies to the tokens that top-k keeps: 0.4 of 0.7 is more than half.
        ([0.4, 0.3, 0.2, 0.1], 0, 0.5, [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], 2, 0.5, [0]),
        # A top-k of the whole vocabulary or more keeps every token.
        ([0.7, 0.3], 100, 1.0, [0, 1]),
    ],
)
def test_top_k_and_top_p_keep_at_least_one_likely_token(probabilities, top_k, top_p, kept):
    logits = exclude(jnp.log(jnp.array([probabilities])), top_k, top_p)
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == kept


@pytest.mark.parametrize(("scale", "top_p"), [(0.1, 0.05), (3.0, 0.5), (3.0, 0.999), (1e11, 0.9)])
def test_top_p_keeps_the_tokens_of_sorted_logits_and_ties(scale, top_p):
    logits = scale * np.random.default_rng(0).normal(size=(16, 30_000)).astype(np.float32)
    logits[:8, ::2] = logits[:8, 1::2]  # pairs
    logits[3:5] = np.round(logits[3:5])
    descending = -np.sort(-logits.astype(np.float64), axis=1)
    probability = np.exp(descending - descending[:, :1])
    probability /= probability.sum(1, keepdims=True)
    before = np.cumsum(probability, axis=1) - probability
    # float32 sums of 30,000 probabilities are off by some 1e-7, as are sums of sorted probabilities
    limits = top_p - 1e-6, top_p + 1e-6
    fewest, most = (np.where(before < x, descending, np.inf).min(1, keepdims=True) for x in limits)
    kept = np.asarray(exclude(jnp.asarray(logits), 0, top_p))
    least = np.where(np.isfinite(kept), kept, np.inf).min(1, keepdims=True)
    np.testing.assert_array_equal(kept, np.where(logits >= least, logits, -np.inf))
    assert np.all((least <= fewest) & (least >= most))


@pytest.mark.slow
def test_a_certain_softmax_draws_the_likeliest_token():
    logits = 1e11 * jax.random.normal(jax.random.key(0), (4, 260))
    keys, first = sequence_keys(0, 0, jnp.arange(4)), jnp.zeros(4, jnp.int32)
    options = RolloutConfig(**LIMITS, temperature=0.5, top_k=5, top_p=0.9)
    tokens, logprobs, _, norms = sampled(logits, keys, first, options)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_array_equal((logprobs, norms), 0)


def test_keys_do_not_depend_on_the_process_s_default_generator():
    keys = sequence_keys(0, 0, jnp.arange(3))
    with jax.default_prng_impl("rbg"):
        assert (sequence_keys(0, 0, jnp.arange(3)) == keys).all()


@pytest.mark.parametrize("on_a_gpu", [True, False])
def test_a_flag_chooses_greedy_or_sampled_without_gpu_branches(on_a_gpu, monkeypatch):
    options = RolloutConfig(**LIMITS, top_p=0.7)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.float32)
    given = logits, sequence_keys(0, 0, jnp.arange(64)), jnp.zeros(64, jnp.int32)

    def program():
        return jax.jit(lambda likeliest: draw(*given, likeliest, options))

    text = program().trace(True).lower(lowering_platforms=("cuda" if on_a_gpu else "cpu",)).as_text()
    assert text.count("stablehlo.case") == (2 if on_a_gpu else 3)  # two choose the platform: they are constant
    if on_a_gpu:
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda logits, cuda, default: cuda(logits))
    run, expected = program(), (greedy(logits, options), jax.jit(lambda: sample(*given, options))())
    for likeliest, right in zip((True, False), expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, run(likeliest), right)
    assert (expected[0].tokens != expected[1].tokens).any()
