"""Turns that are answered go on from what is cached, as the model without a cache would."""

import re

import jax
import numpy as np
import pytest
from flax import nnx
from test_rollout import VOCABULARY, WINDOWS, check, complete, made, random_prompts
from tiny import ARCHITECTURE, QWEN35

from mllm.config.rollout import RolloutConfig
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.sampler.sampler import Sampler
from mllm.sampler.schedule import Room, Usual


class Answers:
    """Answers each turn but a sequence's last with the next of its texts of tokens."""

    def __init__(self, texts):
        self.texts, self.turns, self.asked = texts, {}, []

    def send(self, found):
        for sequence, one in found.items():
            self.turns.setdefault(sequence, []).append(one.tokens.tolist())

    def receive(self, sequences):
        self.asked.append(list(sequences))
        return {one: dict(enumerate(self.texts[one], 1)).get(len(self.turns[one])) for one in sequences}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "room"),
    [
        pytest.param(ARCHITECTURE, Room(5, 4 * 32), id="few pages"),  # the longest conversation has 4
        pytest.param(WINDOWS, Room(5), id="windows", marks=pytest.mark.nightly),
        pytest.param(QWEN35, Room(1, 5 * 32), id="states, one slot", marks=pytest.mark.nightly),
    ],
)
def test_answers_are_prefilled_behind_the_tokens_that_are_cached_and_turns_go_on_from_them(sizes, room):
    prompts, rng, chosen = random_prompts(), np.random.default_rng(1), made(sizes)
    texts = [[rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 20, i % 4)] for i in range(len(prompts))]
    options = RolloutConfig(max_prompt_length=12, max_completion_length=9, max_turns=4, max_total_length=120)
    talk, told = Answers(texts), []
    given = {"options": options, "stops": (3, 5)}
    found = complete(chosen, prompts, room=room, conversations=talk, ended=told.append, **given)
    check(chosen, prompts, found)
    assert sorted(number for some in told for number in some) == list(range(len(prompts)))
    for sequence, one in enumerate(found):
        begins, ends = ([*edges] for edges in zip(*one.given, strict=True)) if one.given else ([], [])
        turns = zip([0, *ends], [*begins, len(one.tokens)], strict=True)
        assert [one.tokens[a:b].tolist() for a, b in turns] == talk.turns[sequence]
        assert [one.tokens[a:b].tolist() for a, b in one.given] == texts[sequence]
    if sizes is ARCHITECTURE:
        again = complete(chosen, prompts, room=Room(3), conversations=Answers(texts), **given)
        assert [one.tokens for one in again] == [one.tokens for one in found]


@pytest.mark.slow
def test_the_first_rollout_in_turns_compiles_all_decode_programs_of_those_to_come(caplog):
    """Where all conversations of the first last equally long, later ones need fewer slots in the end."""
    chosen = made(ARCHITECTURE)
    options = RolloutConfig(max_prompt_length=4, max_completion_length=3, max_turns=2, max_total_length=16)
    prompts, usual = [[number] for number in range(1, 5)], Usual(4, 4)
    sampler = Sampler(nnx.split(chosen)[0], Renderer(bytes_tokenizer()), (-1,), options, 0, usual=usual)
    for texts, programs in (([[[7]]] * 4, 2), ([[[7]], [], [], []], 0)):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level("WARNING"):
            sampler.complete(nnx.state(chosen), prompts, step=0, conversations=Answers(texts))
        assert len(re.findall(r"Finished XLA compilation of jit\(decode\)", caplog.text)) == programs
