"""Rollouts against the model without cache, padding or batch, applied to each whole sequence."""

import json
import re
from array import array
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rollouts import sampling_logprobs
from tiny import ARCHITECTURE, QWEN35, config, load_weights

from mllm.config.rollout import RolloutConfig
from mllm.errors import StepError
from mllm.model import weights
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.model.load import load_policy
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel.mesh import make_mesh
from mllm.sampler import engine, sampling, schedule
from mllm.sampler.completion import Completion, RolloutWork
from mllm.sampler.sampler import Sampler
from mllm.sampler.schedule import DecodeLimits, TypicalBatch
from mllm.sampler.slots import CHUNK

VOCABULARY, STOPS = 40, (3, 11, 12, 20, 33)
NO_STOPS = (-1,) * len(STOPS)  # as many as STOPS, so that the same programs serve
LIMIT = 6
FIVE_SLOTS = DecodeLimits(5)
OPTIONS = RolloutConfig(max_prompt_length=12, max_completion_length=LIMIT, temperature=0.8, top_k=25, top_p=0.9)

FIXTURES = Path(__file__).parent.parent / "fixtures"
WINDOWS = json.loads((FIXTURES / "gemma3" / "config.json").read_text())
"""Layers with a window of 5 tokens, and layers without a window."""


def made(sizes):
    return random_model(Architecture.from_hf({**sizes, "vocab_size": VOCABULARY, "initializer_range": 0.3}, "test"))


def random_model(sizes):
    graphdef, _ = nnx.split(Decoder.abstract(sizes, dtype=jnp.float32))
    return nnx.merge(graphdef, jax.jit(lambda: nnx.state(Decoder(sizes, rngs=nnx.Rngs(0), dtype=jnp.float32)))())


@pytest.fixture(scope="module")
def model():
    return made(ARCHITECTURE)


def random_prompts(lengths=(3, 8, 1, 12, 5, 7, 2, 4, 11, 6, 3, 3)):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def prompts():
    return random_prompts()


def complete(model, prompts, options=OPTIONS, *, seed=0, room=FIVE_SLOTS, stops=STOPS, **given):
    """The completions of a sampler with this file's stop tokens; `given`: its other fields, and how it is called."""
    graphdef, params = nnx.split(model)
    fields = {name: given.pop(name) for name in ("poll", "work", "stop_texts") if name in given}
    sampler = Sampler(graphdef, Renderer(bytes_tokenizer()), stops, options, seed, lambda: room, **fields)
    return sampler.complete(params, prompts, **{"step": 0, **given})


@pytest.fixture(scope="module")
def completions(model, prompts):
    return complete(model, prompts)


@partial(jax.jit, static_argnums=0)
def hidden_states(graphdef, params, tokens):
    return nnx.merge(graphdef, params)(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))[0]


def completion_logits(model, prompt, tokens, length):
    """The float64 logits that predict each of a completion's tokens; padded to a length, so that it compiles once."""
    whole = [*prompt, *tokens]
    padded = whole + [0] * (length - len(whole))
    hidden = hidden_states(*nnx.split(model), jnp.array([padded]))[len(prompt) - 1 : len(whole) - 1]
    return np.float64(hidden) @ np.float64(model.head_weight).T


def check(model, prompts, results, length=132):
    """The sampled tokens, of one turn or several, have the log-probabilities of the model without a cache."""
    for prompt, one in zip(prompts, results, strict=True):
        logits = completion_logits(model, prompt, one.tokens, length)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        sampled = np.ones(len(one.tokens), bool)
        for begin, end in one.given:
            sampled[begin:end] = False
        expected = np.take_along_axis(logprobs, np.array(one.tokens)[:, None], 1)[sampled, 0]
        np.testing.assert_allclose(one.logprobs, expected, atol=2e-4)
        norms = 1 - 2 * np.exp(expected) + np.sum(np.exp(2 * logprobs), -1)[sampled]
        np.testing.assert_allclose(one.norms, norms, atol=4e-4)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_model_with_nan_logits_ends_the_rollout(greedy, model, prompts):
    """argmax would take token 0 of all of them."""
    graphdef, params = nnx.split(model)
    params = jax.tree.map(lambda leaf: leaf, params)
    params["norm"].set_value(params["norm"].get_value().at[0].set(jnp.nan))
    with pytest.raises(StepError, match=r"the model's logits are no numbers: "):
        complete(nnx.merge(graphdef, params), prompts, greedy=greedy)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_decode_steps_read_matrices_in_the_asked_dtype(weights, model):
    graphdef, params = nnx.split(model)
    options = OPTIONS.model_copy(update={"weights": weights})
    sampler = Sampler(graphdef, Renderer(bytes_tokenizer()), STOPS, options, 0)
    rollout = engine.RolloutEngine(sampler, params, [[1]], step=0, first_sequence=0, greedy=False)
    leaves = jax.tree.leaves((rollout.weights.outer, rollout.weights.layers))
    assert any(leaf.dtype == jnp.int8 for leaf in leaves) == (weights == "int8")


