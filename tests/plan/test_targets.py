"""Devices that aren't there: their names, the compilers' account of memory, and their decode steps for v6e and H100."""

import re
from dataclasses import replace
from types import SimpleNamespace

import head_programs as head
import jax
import numpy as np
import pytest
import tiny
from compiled_program import FOR_GPUS, FOR_TPUS

from mllm.config import load as configs
from mllm.config.model import MeshConfig
from mllm.errors import UserError
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import AXES, make_mesh
from mllm.plan import memory, targets
from mllm.plan.programs import Programs, RolloutPrograms
from mllm.plan.targets import Account


def test_memory_refusals_give_the_need_and_other_faults_raise():
    message = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (56.06G) exceeds available HBM (31.25G)."  # noqa: E501

    def refused(text):
        def program():
            raise jax.errors.JaxRuntimeError(text)

        return targets.account_of(program, (), targets.Devices("a TPU at hand", make_mesh(MeshConfig(fsdp=1)), 1, 0))

    assert refused(message) == Account(int(56.06 * 2**30), int(56.06 * 2**30))
    with pytest.raises(UserError, match="a TPU at hand: the compiler refuses the program: INTERNAL: Mosaic"):
        refused("INTERNAL: Mosaic failed to compile")


@pytest.mark.parametrize("name", ["fusion.2.remat", "fusion.remat.1.remat2", "fusion.2"])
def test_repeated_operations_are_known_by_their_names(name):
    class Program(jax.stages.Compiled):
        __init__ = object.__init__

        def memory_analysis(self):
            kinds = ("temp", "argument", "output", "alias")
            return SimpleNamespace(**{f"{kind}_size_in_bytes": 1 for kind in kinds})

        def as_text(self):
            return f'  %x.1 = f32[] add(%y), metadata={{op_name="rematted"}}\n  %{name} = f32[8]{{0}} fusion(%x)'

    assert targets.memory(Program()) == Account(1, 2, repeats="remat" in name)


def test_a_target_is_a_chip_a_slice_or_the_gpus_of_a_host():
    shapes = {"v6e": (1, 1), "v6e:2x4": (2, 4), "tpu7x": (1, 1, 1), "h100": (1,), "h100:8": (8,)}
    for target, shape in shapes.items():
        assert targets.split(target) == (target.partition(":")[0], shape)
    for target in ("v9", "v6e:2", "v5p:2x2", "v6e:0x1", "v6e:axb", "", "h100:9", "h100:", "h100:2x4"):
        with pytest.raises(ValueError, match="target"):
            targets.split(target)


def test_the_error_without_the_plugin_names_its_make_target(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "GPU_PLUGIN", tmp_path / "none")
    with pytest.raises(ModuleNotFoundError, match=r"isn't installed: make \.venv/aot-gpu"):
        targets.register_gpu_plugin()


# --- the compilers ---

QWEN2, QWEN3, LLAMA = "Qwen/Qwen2.5-3B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"  # Llama's heads have 64
GEMMA = "google/gemma-3-270m"  # of its layers most keep 512 places
QWEN35 = "Qwen/Qwen3.5-0.8B"  # three of four layers keep a state


def decode_program(target, source, slots, shape, *settings):
    """A model's compiled decode step with half of the longest sequences' tokens."""
    axes = [f"mesh.{axis}={count}" for axis, count in zip(AXES, shape, strict=True)]
    settings = [f"model.source={source}", f"rollout.max_slots={slots}", *axes, *settings]
    mesh = targets.mesh(target, shape, AXES)
    config = configs.load("qwen25_3b_grpo.yaml", settings)
    shapes = RolloutPrograms(Programs(config, mesh), config.rollout, tokens=768 * slots)
    return targets.compiled(*shapes.decode(), mesh)


