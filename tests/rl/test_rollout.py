"""Rollouts against the model without cache, padding or batch, applied to each whole sequence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rollouts import sampling_logprobs
from tiny import ARCHITECTURE

from mllm.config.schema import RolloutConfig
from mllm.model.architecture import Qwen2Config
from mllm.model.decoder import Qwen2
from mllm.rl import rollout, sampling
from mllm.rl.rollout import generate

VOCABULARY, PAD, STOPS = 40, 39, (3, 11, 12, 20, 33)
NO_STOPS = (-1,) * len(STOPS)  # as many as STOPS, so that the same programs serve
LIMIT = 6
OPTIONS = RolloutConfig(
    max_prompt_length=12, max_completion_length=LIMIT, temperature=0.8, top_k=25, top_p=0.9, batch_size=5
)


def make_model(tied=True, dtype=jnp.float32):
    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "initializer_range": 0.3}  # far from uniform
    config = Qwen2Config.from_hf({**ARCHITECTURE, **sizes}, "test")
    return Qwen2(config, rngs=nnx.Rngs(0), dtype=dtype)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in (3, 8, 1, 12, 5, 7, 2, 4, 11, 6, 3, 3)]


def complete(model, prompts, options=OPTIONS, *, seed=0, step=0, **arguments):
    """`generate` with this file's stop tokens and padding."""
    arguments = {"stop_ids": STOPS, "pad_id": PAD, "seed": seed, "step": step, **arguments}
    return generate(*nnx.split(model), prompts, options=options, **arguments)


@pytest.fixture(scope="module")
def completions(model, prompts):
    return complete(model, prompts)