@jax.jit
def gumbel_noise(keys):
    def at(key, position):
        return sampling.gumbel_noise(jax.random.bits(jax.random.fold_in(key, position), (VOCABULARY,), jnp.uint32))

    return jax.vmap(lambda key: jax.vmap(partial(at, key))(jnp.arange(LIMIT)))(keys)


@pytest.mark.slow
def test_completions_match_the_model_without_a_cache(model, prompts):
    completions = complete(model, prompts, seed=4, step=9, first_sequence=100)
    noise = np.float64(gumbel_noise(sampling.sequence_keys(4, 9, 100 + jnp.arange(len(prompts)))))
    for row, (prompt, reply) in enumerate(zip(prompts, completions, strict=True)):
        logits = completion_logits(model, prompt, reply.tokens, OPTIONS.max_prompt_length + LIMIT)
        expected = [sampling_logprobs(z, OPTIONS.temperature, OPTIONS.top_k, OPTIONS.top_p) for z in logits]
        assert reply.tokens.tolist() == [int(np.argmax(logprob + noise[row, t])) for t, logprob in enumerate(expected)]
        logprobs = [logprob[token] for logprob, token in zip(expected, reply.tokens, strict=True)]
        np.testing.assert_allclose(reply.logprobs - np.log(reply.kept), logprobs, atol=1e-4)


def test_a_completion_ends_at_its_first_stop_token_or_limit(model, prompts, completions):
    """Its text lacks the stop token."""
    assert {True, False} == {one.finished for one in completions}
    for one in completions:
        ends = np.flatnonzero(np.isin(one.tokens, STOPS)).tolist()
        assert ends == ([len(one.tokens) - 1] if one.finished else [])
        assert one.finished or len(one.tokens) == LIMIT
        assert one.text == bytes_tokenizer().decode(one.tokens[: len(one.tokens) - one.finished])
    assert {(len(one.tokens), one.finished) for one in complete(model, prompts, stops=NO_STOPS)} == {(LIMIT, False)}


def test_a_stop_token_at_the_limit_counts_as_finished(model, prompts):
    whole = complete(model, prompts, stops=NO_STOPS)
    number, last = next((i, one.tokens[-1]) for i, one in enumerate(whole) if one.tokens[-1] not in one.tokens[:-1])
    one = complete(model, prompts, stops=len(NO_STOPS) * (last,))[number]
    assert (len(one.tokens), one.finished) == (LIMIT, True)


def test_a_completion_s_text_has_no_control_tokens():
    ended = Completion(array("i", [*b"<7", 257, *b">", 258]), finished=True)
    assert Sampler(None, Renderer(bytes_tokenizer()), STOPS, OPTIONS, 0).text_of(ended) == "<7>"


def test_each_completion_is_reported_once_as_it_ends(model, prompts, completions):
    reports = []
    assert complete(model, prompts, ended=reports.append) == completions
    assert len(reports) > 2
    assert sorted(pair for report in reports for pair in report.items()) == [*enumerate(completions)]


def test_seed_and_step_choose_completions_in_one_program(model, prompts, completions, monkeypatch):
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


def test_poll_is_called_after_each_chunk_and_can_interrupt(model, prompts, completions):
    polls, work = [], RolloutWork()
    assert complete(model, prompts, poll=lambda: polls.append(work.steps), work=work) == completions
    assert polls[-1] == work.steps
    assert max(np.diff([0, *polls])) <= CHUNK

    def interrupt():
        raise StopIteration("stop")

    with pytest.raises(StopIteration, match="stop"):
        complete(model, prompts, poll=interrupt)


