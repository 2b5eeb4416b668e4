"""Rollouts of a model with delta nets against the model without a cache, applied to each whole sequence."""

from collections import Counter
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_rollout import Answers
from tiny import QWEN35, config

from mllm.config.rollout import RolloutConfig
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.model.load import load_policy
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel.mesh import bytes_on_device, make_mesh
from mllm.plan.programs import Programs
from mllm.sampler import engine
from mllm.sampler.completion import RolloutWork
from mllm.sampler.sampler import Sampler
from mllm.sampler.schedule import Room

SIZES = {**QWEN35, "initializer_range": 0.3}  # far from uniform
VOCABULARY, LONGEST, WHOLE = 40, 200, 320
LENGTHS = (3, 8, 1, 63, 5, 64, 2, 65, 130, 6, 3, LONGEST)


@pytest.fixture(scope="module")
def model():
    sizes = Architecture.from_hf({**SIZES, "vocab_size": VOCABULARY}, "test")
    return Decoder(sizes, rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]


def complete(model, prompts, options, room, stops=(3, 7), seed=0, greedy=False, talk=None, **given):
    graphdef, params = nnx.split(model)
    sampler = Sampler(graphdef, Renderer(bytes_tokenizer()), stops, options, seed, lambda: room, **given)
    return sampler.complete(params, prompts, step=0, greedy=greedy, conversations=talk)


@partial(jax.jit, static_argnums=0)
def forward(graphdef, params, tokens):
    model = nnx.merge(graphdef, params)
    hidden = model(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))[0]
    return jax.nn.log_softmax(jnp.einsum("td,vd->tv", hidden, model.head_weight, precision="highest"))


def check(model, prompts, found, greedy=False, atol=2e-4):
    """The sampled tokens are the model's likeliest, or have its log-probabilities."""
    for prompt, one in zip(prompts, found, strict=True):
        whole = [*prompt, *one.tokens]
        logprobs = forward(*nnx.split(model), jnp.array([[*whole, *[0] * (WHOLE - len(whole))]]))
        logprobs, tokens = np.asarray(logprobs)[len(prompt) - 1 : len(whole) - 1], np.array(one.tokens)
        sampled = np.ones(len(tokens), bool)
        for begin, end in one.given:
            sampled[begin:end] = False
        if greedy:
            np.testing.assert_array_equal(tokens[sampled], logprobs.argmax(-1)[sampled])
        else:
            expected = np.take_along_axis(logprobs, tokens[:, None], 1)[sampled, 0]
            np.testing.assert_allclose(one.logprobs, expected, atol=atol)


ROOMS = {"all": Room(24), "three slots": Room(3), "few pages": Room(24, 17 * 32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "room", ["few pages", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("all", "three slots"))]
)
def test_groups_of_prompts_of_all_lengths_are_completed_as_by_the_whole_model(model, prompts, room):
    """Some sequences stop in a chunk in which others go on; 17 pages of 32 tokens are too few for most."""
    options = RolloutConfig(max_prompt_length=LONGEST, max_completion_length=40)
    for greedy in (True, False):
        found = complete(model, prompts * 2, options, ROOMS[room], greedy=greedy)
        check(model, prompts * 2, found, greedy)
    assert {True, False} == {one.finished for one in found}
    assert len({len(one.tokens) for one in found}) > 8


@pytest.mark.slow
def test_states_move_where_slots_are_fewer_and_sequences_without_pages_are_prefilled_once_more(model, prompts):
    options, works = RolloutConfig(max_prompt_length=LONGEST, max_completion_length=60), [RolloutWork(), RolloutWork()]
    many, few = (
        complete(model, prompts[:8], options, room, stops=(-1,), work=work)
        for room, work in zip((Room(8), Room(8, 10 * 32)), works, strict=True)
    )
    for one, other in zip(few, many, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)
    assert works[1].prefilled > works[0].prefilled
    assert len({slots for slots, _ in works[1].programs}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "few pages", "one slot"])
