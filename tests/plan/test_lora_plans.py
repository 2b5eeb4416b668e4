"""What LoRA saves, by the plans of Qwen2.5's GRPO recipes: rank 32, 320 rows of 512 + 1024 tokens, one device."""

import importlib.util

import pytest

from mllm.config import load as configs
from mllm.parallel.mesh import bytes_on_device, make_mesh
from mllm.plan import gpus, memory
from mllm.plan.programs import Programs


def recipe(name, *overrides):
    return configs.load(f"qwen25_{name}_grpo.yaml", ["mesh.fsdp=1", *overrides])


@pytest.mark.parametrize(("size", "gigabytes", "in_full"), [("7b", 16.2, 121.8), ("3b", 6.9, 49.4)])
def test_parameters_moments_and_gradients_take_a_seventh_of_those_of_full_training(size, gigabytes, in_full):
    """In GB: a frozen base in bfloat16, and 12 bytes for each number of an adapter; in full 16 for each parameter."""
    for name, expected in ((f"{size}_lora", gigabytes), (size, in_full)):
        config = recipe(name)
        shapes = Programs(config, make_mesh(config.mesh))
        states = shapes.policy.params, shapes.state.opt_state, shapes.gradients()
        assert sum(map(bytes_on_device, states)) / 1e9 == pytest.approx(expected, abs=0.05)


def assert_fits(config, target):
    devices = memory.find_devices(config.mesh, target)
    phases = memory.Planner(config, devices, lambda line: None).phases()
    assert {phase.name: phase.peak for phase in phases if phase.peak > devices.memory} == {}


@pytest.mark.aot_gpu
@pytest.mark.slow
@pytest.mark.skipif(not gpus.FOLDER.exists(), reason="needs XLA's plugin for CUDA, which make aot-gpu installs")
def test_7b_fits_an_80_gb_gpu_with_all_320_rows_in_slots():
    assert_fits(recipe("7b_lora", "rollout.max_slots=320"), "h100")


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
def test_3b_fits_a_v6e_chip():
    assert_fits(recipe("3b_lora"), "v6e")
