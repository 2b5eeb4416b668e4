"""Rollouts against the model without cache, padding or batch, applied to each whole sequence."""

from array import array
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from rollouts import sampling_logprobs
from tiny import ARCHITECTURE, config, load_weights

from mllm.config.grpo import RolloutConfig
from mllm.model import weights
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.model.decoding import LayerCache, abstract_cache
from mllm.model.load import load_policy
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel.mesh import make_mesh
from mllm.rl import rollout, sampling
from mllm.rl.rollout import Completion, RolloutWork, Sampler
from mllm.rl.schedule import assign_prompts
from mllm.rl.slots import CHUNK, insert, repack

VOCABULARY, STOPS = 40, (3, 11, 12, 20, 33)
NO_STOPS = (-1,) * len(STOPS)  # as many as STOPS, so that the same programs serve
LIMIT = 6
OPTIONS = RolloutConfig(max_prompt_length=12, max_completion_length=LIMIT, temperature=0.8, top_k=25, top_p=0.9)


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": VOCABULARY, "initializer_range": 0.3}  # far from uniform
    return Decoder(Architecture.from_hf({**ARCHITECTURE, **sizes}, "test"), rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in (3, 8, 1, 12, 5, 7, 2, 4, 11, 6, 3, 3)]


def complete(
    model, prompts, options=OPTIONS, *, seed=0, step=0, first_sequence=0, slots=5, stops=STOPS, ended=len, **given
):
    """The completions of a sampler with this file's stop tokens."""
    graphdef, params = nnx.split(model)
    sampler = Sampler(graphdef, Renderer(bytes_tokenizer()), stops, options, seed, max_slots=lambda: slots, **given)
    return sampler.complete(params, prompts, step=step, first_sequence=first_sequence, ended=ended)


@pytest.fixture(scope="module")
def completions(model, prompts):
    return complete(model, prompts)


@partial(jax.jit, static_argnums=0)
def hidden_states(graphdef, params, tokens):
    return nnx.merge(graphdef, params)(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))[0]


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


@pytest.mark.parametrize("options", [{}, {"min_p": 0.1, "repetition_penalty": 1.5}])
def test_completions_and_log_probabilities_are_those_of_the_model_without_a_cache(model, prompts, options):
    chosen = OPTIONS.model_copy(update=options)
    completions = complete(model, prompts, chosen, seed=4, step=9, first_sequence=100)
    penalty, min_p = options.get("repetition_penalty", 1.0), options.get("min_p", 0.0)
    noise = np.float64(gumbel_noise(sampling.sequence_keys(4, 9, 100 + jnp.arange(len(prompts)))))
    for row, (prompt, found) in enumerate(zip(prompts, completions, strict=True)):
        seen = [[*prompt, *found.tokens[:t]] for t in range(len(found.tokens))]
        expected = [
            sampling_logprobs(z, OPTIONS.temperature, OPTIONS.top_k, OPTIONS.top_p, min_p, before, penalty)
            for z, before in zip(completion_logits(model, prompt, found.tokens), seen, strict=True)
        ]
        assert found.tokens.tolist() == [int(np.argmax(logprob + noise[row, t])) for t, logprob in enumerate(expected)]
        logprobs = [logprob[token] for logprob, token in zip(expected, found.tokens, strict=True)]
        np.testing.assert_allclose(found.logprobs - np.log(found.kept), logprobs, atol=1e-4)


def test_a_completion_ends_with_its_first_stop_token_which_its_text_lacks_or_at_the_limit(model, prompts, completions):
    assert {True, False} == {one.finished for one in completions}
    for one in completions:
        ends = np.flatnonzero(np.isin(one.tokens, STOPS)).tolist()
        assert ends == ([len(one.tokens) - 1] if one.finished else [])
        assert one.finished or len(one.tokens) == LIMIT
        assert one.text == bytes_tokenizer().decode(one.tokens[: len(one.tokens) - one.finished])
    assert {(len(one.tokens), one.finished) for one in complete(model, prompts, stops=NO_STOPS)} == {(LIMIT, False)}


def test_a_completion_s_text_has_no_control_tokens():
    """Rewards are given it, as TRL gives it to its functions."""
    ended = Completion(array("i", [*b"<7", 257, *b">", 258]), finished=True)
    assert Sampler(None, Renderer(bytes_tokenizer()), STOPS, OPTIONS, 0).text_of(ended) == "<7>"


def test_each_completion_is_told_of_once_when_it_has_ended_while_others_are_decoded(model, prompts, completions):
    told = []
    assert complete(model, prompts, ended=told.append) == completions
    assert len(told) > 2
    assert {number: one for found in told for number, one in found.items()} == dict(enumerate(completions))
    assert sum(map(len, told)) == len(completions)


