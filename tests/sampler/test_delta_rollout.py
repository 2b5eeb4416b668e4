"""Rollouts of a model with delta nets against the model without a cache, applied to each whole sequence."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from test_answered_turns import Answers
from test_rollout import check, complete, made, random_prompts
from tiny import QWEN35, config

from mllm.config.rollout import RolloutConfig
from mllm.model.tokenizer import bytes_tokenizer
from mllm.parallel.mesh import bytes_on_device, make_mesh
from mllm.plan.programs import Programs
from mllm.sampler import engine
from mllm.sampler.completion import RolloutWork
from mllm.sampler.schedule import Room

LONGEST = 130
LENGTHS = (3, 8, 1, 63, 5, 64, 2, 65, 130)


@pytest.fixture(scope="module")
def model():
    return made(QWEN35)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture
def prefilled(monkeypatch):
    """The lengths of the sequences that are prefilled."""
    found, own = [], engine.prefill

    def counting(graphdef, params, tokens, lengths):
        found.extend(length for length in np.asarray(lengths).tolist() if length)
        return own(graphdef, params, tokens, lengths)

    monkeypatch.setattr(engine, "prefill", counting)
    return found


@pytest.mark.slow
def test_prompts_of_all_lengths_are_completed_as_by_the_whole_model(model, prompts, prefilled):
    """14 pages of 32 tokens are too few: a sequence loses its pages and is prefilled once more.

    States move where slots become fewer.
    """
    options, work = RolloutConfig(max_prompt_length=LONGEST, max_completion_length=60), RolloutWork()
    found = complete(model, prompts, options, room=Room(9, 14 * 32), stops=(-1,), work=work)
    check(model, prompts, found, length=192)
    assert len(prefilled) > len(prompts) - 1  # of a prompt of one token nothing is prefilled
    assert len({slots for slots, _ in work.programs}) > 1


@pytest.mark.slow
def test_a_turn_that_a_stop_text_ended_within_a_chunk_is_prefilled_once_more_before_its_answer(
    model, prompts, prefilled
):
    """Others, which a stop token or the limit ended, go on from their states."""
    options = RolloutConfig(max_prompt_length=12, max_completion_length=40, max_turns=2, max_total_length=120)
    short, answers = [prompt[:8] for prompt in prompts if len(prompt) > 1], [[[1, 2, 4, 6] * 3]] * len(prompts)
    whole = complete(model, short, options, room=Room(12), stops=(3, 7), conversations=Answers(answers))
    assert len(prefilled) == len(short)
    pairs = Counter(pair for one in whole for pair in pairwise(one.tokens[: one.given[0][0]]))
    text = bytes_tokenizer().decode(pairs.most_common(1)[0][0])
    found = complete(
        model, short, options, room=Room(12), stops=(3, 7), conversations=Answers(answers), stop_texts=(text,)
    )
    check(model, short, found)
    cut = sum(one.given[0][0] < full.given[0][0] for one, full in zip(found, whole, strict=True))
    assert 0 < len(prefilled) - 2 * len(short) <= cut < len(short)


@pytest.mark.slow
def test_decode_steps_change_states_in_place():
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 8}
    layers = {"num_hidden_layers": 6, "layer_types": ["linear_attention"] * 5 + ["full_attention"]}
    settings = config(batch_size=64, model={"architecture": {**QWEN35, **heads, **layers}})
    shapes = Programs(settings, make_mesh(settings.mesh))
    function, arguments = shapes.decode()
    used, states = function.lower(*arguments).compile().memory_analysis(), bytes_on_device(shapes.states())
    assert used.alias_size_in_bytes >= states
    assert used.temp_size_in_bytes < states / 4
