"""H100s that aren't there: their names, the memory that a program may have, and whether its account can be right.

The compiler's account of the head is held against arithmetic. No GPU has ever confirmed it.
"""

import importlib.util
import os

import pytest
import tiny

from mllm.config.schema import MeshConfig
from mllm.plan import assignment, gpus, memory, targets
from mllm.plan.assignment import Account
from mllm.plan.programs import Programs

MIB = 2**20
ONE = {"chip": 1}


@pytest.mark.parametrize(("target", "number"), [("h100", 1), ("h100:1", 1), ("h100:8", 8)])
def test_a_target_names_a_number_of_gpus(target, number):
    assert gpus.is_gpu(target)
    assert gpus.count(target) == number


@pytest.mark.parametrize("target", ["h100:0", "h100:9", "h100:", "h100:2x4", "h100:-1"])
def test_another_number_is_refused(target):
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
    peaks = dict(zip(gpus.FLAGS, (20, 30), strict=True))
    assert assignment.read("h100", "a:b", ONE).peak == 30
    peaks = dict(zip(gpus.FLAGS, (None, 3), strict=True))
    assert assignment.read("h100", "a:b", ONE).peak == 3
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
    SIZES = {"features": FEATURES, "vocabulary": VOCABULARY}  # noqa: RUF012

    def test_has_the_arguments_to_the_byte(self):
        tokens, features, vocabulary = self.TOKENS, self.FEATURES, self.VOCABULARY
        found = assignment.read("h100", "mllm.plan.head_programs:value", ONE, tokens=tokens, **self.SIZES)
        # Hidden states and weight in bfloat16, labels, and the one of the four numbers a token that is used.
        assert found.arguments == 2 * (tokens + vocabulary) * features + 4 * tokens + 4 * tokens

    def test_is_what_the_compiled_program_says_of_itself(self):
        mesh = targets.mesh("h100")
        function, shapes = targets.program("mllm.plan.head_programs:loss")(mesh, tokens=self.TOKENS, **self.SIZES)
        whole = targets.memory(targets.compiled(function, shapes, mesh))
        found = assignment.read("h100", "mllm.plan.head_programs:loss", ONE, tokens=self.TOKENS, **self.SIZES)
        assert found.arguments == whole["argument"]
        # With the fused head both compilations hold the same, but for cuBLAS's workspace.
        assert found.peak == pytest.approx(whole["peak"], abs=8 * MIB)

    def test_has_full_logits_twice_where_cublas_multiplies_and_none_with_the_fused_head(self):
        logits = 4 * self.TOKENS * self.VOCABULARY
        loss = {"tokens": self.TOKENS, **self.SIZES}
        full = assignment.read("h100", "mllm.plan.head_programs:loss", ONE, impl="full_logits", **loss)
        fused = assignment.read("h100", "mllm.plan.head_programs:loss", ONE, **loss)
        assert 2 * logits < full.temporaries < 2.5 * logits
        assert fused.temporaries < logits / 4

    def test_of_several_gpus_has_what_one_of_them_holds(self):
        config = tiny.config(mesh={"fsdp": 2})
        devices = memory.find_devices(MeshConfig(fsdp=2), "h100:2")
        planner = memory.Planner(config, devices, lambda line: None)
        update = planner.compile("update", "update")
        state, batch = Programs(config, devices.mesh).update()[1]
        # An argument that is not used, as a batch's positions may be, is left out.
        assert memory.on_device(state) <= update.arguments <= memory.on_device(state) + memory.on_device(batch)
