"""Devices that aren't there: their names, and the compilers' account of memory against the whole program's.

For GPUs the account is held against arithmetic, too. A plan was held against an H200 once: docs/log.md.
"""

import importlib.util
import os
from types import SimpleNamespace

import head_programs as head
import jax
import numpy as np
import pytest

from mllm.config import load as configs
from mllm.parallel.mesh import AXES
from mllm.plan import memory, targets
from mllm.plan.targets import Account

ONE = {"chip": 1}
REPORT = """Memory Space: default (color=0)
Total bytes: 1000 (1000B)
Memory Space: vmem (color=1)
Total bytes: 7 (7B)
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 100, parameter 1, shape |f32[25]| at ShapeIndex {}:
 value: <7 x.1 @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 300, output shape is |f32[75]|, maybe-live-out, parameter 0, shape |f32[75]| at ShapeIndex {}:
allocation 2: size 600, preallocated-temp:
 value: <5 y @0> (size=600,offset=0): f32[150]{0}
allocation 3: size 7, color 1, preallocated-temp:
"""


def test_the_account_has_the_temporaries_and_the_peak_in_the_device_s_memory():
    assert targets.parse_account(REPORT, ASSIGNMENT) == Account(temporaries=600, peak=1000)


@pytest.mark.parametrize(
    ("target", "shape"), [("v6e", (1, 1)), ("v6e:2x4", (2, 4)), ("tpu7x", (1, 1, 1)), ("h100", (1,)), ("h100:8", (8,))]
)
def test_a_target_is_a_chip_a_slice_or_the_gpus_of_a_host(target, shape):
    assert targets.split(target) == (target.partition(":")[0], shape)


@pytest.mark.parametrize(
    "target", ["v9", "v6e:2", "v6e:2x2x2", "v5p:2x2", "v6e:0x1", "v6e:axb", "", "h100:9", "h100:", "h100:2x4"]
)
def test_another_target_is_refused(target):
    with pytest.raises(ValueError, match="target"):
        targets.split(target)


def test_only_what_the_plugin_prints_while_it_loads_is_silenced(capfd):
    with targets.silent_stderr():
        os.write(2, b"no driver\n")
    os.write(2, b"an error\n")
    assert capfd.readouterr().err == "an error\n"


def test_without_the_plugin_the_error_says_how_to_install_it_and_one_beside_jax_needs_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "GPU_PLUGIN", tmp_path / "none")
    with pytest.raises(ModuleNotFoundError, match=r"isn't installed: make \.venv/aot-gpu"):
        targets.register_gpu_plugin()
    found = SimpleNamespace(devices=jax.devices())
    monkeypatch.setattr(targets.topologies, "get_topology_desc", lambda *_, **__: found)
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert targets.gpus(1) == jax.devices()


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
class TestByTheTpuCompiler:
    def test_the_account_is_what_the_compiled_program_says(self):
        sizes = {"tokens": 1024, "features": 256, "vocabulary": 4096}
        found = targets.account("v6e", f"{head.__file__}:loss", ONE, **sizes)
        mesh = targets.mesh("v6e")
        whole = targets.memory(targets.compiled(*head.loss(mesh, **sizes), mesh))
        assert found.peak == pytest.approx(whole["peak"], abs=2**19)

    @pytest.mark.slow
    def test_a_program_that_is_too_large_has_an_account_too(self):
        sizes = {"tokens": 2**16, "features": 512, "vocabulary": 151936, "impl": "full_logits"}
        found = targets.account("v6e", f"{head.__file__}:loss", ONE, **sizes)
        assert found.temporaries > 4 * 2**16 * 151936 > targets.TPUS["v6e"].memory

    @pytest.mark.parametrize("chip", targets.TPUS)
    def test_devices_have_the_name_and_the_memory_that_the_compiler_grants(self, chip):
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
        config = configs.load("qwen25_0p5b_grpo.yaml", ["mesh.fsdp=8"])
        told = []
        memory.plan(config, "v6e:2x4", told.append)
        assert told[0].startswith("v6e:2x4: mesh dp 1, fsdp 8, tp 1, 8 of 8 devices, 31.25 GiB each")
        assert any(line.startswith("fits: ") for line in told)


@pytest.mark.aot_gpu
@pytest.mark.skipif(
    not targets.GPU_PLUGIN.is_dir() and importlib.util.find_spec("jax_plugins") is None,
    reason="needs XLA's plugin for CUDA, which make aot-gpu installs",
)
class TestByTheGpuCompiler:
    def test_full_logits_and_their_gradient_are_in_the_account_but_neither_with_the_fused_head(self):
        sizes = {"tokens": 4096, "features": 256, "vocabulary": 32768}
        mesh, logits = targets.mesh("h100"), 4 * sizes["tokens"] * sizes["vocabulary"]
        whole = targets.memory(targets.compiled(*head.loss(mesh, **sizes), mesh))
        fused = targets.account("h100", f"{head.__file__}:loss", ONE, **sizes)
        # With the fused head Triton's products, as the whole program has them, hold the same, but for a workspace.
        assert fused.peak == pytest.approx(whole["peak"], abs=2**23)
        assert fused.temporaries < logits / 4
        full = targets.account("h100", f"{head.__file__}:loss", ONE, impl="full_logits", **sizes)
        assert 1.5 * logits < full.temporaries < 2 * logits  # the gradient is bfloat16
