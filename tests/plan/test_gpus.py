"""H100s that aren't there: their names, the memory that a program may have, and whether its account can be right.

The compiler's account of the head is held against arithmetic. No GPU has ever confirmed it.
"""

import importlib.util
import os

import head_programs as head
import pytest
import tiny

from mllm.config.model import MeshConfig
from mllm.parallel.mesh import bytes_on_device
from mllm.plan import assignment, gpus, memory, targets
from mllm.plan.assignment import Account
from mllm.plan.programs import Programs

MIB = 2**20
ONE = {"chip": 1}


def test_a_target_names_one_to_eight_gpus():
    assert [gpus.count(target) for target in ("h100", "h100:1", "h100:8")] == [1, 1, 8]
    for target in ("h100:0", "h100:9", "h100:", "h100:2x4", "h100:-1"):
        with pytest.raises(ValueError, match="there are h100 and h100:2 to h100:8"):
            gpus.count(target)


def test_a_program_may_have_three_quarters_of_the_memory_or_the_share_that_the_environment_sets(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert gpus.memory() == targets.memory_limit("h100:8") == 84942979072 * 3 // 4
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert gpus.memory() == 84942979072 // 2
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.25")
    assert gpus.memory() == 84942979072 // 4


def test_only_what_the_plugin_prints_while_it_loads_is_silenced(capfd):
    with gpus.silent_stderr():
        os.write(2, b"no driver\n")
    os.write(2, b"an error\n")
    assert capfd.readouterr().err == "an error\n"


def test_without_the_plugin_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "FOLDER", tmp_path)
    with pytest.raises(ModuleNotFoundError, match="isn't installed; make aot-gpu does"):
        gpus.register()


def test_the_larger_of_two_compilations_counts_and_one_that_is_refused_does_not(monkeypatch):
    def read(*arguments):
        if peaks[arguments[-1]] is None:
            raise ValueError("no tiles")
        return Account(1, 2, peaks[arguments[-1]])

    monkeypatch.setattr(assignment, "_read", read)
    for found, larger in (((20, 30), 30), ((None, 3), 3)):
        peaks = dict(zip(gpus.FLAGS, found, strict=True))
        assert assignment.read("h100", "a:b", ONE).peak == larger
    peaks = dict.fromkeys(gpus.FLAGS)
    with pytest.raises(ValueError, match="no tiles"):
        assignment.read("h100", "a:b", ONE)


@pytest.mark.aot_gpu
@pytest.mark.skipif(
    not gpus.FOLDER.is_dir() and importlib.util.find_spec("jax_plugins") is None,
    reason="needs XLA's plugin for CUDA, which make aot-gpu installs",
)
class TestTheAccount:
    TOKENS, FEATURES, VOCABULARY = 4096, 256, 32768
    SIZES = {"tokens": TOKENS, "features": FEATURES, "vocabulary": VOCABULARY}  # noqa: RUF012

    def test_has_the_arguments_to_the_byte(self):
        found = assignment.read("h100", f"{head.__file__}:value", ONE, **self.SIZES)
        # Hidden states and weight in bfloat16, labels, and the one of the four numbers a token that is used.
        assert found.arguments == 2 * (self.TOKENS + self.VOCABULARY) * self.FEATURES + 8 * self.TOKENS

    def test_is_what_the_compiled_program_says_and_has_full_logits_and_their_gradient_but_neither_with_the_fused_head(
        self,
    ):
        mesh, logits = targets.mesh("h100"), 4 * self.TOKENS * self.VOCABULARY
        whole = targets.memory(targets.compiled(*head.loss(mesh, **self.SIZES), mesh))
        fused = assignment.read("h100", f"{head.__file__}:loss", ONE, **self.SIZES)
        assert fused.arguments == whole["argument"]
        # With the fused head both compilations hold the same, but for cuBLAS's workspace.
        assert fused.peak == pytest.approx(whole["peak"], abs=8 * MIB)
        assert fused.temporaries < logits / 4
        full = assignment.read("h100", f"{head.__file__}:loss", ONE, impl="full_logits", **self.SIZES)
        assert 1.5 * logits < full.temporaries < 2 * logits  # the gradient is bfloat16

    def test_of_several_gpus_has_what_one_of_them_holds(self):
        config = tiny.config(mesh={"fsdp": 2})
        devices = memory.find_devices(MeshConfig(fsdp=2), "h100:2")
        planner = memory.Planner(config, devices, lambda line: None)
        update = planner.compile("update", "update")
        state, batch, _ = Programs(config, devices.mesh).update()[1]
        # An argument that is not used, as a batch's positions may be, is left out.
        assert bytes_on_device(state) <= update.arguments <= bytes_on_device(state) + bytes_on_device(batch)