class TestByTheTpuCompiler:
    pytestmark = FOR_TPUS

    def test_a_too_large_program_has_the_account_of_its_refusal(self):
        mesh, sizes = targets.mesh("v6e"), {"features": 512, "vocabulary": 151936, "impl": "full_logits"}
        there = targets.Devices("v6e", mesh, 1, targets.CHIPS["v6e"].memory, here=False)
        account = targets.account_of(*head.loss(mesh, tokens=2**16, **sizes), there)
        assert account.peak > account.temporaries > 4 * 2**16 * 151936 > targets.CHIPS["v6e"].memory

    def test_temporaries_of_a_program_with_loops_are_counted_once(self):
        """`memory_analysis()` gives seven arrays of the weight's size."""
        mesh = targets.mesh("v6e:2x4", (1, 8, 1), AXES)
        account = targets.account(*head.loss(mesh, tokens=2**16, features=896, impl="chunked_logits"), mesh)
        weight = 2 * 151936 * 896
        assert account.temporaries < 6 * weight

    @pytest.mark.parametrize("chip", targets.TPUS)
    def test_devices_have_the_name_and_memory_of_the_compiler(self, chip):
        mesh = targets.mesh(chip)
        assert mesh.devices.flat[0].device_kind == targets.TPUS[chip].kind
        shape = jax.ShapeDtypeStruct((2**20, 2**17), np.float32)
        limit = rf"exceeds available HBM \({targets.TPUS[chip].memory / 2**30:.2f}G\)"
        with pytest.raises(jax.errors.JaxRuntimeError, match=limit):
            targets.compiled(lambda x: jax.lax.sort(2 * x, dimension=0), (shape,), mesh)

    def test_a_slice_that_does_not_exist_or_is_too_small_is_refused(self):
        with pytest.raises(ValueError, match="'v6e:3x5': v6e has no such slice"):
            targets.mesh("v6e:3x5")
        with pytest.raises(ValueError, match=r"has 4 devices, a mesh of \(1, 8, 1\) needs 8"):
            targets.mesh("v6e:2x2", (1, 8, 1), AXES)

    @pytest.mark.slow
    def test_a_run_is_planned_for_a_slice_that_is_not_there(self):
        lines = []
        memory.plan(*targets.find_devices(tiny.config(mesh={"fsdp": 2}), "v6e:2x4"), lines.append)
        assert lines[0].startswith("v6e:2x4: mesh dp 1, fsdp 2, tp 1, 2 of 8 devices, 31.25 GiB each")
        assert any(line.startswith("fits: ") for line in lines)

    @pytest.mark.parametrize(
        ("source", "settings", "layers"),
        [
            (GEMMA, [], 6),
            *(pytest.param(x, [], None, marks=pytest.mark.nightly) for x in (GEMMA, QWEN2, QWEN3, QWEN35, LLAMA)),
            pytest.param(QWEN2, ["rollout.weights=int8"], None, marks=pytest.mark.nightly),
        ],
    )
    def test_decoding_on_v6e_copies_no_weights_cache_or_states(self, source, settings, layers, monkeypatch):
        """Six layers of Gemma are of both kinds."""
        if layers:
            short = replace(PRESETS[source], num_hidden_layers=layers, layer_types=PRESETS[source].layer_types[:layers])
            monkeypatch.setitem(PRESETS, source, short)
        program = decode_program("v6e:2x4", source, 320, (1, 8, 1), *settings)
        assert program.memory_analysis().temp_size_in_bytes <= (132 if source == QWEN35 else 72) * 2**20


class TestByTheGpuCompiler:
    pytestmark = FOR_GPUS

    def test_the_gpu_account_has_logits_only_without_the_fused_head(self):
        sizes, mesh = {"tokens": 16384, "features": 256, "vocabulary": 32768}, targets.mesh("h100")
        programs = (head.loss(mesh, impl=impl, **sizes) for impl in (None, "full_logits"))
        fused, full = (targets.account(*program, mesh).temporaries for program in programs)
        logits = 4 * sizes["tokens"] * sizes["vocabulary"]
        assert fused < logits / 8  # waves of 2,048 rows
        assert 1.5 * logits < full < 2 * logits  # the gradient is bfloat16

    @pytest.mark.parametrize(("remat", "repeats"), [("products", True), ("full", False)])
    def test_xla_repeats_operations_of_a_program_that_would_fill_the_memory(self, remat, repeats):
        mesh = targets.mesh("h200", (1, 1, 1), AXES)
        settings = ["model.init=random", "micro_batch_size=16", f"model.remat={remat}"]
        config = configs.load("qwen25_3b_grpo.yaml", settings)
        assert targets.account(*Programs(config, mesh).update(), mesh).repeats == repeats

    def test_arrays_of_all_layers_are_not_filled_with_zeros_first(self):
        """Kept products of 24 layers, 4 rows and 1,536 tokens."""
        mesh = targets.mesh("h100", (1, 1, 1), AXES)
        settings = ["model.init=random", "micro_batch_size=4", "model.remat=products"]
        update = Programs(configs.load("qwen25_0p5b_grpo.yaml", settings), mesh).update()
        program = targets.compiled(*update, mesh, targets.CUBLAS).as_text()
        made = re.findall(r"= bf16\[24,4,1536,4864\]\S* (?:fusion|copy|custom-call)\(\).*", program)
        assert len(made) == 2  # gate and up
        assert all('custom_call_target="AllocateBuffer"' in line for line in made)

    @pytest.mark.parametrize(("source", "slots"), [(QWEN2, 320), (QWEN3, 80), (LLAMA, 80), (GEMMA, 80)])
    def test_decoding_on_an_h100_copies_no_weights_or_cache(self, source, slots):
        program = decode_program("h100", source, slots, (1, 1, 1))
        assert program.memory_analysis().temp_size_in_bytes <= 200 * 2**20  # logits of 320 slots are 186 MiB

    def test_decoding_on_an_h100_keeps_one_array_of_states(self):
        """Left to itself XLA turns all states before a chunk of decode steps and after it."""
        program = decode_program("h100", QWEN35, 80, (1, 1, 1))
        assert program.memory_analysis().temp_size_in_bytes <= 96 * 2**20  # of 1440 MiB of states