def test_seed_and_step_choose_the_completions_and_need_no_further_program(model, prompts, completions, monkeypatch):
    traces = []
    complete(model, prompts, stops=NO_STOPS)
    sequence_keys = sampling.sequence_keys
    monkeypatch.setattr(sampling, "sequence_keys", lambda *given: traces.append(1) or sequence_keys(*given))
    assert complete(model, prompts) == completions
    first = complete(model, prompts, stops=NO_STOPS)
    for other in ({"seed": 1}, {"step": 1}, {"first_sequence": 20}):
        others = zip(first, complete(model, prompts, stops=NO_STOPS, **other), strict=True)
        assert np.mean([one.tokens != another.tokens for one, another in others]) > 0.5
    assert not traces


def test_the_clock_cuts_chunks_into_calls_that_poll_may_end_but_no_bit(model, prompts, completions, monkeypatch):
    polls = []
    monkeypatch.setattr(rollout, "CALL_SECONDS", 0.0)  # a step in each call
    work = RolloutWork()
    assert complete(model, prompts, poll=lambda: polls.append(1), work=work) == completions
    assert len(polls) == work.steps

    def interrupt():
        raise StopIteration("stop")

    with pytest.raises(StopIteration, match="stop"):
        complete(model, prompts, poll=interrupt)


GROUPS = [prompt for prompt in ([7], [7, 8, 9], [3] * 20, [5, 4], [1, 2, 3, 4, 5, 6], [9] * 9) for _ in range(4)]


def sample_groups(mesh, slots):
    """24 sequences of 6 prompts; most end while others are in the middle, and the next ones take their slots."""
    settings = config(mesh=mesh, model={"architecture": {**ARCHITECTURE, "initializer_range": 0.1}})
    policy = load_policy(settings, make_mesh(settings.mesh))
    options = RolloutConfig(max_prompt_length=20, max_completion_length=40, max_slots=None if mesh else slots)
    options = options.model_copy(update={"repetition_penalty": 1.1})
    renderer, stops = Renderer(bytes_tokenizer()), range(0, 260, 20)
    sampler = Sampler(policy.graphdef, renderer, stops, options, 1, lambda: slots if mesh else 99)
    result = sampler.complete(policy.initial_params(), GROUPS, step=2)
    assert sampler.work.slot_steps <= slots * sampler.work.steps  # over all devices
    return result


def test_neither_slots_nor_devices_change_a_token():
    """There are 2 heads of keys and values, which tp = 4 does not divide."""
    one_at_a_time, result = sample_groups({}, 1), sample_groups({"fsdp": 2, "tp": 4}, 8)
    assert len({len(one.tokens) for one in result}) > 10
    for one, other in zip(result, one_at_a_time, strict=True):
        assert (one.tokens, one.finished) == (other.tokens, other.finished)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_stop_text_of_several_tokens_cuts_tokens_behind_it_and_the_text_before_it_and_the_clock_changes_no_bit(
    model, prompts, monkeypatch
):
    """Texts end completions in the first chunk and later ones, before and behind a stop token or the limit."""
    options, stops = RolloutConfig(max_prompt_length=12, max_completion_length=160), (3,)
    decode = bytes_tokenizer().decode
    whole = complete(model, prompts[:8] * 8, options, stops=stops, slots=16)
    pairs = Counter(pair for one in whole for pair in pairwise(one.tokens))
    texts = [decode(pair) for pair, _ in pairs.most_common(30)[::15]]
    work, found = RolloutWork(), []
    for seconds in (rollout.CALL_SECONDS, 0.0):  # 0: a step in each call
        monkeypatch.setattr(rollout, "CALL_SECONDS", seconds)
        found.append(complete(model, prompts[:8] * 8, options, stops=stops, slots=16, stop_texts=texts, work=work))
    assert found[0] == found[1]
    ends = []
    for one, full in zip(found[0], whole, strict=True):
        complete_at = (n for n in range(len(full.tokens) + 1) if any(text in decode(full.tokens[:n]) for text in texts))
        ends.append(next(complete_at, None))
        assert one.tokens == full.tokens[: ends[-1]]
        np.testing.assert_allclose(one.logprobs, full.logprobs[: ends[-1]], atol=1e-5)
        assert one.finished == (full.finished or ends[-1] is not None)
        assert one.text == min((full.text.partition(text)[0] for text in texts), key=len)
    assert {None} < {*ends}
    assert max(end for end in ends if end) > 2 * CHUNK
    assert work.tokens == 2 * sum(len(one.tokens) for one in found[0])
    assert work.completions == 2 * len(whole)


def test_a_stop_text_may_be_part_of_a_token_or_of_a_character_s_bytes_and_is_found_once_it_is_complete():
    sampler = Sampler(None, Renderer(bytes_tokenizer()), (0,), OPTIONS, 0, stop_texts=("\u00e9!", "END"))
    for text, length in (("a\u00e9!b", 4), ("a\u00e9?", None), ("E" * 90 + "NDE", 92), ("", None)):
        assert sampler.stopped_length(array("i", [*text.encode()])) == length


