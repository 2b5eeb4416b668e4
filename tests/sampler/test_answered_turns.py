"""Answered turns go on from the cache, and from states, as the model without a cache would."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from test_rollout import VOCABULARY, WINDOWS, check, complete, made, random_model, random_prompts
from tiny import ARCHITECTURE, QWEN35, config

from mllm.config.rollout import RolloutConfig
from mllm.model.architecture import FULL, LINEAR, SLIDING, Architecture
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel.mesh import bytes_on_device, make_mesh
from mllm.plan.programs import Programs, RolloutPrograms
from mllm.sampler import engine
from mllm.sampler.sampler import Sampler
from mllm.sampler.schedule import DecodeLimits, TypicalBatch
from mllm.sampler.slots import CHUNK


class Answers:
    """Answers each turn but a sequence's last with the next of its texts of tokens."""

    def __init__(self, texts):
        self.texts, self.turns, self.requests = texts, {}, []

    def send(self, turns):
        for sequence, one in turns.items():
            self.turns.setdefault(sequence, []).append(one.tokens.tolist())

    def receive(self, sequences):
        self.requests.append(list(sequences))
        return {one: dict(enumerate(self.texts[one], 1)).get(len(self.turns[one])) for one in sequences}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "room"),
    [
        pytest.param(ARCHITECTURE, DecodeLimits(5, 4 * 32), id="few pages"),  # the longest conversation has 4
        pytest.param(WINDOWS, DecodeLimits(5), id="windows", marks=pytest.mark.nightly),
        pytest.param(QWEN35, DecodeLimits(1, 5 * 32), id="states, one slot", marks=pytest.mark.nightly),
    ],
)
def test_answers_are_prefilled_behind_cached_tokens(sizes, room):
    prompts, rng, chosen = random_prompts(), np.random.default_rng(1), made(sizes)
    texts = [[rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 20, i % 4)] for i in range(len(prompts))]
    options = RolloutConfig(max_prompt_length=12, max_completion_length=9, max_turns=4, max_total_length=120)
    talk, reports = Answers(texts), []
    given = {"options": options, "stops": (3, 5)}
    completions = complete(chosen, prompts, room=room, conversations=talk, ended=reports.append, **given)
    check(chosen, prompts, completions)
    assert sorted(number for some in reports for number in some) == list(range(len(prompts)))
    for sequence, one in enumerate(completions):
        begins, ends = ([*edges] for edges in zip(*one.given, strict=True)) if one.given else ([], [])
        turns = zip([0, *ends], [*begins, len(one.tokens)], strict=True)
        assert [one.tokens[a:b].tolist() for a, b in turns] == talk.turns[sequence]
        assert [one.tokens[a:b].tolist() for a, b in one.given] == texts[sequence]
    if sizes is ARCHITECTURE:
        again = complete(chosen, prompts, room=DecodeLimits(3), conversations=Answers(texts), **given)
        assert [one.tokens for one in again] == [one.tokens for one in completions]


@pytest.mark.slow
def test_the_first_rollout_compiles_all_decode_programs(caplog):
    """Where all conversations of the first last equally long, later ones need fewer slots in the end."""
    chosen = made(ARCHITECTURE)
    options = RolloutConfig(max_prompt_length=4, max_completion_length=3, max_turns=2, max_total_length=16)
    prompts, typical = [[number] for number in range(1, 5)], TypicalBatch(4, 4)
    sampler = Sampler(nnx.split(chosen)[0], Renderer(bytes_tokenizer()), (-1,), options, 0, typical=typical)
    for texts, programs in (([[[7]]] * 4, 2), ([[[7]], [], [], []], 0)):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level("WARNING"):
            sampler.complete(nnx.state(chosen), prompts, step=0, conversations=Answers(texts))
        assert len(re.findall(r"Finished XLA compilation of jit\(decode\)", caplog.text)) == programs


@pytest.mark.slow
def test_turns_go_on_from_the_states_of_their_last_tokens(monkeypatch):
    """A layer of each kind. Turns are one chunk; the first ends a token before it, once by a stop text.

    Where a stop token ends a turn in the middle of a chunk, the steps after it leave its states as they are.

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

    def talk(*stop_texts, stop=-1):
        prefilled.clear()
        given = {"stops": (stop,), "conversations": Answers(answers), "stop_texts": stop_texts}
        completions = complete(mixed, prompts, options, room=DecodeLimits(3), **given)
        check(mixed, prompts, completions, length=64)
        return completions

    whole = talk()
    assert [one.given for one in whole] == [[(CHUNK, CHUNK + len(answer))] for [answer] in answers]
    assert len(prefilled) == 3
    cut = talk(bytes_tokenizer().decode(whole[0].tokens[CHUNK - 3 : CHUNK - 1]))
    assert [one.given[0][0] for one in cut] == [CHUNK - 1, CHUNK, CHUNK]
    assert len(prefilled) == 4
    stopped = talk(stop=whole[0].tokens[CHUNK // 2])
    assert stopped[0].given[0][0] <= CHUNK // 2 + 1
    assert len(prefilled) == 3


@pytest.mark.slow
def test_decode_steps_change_states_in_place():
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 8}
    layers = {"num_hidden_layers": 6, "layer_types": ["linear_attention"] * 5 + ["full_attention"]}
    settings = config(batch_size=64, model={"architecture": {**QWEN35, **heads, **layers}})
    shapes = RolloutPrograms(Programs(settings, make_mesh(settings.mesh)), settings.rollout)
    function, arguments = shapes.decode()
    used, states = function.lower(*arguments).compile().memory_analysis(), bytes_on_device(shapes.states())
    assert used.alias_size_in_bytes >= states
    assert used.temp_size_in_bytes < states / 4