@partial(jax.jit, static_argnums=0)
def hidden_states(graphdef, params, tokens):
    hidden, _ = nnx.merge(graphdef, params)(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
    return hidden[0]


def completion_logits(model, prompt, tokens):
    """The float64 logits that predict each of a completion's tokens; padded to one length, so that it compiles once."""
    whole = [*prompt, *tokens]
    padded = whole + [0] * (OPTIONS.max_prompt_length + LIMIT - len(whole))
    hidden = hidden_states(*nnx.split(model), jnp.array([padded]))[len(prompt) - 1 : len(whole) - 1]
    return np.float64(hidden) @ np.float64(model.head_weight).T


@jax.jit
def gumbel_noise(keys):
    def at(key, position):
        return jax.random.gumbel(jax.random.fold_in(key, position), (VOCABULARY,))

    return jax.vmap(lambda key: jax.vmap(partial(at, key))(jnp.arange(LIMIT)))(keys)


def test_completions_and_log_probabilities_are_those_of_the_model_without_a_cache(model, prompts):
    completions = complete(model, prompts, seed=4, step=9, first_sequence=100)
    noise = np.float64(gumbel_noise(sampling.sequence_keys(4, 9, 100 + jnp.arange(len(prompts)))))
    for row, prompt in enumerate(prompts):
        length = int(completions.lengths[row])
        tokens = completions.tokens[row, :length].tolist()
        expected = [
            sampling_logprobs(z, OPTIONS.temperature, OPTIONS.top_k, OPTIONS.top_p)
            for z in completion_logits(model, prompt, tokens)
        ]
        assert tokens == [int(np.argmax(logprob + noise[row, t])) for t, logprob in enumerate(expected)]
        logprobs = [logprob[token] for logprob, token in zip(expected, tokens, strict=True)]
        np.testing.assert_allclose(completions.logprobs[row], logprobs + [0] * (LIMIT - length), atol=1e-4)


def test_a_completion_ends_with_its_first_stop_token_or_at_the_limit(model, prompts, completions):
    assert {True, False} == set(completions.finished.tolist())
    for tokens, length, finished in zip(completions.tokens, completions.lengths, completions.finished, strict=True):
        ends = np.flatnonzero(np.isin(tokens[:length], STOPS)).tolist()
        assert ends == ([length - 1] if finished else [])
        assert finished or length == LIMIT
        assert (tokens[length:] == PAD).all()
    unstopped = complete(model, prompts, stop_ids=NO_STOPS)
    assert (unstopped.lengths == LIMIT).all()
    assert not unstopped.finished.any()


def test_greedy_completions_follow_the_likeliest_token(model, prompts):
    completions = complete(model, prompts, greedy=True)
    for prompt, row, length in zip(prompts, completions.tokens, completions.lengths, strict=True):
        tokens = row[:length].tolist()
        assert completion_logits(model, prompt, tokens).argmax(-1).tolist() == tokens
    assert not completions.logprobs.any()


def test_seed_and_step_choose_the_completions_and_need_no_further_program(model, prompts, completions, monkeypatch):
    traces = []
    sequence_keys = sampling.sequence_keys
    monkeypatch.setattr(sampling, "sequence_keys", lambda *given: traces.append(1) or sequence_keys(*given))
    jax.tree.map(np.testing.assert_array_equal, complete(model, prompts), completions)
    for other in (complete(model, prompts, seed=1), complete(model, prompts, step=1)):
        assert (completions.tokens != other.tokens).any(-1).mean() > 0.5
    complete(model, prompts[3:6], seed=2, step=2, first_sequence=7)
    assert not traces


def test_decoding_ends_when_every_prompt_s_completion_has_ended(model, prompts, completions, monkeypatch):
    """Three prompts of five rows: the two spare rows, whose tokens are no stop tokens, must not be waited for."""
    lengths, decode = [], rollout.decode

    def recorded(*arguments, **settings):
        state = decode(*arguments, **settings)
        lengths.append(int(state.num_tokens))
        return state

    monkeypatch.setattr(rollout, "decode", recorded)
    first_tokens = completions.tokens[1:4, 0].tolist()
    ended = complete(model, prompts[1:4], stop_ids=first_tokens + [-1] * 2, first_sequence=1)
    assert ended.lengths.tolist() == [1] * 3
    assert lengths == [1]


def test_the_chunks_of_the_decode_loop_change_no_bit_and_poll_is_called_between_them(
    model, prompts, completions, monkeypatch
):
    polls = []
    monkeypatch.setattr(rollout, "next_chunk", lambda steps, seconds: 3)
    jax.tree.map(np.testing.assert_array_equal, complete(model, prompts, poll=lambda: polls.append(1)), completions)
    assert len(polls) > -(-len(prompts) // OPTIONS.batch_size)


@pytest.mark.parametrize(("steps", "seconds", "then"), [(1, 9.0, 1), (8, 0.01, 16), (8, 0.25, 8), (8, 1.0, 2)])
def test_a_chunk_takes_about_a_quarter_of_a_second(steps, seconds, then):
    assert rollout.next_chunk(steps, seconds) == then


def test_in_bfloat16_the_log_probabilities_are_those_of_the_model_without_a_cache(prompts):
    model = make_model(tied=False, dtype=jnp.bfloat16)
    options = RolloutConfig(max_prompt_length=12, max_completion_length=LIMIT)
    completions = complete(model, prompts, options)
    for row, prompt in enumerate(prompts):
        tokens = completions.tokens[row, : completions.lengths[row]].tolist()
        logits = completion_logits(model, prompt, tokens)
        expected = [sampling_logprobs(z)[token] for z, token in zip(logits, tokens, strict=True)]
        np.testing.assert_allclose(completions.logprobs[row, : len(tokens)], expected, atol=0.05)


@pytest.mark.parametrize("lengths", [[], [1, 0], [13, 1]])
def test_prompts_that_are_missing_empty_or_too_long_are_refused(model, lengths):
    with pytest.raises(ValueError, match="prompts: expected 1 to 12 tokens each"):
        complete(model, [[1] * length for length in lengths])
