"""Rollouts against a decoder without cache, padding or batch: the whole sequence again for every token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mllm.config.schema import RolloutConfig
from mllm.model.decoder import Qwen2, Qwen2Config
from mllm.rl import rollout, sampling
from mllm.rl.rollout import generate
from mllm.run.signals import Interrupted

VOCABULARY, PAD, STOPS = 40, 39, (3, 11, 12, 20, 33)
LIMIT = 6
OPTIONS = RolloutConfig(
    max_prompt_length=12, max_completion_length=LIMIT, temperature=0.8, top_k=25, top_p=0.9, batch_size=5
)


def make_model(tied=True, dtype=jnp.float32):
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        initializer_range=0.3,  # far from uniform
    )
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


@partial(jax.jit, static_argnums=0)
def hidden_states(graphdef, params, tokens):
    hidden, _ = nnx.merge(graphdef, params)(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
    return hidden[0]


def all_logits(model, tokens):
    """The float64 logits behind each token of one sequence; padded to one length, so that it compiles once."""
    padded = tokens + [0] * (OPTIONS.max_prompt_length + LIMIT - len(tokens))
    hidden = hidden_states(*nnx.split(model), jnp.array([padded]))
    return np.float64(hidden) @ np.float64(model.head_weight).T


def sampled_distribution(logits, options):
    """Log-probabilities after temperature, top-k and top-p; float64."""
    probability = np.exp(logits / options.temperature)
    order = np.argsort(-probability)[: options.top_k or None]
    mass = np.cumsum(probability[order]) / probability[order].sum()
    order = order[: np.searchsorted(mass, options.top_p) + 1]
    result = np.full(logits.shape, -np.inf)
    result[order] = np.log(probability[order] / probability[order].sum())
    return result


def decode_slowly(model, prompt, sequence, *, seed, step):
    key = sampling.sequence_keys(seed, step, jnp.array([sequence]))[0]
    tokens, logprobs = [], []
    while len(tokens) < LIMIT and not (tokens and tokens[-1] in STOPS):
        logprob = sampled_distribution(all_logits(model, prompt + tokens)[len(prompt + tokens) - 1], OPTIONS)
        noise = jax.random.gumbel(jax.random.fold_in(key, len(tokens)), (VOCABULARY,))
        tokens.append(int(np.argmax(logprob + noise)))
        logprobs.append(logprob[tokens[-1]])
    return tokens, logprobs


def test_completions_and_log_probabilities_are_those_of_decoding_without_a_cache(model, prompts):
    completions = complete(model, prompts, seed=4, step=9, first_sequence=100)
    assert {True, False} == set(completions.finished.tolist())
    for row, prompt in enumerate(prompts):
        tokens, logprobs = decode_slowly(model, prompt, 100 + row, seed=4, step=9)
        padding = LIMIT - len(tokens)
        assert completions.tokens[row].tolist() == tokens + [PAD] * padding
        np.testing.assert_allclose(completions.logprobs[row], logprobs + [0] * padding, atol=1e-4)
        assert completions.lengths[row] == len(tokens)
        assert completions.finished[row] == (tokens[-1] in STOPS)


@pytest.mark.parametrize("batch_size", [None, 7, 1])
def test_completions_do_not_depend_on_how_many_are_decoded_at_a_time(model, prompts, batch_size):
    options = OPTIONS.model_copy(update={"batch_size": batch_size})
    expected, got = complete(model, prompts), complete(model, prompts, options)
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)


def test_completions_do_not_depend_on_the_other_prompts_of_the_batch(model, prompts):
    short = [row for row, prompt in enumerate(prompts) if len(prompt) <= 3]
    for row in short:
        alone = complete(model, [prompts[row]], first_sequence=row)  # padded to 8 tokens, not to 12
        np.testing.assert_array_equal(alone.tokens[0], complete(model, prompts).tokens[row])


def test_seed_and_step_choose_the_completions(model, prompts):
    first, again = complete(model, prompts), complete(model, prompts)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    for other in (complete(model, prompts, seed=1), complete(model, prompts, step=1)):
        assert (first.tokens != other.tokens).any(-1).mean() > 0.5


def test_greedy_completions_follow_the_likeliest_token(model, prompts):
    completions = complete(model, prompts, greedy=True)
    for prompt, tokens, length in zip(prompts, completions.tokens.tolist(), completions.lengths, strict=True):
        logits = all_logits(model, prompt + tokens[:length])
        assert logits.argmax(-1)[len(prompt) - 1 : len(prompt) - 1 + length].tolist() == tokens[:length]
    assert not completions.logprobs.any()


def test_without_stop_tokens_every_completion_is_cut_off_at_the_limit(model, prompts):
    completions = complete(model, prompts[:5], stop_ids=())
    assert (completions.lengths == LIMIT).all()
    assert not completions.finished.any()


def test_decoding_ends_when_every_completion_has(model, prompts, monkeypatch):
    steps = []

    def counted(logits, *arguments, **settings):
        jax.debug.callback(lambda: steps.append(1))
        return sample(logits, *arguments, **settings)

    sample = sampling.sample
    monkeypatch.setattr(sampling, "sample", counted)
    options = OPTIONS.model_copy(update={"temperature": 0.9})  # not compiled yet
    completions = complete(model, prompts[:5], options, stop_ids=range(VOCABULARY))
    jax.effects_barrier()
    assert completions.lengths.tolist() == [1] * 5
    assert len(steps) == 1


def test_a_program_of_each_half_serves_all_prompts_of_a_bucket(model, prompts, monkeypatch):
    traced = []

    def counted(*arguments):
        traced.append(1)
        return sequence_keys(*arguments)

    sequence_keys = sampling.sequence_keys
    monkeypatch.setattr(sampling, "sequence_keys", counted)
    options = OPTIONS.model_copy(update={"temperature": 1.1})  # not compiled yet
    for step, some in enumerate((prompts[:3], prompts[4:8], prompts[4:8] * 3)):
        complete(model, some, options, seed=step, step=step, first_sequence=step)
    assert len(traced) == 2


def test_a_rollout_is_asked_between_its_turns_whether_to_go_on_and_ends_the_same_wherever_it_is_cut(
    model, prompts, monkeypatch
):
    turns = []
    monkeypatch.setattr(rollout, "next_chunk", lambda tokens, seconds: 3)
    in_threes = complete(model, prompts, poll=lambda: turns.append(1))
    monkeypatch.undo()
    assert len(turns) > -(-len(prompts) // OPTIONS.batch_size)
    jax.tree.map(np.testing.assert_array_equal, in_threes, complete(model, prompts))


def test_what_is_raised_between_two_turns_ends_the_rollout(model, prompts):
    def leave():
        raise Interrupted

    with pytest.raises(Interrupted):
        complete(model, prompts, poll=leave)


@pytest.mark.parametrize(("tokens", "seconds", "then"), [(1, 9.0, 1), (8, 0.01, 16), (8, 0.25, 8), (8, 1.0, 2)])
def test_a_turn_takes_about_a_quarter_of_a_second(tokens, seconds, then):
    assert rollout.next_chunk(tokens, seconds) == then


def test_in_bfloat16_the_log_probabilities_are_those_of_the_model_without_a_cache(prompts):
    model = make_model(tied=False, dtype=jnp.bfloat16)
    options = RolloutConfig(max_prompt_length=12, max_completion_length=LIMIT)
    completions = complete(model, prompts, options)
    for row, prompt in enumerate(prompts):
        tokens = completions.tokens[row, : completions.lengths[row]].tolist()
        logits = all_logits(model, prompt + tokens)[len(prompt) - 1 :]
        expected = [sampled_distribution(logits[t], options)[token] for t, token in enumerate(tokens)]
        np.testing.assert_allclose(completions.logprobs[row, : len(tokens)], expected, atol=0.05)


@pytest.mark.parametrize(("length", "text"), [(0, "number 1 has 0 tokens"), (13, "number 1 has 13 tokens")])
def test_prompts_that_do_not_fit_are_refused(model, length, text):
    with pytest.raises(ValueError, match=f"prompts: {text}; expected 1 to 12"):
        complete(model, [[1], [1] * length])


def test_no_prompts_are_refused(model):
    with pytest.raises(ValueError, match="prompts: none given"):
        complete(model, [])
