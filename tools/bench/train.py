"""Updates of a small model beside each other: python tools/bench train

    packed    sequences are packed into rows
    padded    the same with a row for each sequence

The updates are those of a GRPO run on a Qwen2 model with random parameters, in float32 on CPUs and bfloat16 elsewhere.
Tokens and advantages are random; lengths are geometric, with a quarter of the limit as their mean, and cut off there.
The ways take turns, each in a process of its own that is warmed up. Medians over the turns; the ratio is that of the
seconds to the first way's, with its range; places are the tokens that are computed, and padding is the share of them
without a token.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from mllm import errors
from tools.bench.frame import Figures, answer, compare, turn
from tools.bench.rollout import qwen2_config

WAYS = ("packed", "padded")
PROMPT = 32
"""The tokens of a prompt."""


def make_measure(way: str, sizes: dict[str, int]) -> Callable[[int], Figures]:
    """A function that makes an update of the sequences with this seed, and says what it took."""
    import jax
    import numpy as np

    from mllm.config.schema import Config
    from mllm.data import packing
    from mllm.data.batch import Batch, Trajectory
    from mllm.parallel.mesh import make_mesh, shard_batch
    from mllm.plan.programs import Programs
    from mllm.train.step import init_state

    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    architecture = qwen2_config(sizes["hidden"], sizes["layers"], sizes["vocabulary"])
    settings = {  # what is not used is as small as it may be
        "algorithm": "grpo",
        "run_dir": "unused",
        "steps": 1,
        "batch_size": sizes["sequences"],
        "model": {"init": "random", "architecture": architecture, "dtype": dtype, "remat": "full"},
        "optimizer": {"learning_rate": 1e-6},
        "task": {"name": "arithmetic"},
        "rollout": {"max_prompt_length": PROMPT, "max_completion_length": sizes["limit"] - PROMPT},
        "grpo": {"num_generations": 2},
    }
    config = Config.model_validate(settings)
    mesh, rows = make_mesh(config.mesh), config.rows
    programs = Programs(config, mesh)
    train_step: Any
    train_step, abstract = programs.update()
    compiled = train_step.lower(*abstract).compile()

    if way == "padded":
        mock.patch.object(packing, "first_fit_decreasing", lambda lengths, _: np.arange(len(lengths))).start()
    trained, frozen = programs.policy.split(programs.policy.initial_params())
    state = init_state(trained, programs.optimizer)
    del trained  # the update reuses its memory

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        limit, vocabulary = sizes["limit"] - PROMPT, sizes["vocabulary"]
        lengths = np.minimum(rng.geometric(4 / limit, sizes["sequences"]), limit)
        tokens = [rng.integers(0, vocabulary, PROMPT + length, np.int32) for length in lengths]
        logprobs = (-rng.random(length, np.float32) for length in lengths)
        weights, advantages = 1 / lengths / len(lengths), rng.standard_normal(len(lengths))
        sampled = (np.arange(PROMPT + length) >= PROMPT for length in lengths)
        trajectories = [Trajectory(*one) for one in zip(tokens, sampled, logprobs, strict=True)]
        return packing.pack(trajectories, weights, advantages, rows)

    def measure(seed: int) -> Figures:
        nonlocal state
        batch = make_batch(seed)
        placed = shard_batch(mesh, batch)
        start = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, placed, frozen))
        seconds, has_token = time.perf_counter() - start, batch.segments > 0
        places = -(-int(has_token.any(axis=1).sum()) // rows.micro) * rows.micro * rows.length
        return {"seconds": seconds, "places": places, "padding": 1 - int(has_token.sum()) / places}

    return measure


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    return compare(
        "train",
        __doc__,
        arguments,
        WAYS,
        sequences=(16, "sequences of an update, an even number"),
        limit=(128, "tokens of the longest sequence"),
        hidden=(512, "hidden size"),
        layers=(8, "layers"),
        vocabulary=(32_768, "words"),
        repeats=(5, "turns, each with other sequences"),
    )


if __name__ == "__main__":
    answer(turn, make_measure)
