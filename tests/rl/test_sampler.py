"""The sampler's texts; test_dynamic_sampling.py compares its log-probabilities with the trainer's."""

from tiny import ARCHITECTURE, config

from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.rl.sampler import Sampler

STOPS = (*range(128), *range(256, 260))
"""ASCII and the special tokens of the bytes tokenizer: about half of what the random model says."""


def test_the_text_of_a_completion_has_all_tokens_but_the_stop_token():
    settings = config(model={"architecture": {**ARCHITECTURE, "initializer_range": 0.3}})  # far from uniform
    policy = load_policy(settings, make_mesh(settings.mesh))
    sampler = Sampler(policy.graphdef, policy.tokenizer, STOPS, settings.rollout, seed=0)
    completions, texts = sampler.complete(policy.initial_params(), [[number] for number in range(64)], step=0)
    assert set(completions.finished.tolist()) == {True, False}
    for text, tokens, length, finished in zip(
        texts, completions.tokens.tolist(), completions.lengths.tolist(), completions.finished, strict=True
    ):
        kept = tokens[: length - 1] if finished else tokens[:length]
        assert (tokens[length - 1] in STOPS) == finished
        assert text == policy.tokenizer.decode(kept)
        assert not any(character.isascii() for character in text)
