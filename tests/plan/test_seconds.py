"""The estimate of a step's seconds: its arithmetic, against numbers worked out by hand."""

import tiny

from mllm.config.grpo import RolloutConfig
from mllm.parallel.mesh import make_mesh
from mllm.plan.programs import Programs
from mllm.plan.seconds import BANDWIDTH, FLOPS, decode_steps, estimate, geometric_lengths

OPTIONS = RolloutConfig(max_prompt_length=512, max_completion_length=1024)


def test_lengths_are_geometric_with_a_quarter_of_the_limit_as_their_mean():
    lengths = geometric_lengths(1000, 1024)
    assert 0.23 < sum(lengths) / len(lengths) / 1024 < 0.26
    assert 0.01 < sum(length == 1024 for length in lengths) / len(lengths) < 0.03


def test_decode_steps_follow_the_engine_s_slots_and_places():
    """Two slots for three rows: the third enters after the first; the end is decoded in one slot."""
    steps = decode_steps([16, 64, 48], slots=2, prompt=100, options=OPTIONS)
    assert sum(count for count, _, _ in steps) == 64
    assert [slots for _, slots, _ in steps] == [2, 2, 2, 2]
    assert decode_steps([16, 32], 2, 100, OPTIONS) == [(16, 2, 192), (16, 1, 192)]


def test_an_update_takes_four_forward_passes_of_the_tokens_with_full_remat_and_memory_bounds_the_rollout():
    config = tiny.config(model={"remat": "full"}, rollout={"max_prompt_length": 16, "max_completion_length": 64})
    shapes = Programs(config, make_mesh(config.mesh))
    tokens = 8 * 4 + sum(geometric_lengths(8, 64))
    parameters = sum(leaf.size for leaf in shapes.policy.params.values() if hasattr(leaf, "size")) + sum(
        leaf.size for leaf in shapes.policy.params["layers"].values()
    )
    four = tiny.config(grpo={"steps_per_generation": 2, "num_iterations": 2}, model={"remat": "full"})
    rollout_of_four = estimate(Programs(four, make_mesh(four.mesh)), 1e9, 1e30)
    assert rollout_of_four.update == 8 * rollout_of_four.logprob > 0  # two mini-batches, gone through twice
    assert Programs(four, make_mesh(four.mesh)).slots == 16
    fast_memory, slow_memory = estimate(shapes, 1e9, 1e30), estimate(shapes, 1e30, 1e9)
    assert abs(fast_memory.update / (4 * 2 * parameters * tokens / (FLOPS * 1e9)) - 1) < 1e-6
    assert fast_memory.logprob == 0
    assert slow_memory.rollout * BANDWIDTH * 1e9 > 4 * parameters * slow_memory.steps