def test_a_distinct_prompt_is_prefilled_once_and_few_slot_steps_are_useless_where_many_wait(model, prompts):
    """Lengths are about geometric, with a mean of a quarter of the limit."""
    work, options = RolloutWork(), RolloutConfig(max_prompt_length=12, max_completion_length=160)
    complete(model, prompts[:8] * 8, options, stops=(3,), slots=16, work=work)
    assert work.prefilled == 8 * 12
    assert 20 < work.tokens / 64 < 60
    assert work.tokens / work.slot_steps >= 0.85


@pytest.mark.parametrize("name", ["grouped_bfloat16", "qwen3", "gemma3", "smollm3", "olmo2"])
def test_greedy_completions_are_those_of_transformers(name):
    """The completions of tests/make_fixtures.py: seven prompts of several lengths, two stop tokens."""
    folder = Path(__file__).parent.parent / "fixtures" / name
    architecture, expected = weights.read_config(folder), np.load(folder / "expected.npz")
    graphdef, _ = nnx.split(Decoder.abstract(architecture, dtype=jnp.float32))
    prompts = [[token for token in row.tolist() if token >= 0] for row in expected["prompts"]]
    options = RolloutConfig(max_prompt_length=9, max_completion_length=expected["completions"].shape[1])
    sampler = Sampler(graphdef, Renderer(bytes_tokenizer()), (5, 71), options, 0, lambda: 4)
    result = sampler.complete(load_weights(folder), prompts, step=0, greedy=True)
    assert [one.tokens.tolist() for one in result] == [row[row >= 0].tolist() for row in expected["completions"]]
    assert not any(any(one.logprobs) for one in result)  # each token was certain


def test_a_sliding_layer_s_cache_has_no_more_places_than_its_window():
    sizes = weights.read_config(Path(__file__).parent.parent / "fixtures" / "gemma3")
    cache = abstract_cache(Decoder.abstract(sizes), rows=2, places=24)
    assert [layer.keys.shape[2] for layer in cache] == [5, 24, 5]


def ring(lengths, end, places):
    """Rows of tokens 1, 2, ... up to `lengths`, which end at `end`: the newest of each place, elsewhere 0."""
    tokens = end - 1 - (end - 1 - np.arange(places)) % places - (end - np.array(lengths)[:, None]) + 1
    keys = np.maximum(tokens, 0)[:, None, :, None].astype(np.float32)
    return LayerCache(keys, -keys)


@pytest.mark.parametrize(
    ("places", "end", "later_places", "later_end"),
    [
        (6, 6, 8, 9),  # it grows into a ring of the window's 8 places,
        (8, 9, 8, 23),
        (8, 23, 8, 12),
        (8, 12, 6, 5),  # and shrinks again
    ],
)
def test_rings_keep_the_newest_tokens_of_rows_that_enter_and_move(places, end, later_places, later_end):
    at, later = np.int32(end), np.int32(later_end)
    prompts, lengths = ring([3, 5], 5, 5), [end, 3, 2]
    entered = insert(ring(lengths, end, places), prompts, np.array([-1, 1, 0]), at, ring=True, layout=None)
    jax.tree.map(np.testing.assert_array_equal, entered, ring([end, 5, 3], end, places))
    moved = repack(entered, np.array([2, 0]), at, later, places=later_places, layout=None)
    jax.tree.map(np.testing.assert_array_equal, moved, ring([3, end], later_end, later_places))
    one = repack(entered, np.array([2]), at, later, places=later_places, layout=None)  # two rolls of it did not end
    jax.tree.map(np.testing.assert_array_equal, one, ring([3], later_end, later_places))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=20), st.integers(1, 8))
def test_prompts_are_dealt_so_that_every_shard_has_as_many_sequences(groups, shards):
    prompts = [[number] * length for number, (length, count) in enumerate(groups) for _ in range(count)]
    queues = assign_prompts(prompts, shards)
    dealt = [sequence for queue in queues for group in queue for sequence in group]
    assert sorted(dealt) == list(range(len(prompts)))
    loads = [sum(map(len, queue)) for queue in queues]
    assert max(loads) == -(-len(prompts) // shards)
    for queue in queues:
        assert [prompts[first] for first, *_ in queue] == sorted((prompts[first] for first, *_ in queue), key=len)
        assert all(prompts[sequence] == prompts[group[0]] for group in queue for sequence in group)


@pytest.mark.parametrize("lengths", [[], [1, 0], [13, 1]])
def test_prompts_that_are_missing_empty_or_too_long_are_refused(model, lengths):
    with pytest.raises(ValueError, match="prompts: expected 1 to 12 tokens each"):
        complete(model, [[1] * length for length in lengths])
