"""Rollouts of a model with delta nets against the model without a cache, applied to each whole sequence."""

from dataclasses import replace

import numpy as np
import pytest
from test_answered_turns import Answers
from test_rollout import VOCABULARY, check, complete, random_model, random_prompts
from tiny import QWEN35, config

from mllm.config.rollout import RolloutConfig
from mllm.model.architecture import FULL, LINEAR, SLIDING, Architecture
from mllm.model.tokenizer import bytes_tokenizer
from mllm.parallel.mesh import bytes_on_device, make_mesh
from mllm.plan.programs import Programs
from mllm.sampler import engine
from mllm.sampler.schedule import Room
from mllm.sampler.slots import CHUNK


def test_turns_go_on_from_the_states_of_their_last_tokens_also_where_a_stop_text_ended_one_in_a_chunk(monkeypatch):
    """A layer of each kind. Turns are one chunk; the first ends a token before it, once by a stop text.

    Answers of different lengths are prefilled together, and conversations outgrow the page of their first turn.
    """
    sizes = Architecture.from_hf({**QWEN35, "vocab_size": VOCABULARY, "initializer_range": 0.3}, "test")
    kinds = {"layer_types": (LINEAR, FULL, SLIDING), "no_rope_layers": (1, 1, 1), "rope_local_base_freq": 1e4}
    mixed = random_model(replace(sizes, **kinds, sliding_window=5))
    options = RolloutConfig(max_prompt_length=12, max_completion_length=CHUNK, max_turns=2, max_total_length=120)
    prompts, answers = random_prompts((3, 8, 12)), [[[1]], [[2] * 9], [[*range(18)]]]
    prefilled, prefill = [], engine.prefill

    def counting(graphdef, params, tokens, lengths):
        prefilled.extend(length for length in np.asarray(lengths).tolist() if length)
        return prefill(graphdef, params, tokens, lengths)

    monkeypatch.setattr(engine, "prefill", counting)

    def talk(*stop_texts):
        prefilled.clear()
        given = {"stops": (-1,), "conversations": Answers(answers), "stop_texts": stop_texts}
        found = complete(mixed, prompts, options, room=Room(3), **given)
        check(mixed, prompts, found, length=64)
        return found

    whole = talk()
    assert [one.given for one in whole] == [[(CHUNK, CHUNK + len(answer))] for [answer] in answers]
    assert len(prefilled) == 3
    cut = talk(bytes_tokenizer().decode(whole[0].tokens[CHUNK - 3 : CHUNK - 1]))
    assert [one.given[0][0] for one in cut] == [CHUNK - 1, CHUNK, CHUNK]
    assert len(prefilled) == 4


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