def test_answers_go_on_from_the_states_at_the_ends_of_turns(model, prompts, kind):
    rng = np.random.default_rng(1)
    short = [prompt[:12] for prompt in prompts]
    texts = [[rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 50, i % 4)] for i in range(len(short))]
    options = RolloutConfig(max_prompt_length=12, max_completion_length=9, max_turns=4, max_total_length=200)
    rooms = {"full": Room(12), "few pages": Room(5, 8 * 32), "one slot": Room(1, 8 * 32)}
    found = complete(model, short, options, rooms[kind], stops=(3, 5), talk=Answers(texts))
    assert [[one.tokens[a:b].tolist() for a, b in one.given] for one in found] == texts
    check(model, short, found)


@pytest.mark.slow
def test_a_turn_that_a_stop_text_ended_within_a_chunk_is_prefilled_once_more_before_its_answer(
    model, prompts, monkeypatch
):
    """Others, which a stop token or the limit ended, go on from their states."""
    prefilled, own = [], engine.prefill

    def counting(graphdef, params, tokens, lengths):
        prefilled.extend(length for length in np.asarray(lengths).tolist() if length)
        return own(graphdef, params, tokens, lengths)

    monkeypatch.setattr(engine, "prefill", counting)
    options = RolloutConfig(max_prompt_length=12, max_completion_length=40, max_turns=2, max_total_length=120)
    short, answers = [prompt[:8] for prompt in prompts if len(prompt) > 1], [[[1, 2, 4, 6] * 3]] * len(prompts)
    whole = complete(model, short, options, Room(12), talk=Answers(answers))
    assert len(prefilled) == len(short)
    pairs = Counter(pair for one in whole for pair in pairwise(one.tokens[: one.given[0][0]]))
    text = bytes_tokenizer().decode(pairs.most_common(1)[0][0])
    found = complete(model, short, options, Room(12), talk=Answers(answers), stop_texts=(text,))
    check(model, short, found)
    cut = sum(one.given[0][0] < full.given[0][0] for one, full in zip(found, whole, strict=True))
    assert 0 < len(prefilled) - 2 * len(short) <= cut < len(short)


@pytest.mark.nightly
def test_eight_devices_sample_the_tokens_of_one():
    """Each device has its own prompts, slots and states; tp = 2 splits heads."""
    prompts = [prompt for prompt in ([7], [7, 8, 9], [3] * 20, [5, 4], [1, 2, 3, 4], [9] * 9) for _ in range(4)]
    found = []
    for mesh in ({}, {"dp": 2, "fsdp": 2, "tp": 2}):
        settings = config(mesh=mesh, model={"architecture": {**QWEN35, "initializer_range": 0.1}})
        policy = load_policy(settings, make_mesh(settings.mesh))
        options = RolloutConfig(max_prompt_length=20, max_completion_length=40)
        sampler = Sampler(policy.graphdef, Renderer(bytes_tokenizer()), range(0, 260, 20), options, 1, lambda: Room(8))
        found.append(sampler.complete(policy.initial_params(), prompts, step=2))
    for one, other in zip(*found, strict=True):
        assert (one.tokens, one.finished) == (other.tokens, other.finished)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert len({len(one.tokens) for one in found[0]}) > 10


@pytest.mark.slow
def test_decode_steps_change_states_in_place():
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 8}
    layers = {"num_hidden_layers": 12, "layer_types": ["linear_attention"] * 11 + ["full_attention"]}
    settings = config(batch_size=64, model={"architecture": {**QWEN35, **heads, **layers}})
    shapes = Programs(settings, make_mesh(settings.mesh))
    function, arguments = shapes.decode()
    used, states = function.lower(*arguments).compile().memory_analysis(), bytes_on_device(shapes.states())
    assert used.alias_size_in_bytes >= states
    assert used.temp_size_in_bytes < states / 4