GROUPS = [prompt for prompt in ([7], [7, 8, 9], [3] * 20, [5, 4], [1, 2, 3, 4, 5, 6], [9] * 9) for _ in range(4)]


def sample_groups(sizes, mesh, slots):
    """24 sequences of 6 prompts. Most end early, and waiting sequences take their slots."""
    settings = config(mesh=mesh, model={"architecture": {**sizes, "initializer_range": 0.1}})
    policy = load_policy(settings, make_mesh(settings.mesh))
    options = RolloutConfig(max_prompt_length=20, max_completion_length=40, max_slots=None if mesh else slots)
    renderer, stops = Renderer(bytes_tokenizer()), range(0, 260, 20)
    sampler = Sampler(policy.graphdef, renderer, stops, options, 1, lambda: DecodeLimits(slots if mesh else 99))
    result = sampler.complete(policy.initial_params(), GROUPS, step=2)
    assert sampler.work.slot_steps <= slots * sampler.work.steps  # over all devices
    assert len({rows for rows, *_ in sampler.work.programs}) == 1
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [ARCHITECTURE, pytest.param(QWEN35, marks=pytest.mark.nightly)], ids=["full", "delta"]
)
def test_neither_slots_nor_devices_change_a_token(sizes, monkeypatch):
    """There are 2 heads of keys and values, which tp = 4 does not divide. Slots stay as many, as on accelerators."""
    monkeypatch.setattr(schedule, "jax", SimpleNamespace(default_backend=lambda: "tpu"))
    large, small = (schedule.slot_buckets(320, 151_936, 2 * count) for count in (3_085_938_688, 494_032_768))
    assert (large, small) == ([320], [80, 160, 320])
    tp = 2 if sizes is QWEN35 else 4
    one_at_a_time, result = sample_groups(sizes, {}, 1), sample_groups(sizes, {"fsdp": 8 // tp, "tp": tp}, 8)
    assert len({len(one.tokens) for one in result}) > 10
    for one, other in zip(result, one_at_a_time, strict=True):
        assert (one.tokens, one.finished) == (other.tokens, other.finished)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


LONG = RolloutConfig(max_prompt_length=12, max_completion_length=160)
IN_16_SLOTS = {"stops": (3,), "room": DecodeLimits(16)}


@pytest.fixture(scope="module")
def long_completions(model, prompts):
    """64 completions of 8 prompts in 16 slots, and the work of the rollout. Most sequences wait for a slot."""
    work = RolloutWork()
    return complete(model, prompts[:8] * 8, LONG, work=work, **IN_16_SLOTS), work


@pytest.mark.slow
def test_a_distinct_prompt_is_prefilled_once(long_completions):
    """Few slot steps are useless where many sequences wait."""
    _, work = long_completions
    assert work.prefilled == 8 * 12
    assert 20 < work.tokens / 64 < 60
    assert work.tokens / work.slot_steps >= 0.85


@pytest.mark.slow
def test_a_stop_text_cuts_text_and_tokens(model, prompts, long_completions):
    """Texts end completions in the first chunk and in later chunks, before and behind a stop token or the limit."""
    decode, (whole, _) = bytes_tokenizer().decode, long_completions
    pairs = Counter(pair for one in whole for pair in pairwise(one.tokens))
    texts = [decode(pair) for pair, _ in pairs.most_common(30)[::15]]
    work, ends = RolloutWork(), []
    result = complete(model, prompts[:8] * 8, LONG, stop_texts=texts, work=work, **IN_16_SLOTS)
    for one, full in zip(result, whole, strict=True):
        complete_at = (n for n in range(len(full.tokens) + 1) if any(text in decode(full.tokens[:n]) for text in texts))
        ends.append(next(complete_at, None))
        assert one.tokens == full.tokens[: ends[-1]]
        np.testing.assert_allclose(one.logprobs, full.logprobs[: ends[-1]], atol=1e-5)
        assert one.finished == (full.finished or ends[-1] is not None)
        assert one.text == min((full.text.partition(text)[0] for text in texts), key=len)
    assert {None} < {*ends}
    assert max(end for end in ends if end) > 2 * CHUNK
    assert work.tokens == sum(len(one.tokens) for one in result)
    assert work.completions == len(whole)


def test_a_stop_text_may_be_part_of_a_token_or_character():
    """The text is found once a character's bytes are complete."""
    sampler = Sampler(None, Renderer(bytes_tokenizer()), (0,), OPTIONS, 0, stop_texts=("\u00e9!", "THE END"))
    across = "a" * (CHUNK - 6) + "THE END" + "a" * (CHUNK - 1), CHUNK + 1  # one token of seven lies in the last chunk
    for text, length in (("a\u00e9!b", 4), ("a\u00e9?", None), ("T" * 90 + "THE ENDT", 97), across, ("", None)):
        assert sampler.stopped_length(array("i", [*text.encode()])) == length


@pytest.mark.slow
def test_greedy_and_sampled_calls_share_one_program(caplog):
    """Evaluation has other numbers of prompts and sequences than training, one prompt a sequence."""
    settings = config()
    policy = load_policy(settings, make_mesh(settings.mesh))
    options = RolloutConfig(max_prompt_length=4, max_completion_length=2 * CHUNK + 3, max_slots=4)
    sampler = Sampler(policy.graphdef, Renderer(bytes_tokenizer()), (-1,), options, 0, typical=TypicalBatch(2, 4))
    training, evaluation = [[1, 2]] * 2 + [[3]] * 2, [[number] for number in range(7)]
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for prompts, greedy in ((evaluation, True), (training, False), (evaluation[:3], True)):
            results = sampler.complete(policy.initial_params(), prompts, step=0, greedy=greedy)
            assert any(any(one.logprobs) for one in results) != greedy
    compiled = Counter(re.findall(r"Finished XLA compilation of jit\((prefill|decode)\)", caplog.text))
    assert compiled == {"prefill": 1, "decode": 1}
    assert len(sampler.work.programs) == 1


OTHERS = ("qwen3", "grouped_bfloat16", "smollm3", "olmo2", "qwen3_5")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_greedy_completions_match_transformers(name):
    """The completions of tests/fixtures: seven prompts of several lengths, two stop tokens."""
    folder = FIXTURES / name
    architecture, expected = weights.read_config(folder), np.load(folder / "expected.npz")
    graphdef, _ = nnx.split(Decoder.abstract(architecture, dtype=jnp.float32))
    prompts = [[token for token in row.tolist() if token >= 0] for row in expected["prompts"]]
    options = RolloutConfig(max_prompt_length=9, max_completion_length=expected["completions"].shape[1])
    sampler = Sampler(graphdef, Renderer(bytes_tokenizer()), (5, 71), options, 0, lambda: DecodeLimits(4))
    result = sampler.complete(load_weights(folder), prompts, step=0, greedy=True)
    assert [one.tokens.tolist() for one in result] == [row[row >= 0].tolist() for row in expected["completions"]]
    assert not any(any(one.logprobs) for one in result)  # each token was certain


@pytest.mark.slow
def test_pages_and_waiting_sequences_change_no_token(prompts):
    """Completions fill several pages of 32 tokens; 10 pages are too few for twelve sequences."""
    chosen, work = made(WINDOWS), [RolloutWork(), RolloutWork()]
    given = {"options": RolloutConfig(max_prompt_length=12, max_completion_length=100), "stops": (-1,)}
    many = complete(chosen, prompts, room=DecodeLimits(12), work=work[0], **given)
    few = complete(chosen, prompts, room=DecodeLimits(12, 10 * 32), work=work[1], **given)
    for one, other in zip(few, many, strict=True):
        assert (one.tokens, one.finished) == (other.tokens, other.finished)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert work[1].prefilled > work[0].prefilled  # some were prefilled once more
    assert max(pages for _, *each in work[1].programs for pages in each) == 10
    check(chosen, prompts[:4], few[:4])


def test_prompts_that_are_missing_empty_or_too_long_are_refused(model):
    for prompts in ([], [[1], []], [[1] * 13, [1]]):
        with pytest.raises(ValueError, match="prompts: expected 1 to 12 tokens each"):
            complete(model, prompts)
