"""H100s that aren't there: how they are named, what a program may have of one, and whether its account can be right.

What the compiler says of the head is held against arithmetic. No GPU has ever confirmed it.
"""

import importlib.util
import os

import jax
import pytest
import tiny

from mllm.config.schema import MeshConfig
from mllm.plan import assignment, gpus, targets
from mllm.plan import memory as plan
from mllm.plan.assignment import Account
from mllm.plan.programs import Programs

MIB = 2**20
ONE = {"chip": 1}
needs_plugin = pytest.mark.skipif(
    not gpus.FOLDER.is_dir() and importlib.util.find_spec("jax_plugins") is None,
    reason="needs XLA's plugin for CUDA, which make aot-gpu installs",
)


@pytest.mark.parametrize(("target", "number"), [("h100", 1), ("h100:1", 1), ("h100:8", 8)])
def test_a_target_says_how_many(target, number):
    assert gpus.named(target)
    assert gpus.count(target) == number


@pytest.mark.parametrize("target", ["h100:0", "h100:9", "h100:", "h100:2x4", "h100:-1"])
def test_another_number_is_refused(target):
    with pytest.raises(ValueError, match="there are h100 and h100:2 to h100:8"):
        gpus.count(target)


def test_other_names_are_not_of_gpus():
    assert not any(gpus.named(target) for target in ("v6e:2x4", "h1000", "h200"))


def test_a_program_may_have_three_quarters_of_the_memory_unless_the_environment_says_else(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert gpus.memory() == targets.memory_limit("h100:8") == 84942979072 * 3 // 4
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert gpus.memory() == 84942979072 // 2
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.25")
    assert gpus.memory() == 84942979072 // 4


def test_what_is_said_while_the_plugin_loads_reaches_nobody_and_what_is_said_after_it_does(capfd):
    with gpus.quiet():
        os.write(2, b"no driver\n")
    os.write(2, b"an error\n")
    assert capfd.readouterr().err == "an error\n"


def test_of_both_ways_to_multiply_the_one_that_holds_more_counts(monkeypatch):
    peaks = dict(zip(gpus.FLAGS, (20, 30), strict=True))
    monkeypatch.setattr(assignment, "_read", lambda *arguments: Account(1, 2, peaks[arguments[-1]]))
    assert assignment.read("h100", "a:b", ONE).peak == 30


def test_where_one_way_is_refused_the_other_counts_and_where_both_are_so_is_the_program(monkeypatch):
    def read(*arguments):
        if arguments[-1] not in possible:
            raise ValueError("no tiles")
        return Account(1, 2, 3)

    monkeypatch.setattr(assignment, "_read", read)
    possible = gpus.FLAGS[1:]
    assert assignment.read("h100", "a:b", ONE).peak == 3
    possible = ()
    with pytest.raises(ValueError, match="no tiles"):
        assignment.read("h100", "a:b", ONE)


def test_a_plan_says_that_it_was_never_held_against_a_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "devices", lambda target: jax.devices()[: gpus.count(target)])
    monkeypatch.setattr(plan.Planner, "compile", lambda *_: Account(0, 0, 5000))
    told = []
    plan.plan(tiny.config(mesh={"fsdp": 2}), "h100:2", told.append)
    assert told[0].startswith("h100:2: mesh dp 1, fsdp 2, tp 1, 2 of 2 devices, ")
    assert "never held against one" in told[1]


@pytest.mark.aot_gpu
@needs_plugin
class TestTheAccount:
    TOKENS, FEATURES, VOCABULARY = 4096, 256, 32768
    SIZES = {"features": FEATURES, "vocabulary": VOCABULARY}  # noqa: RUF012

    def test_has_the_arguments_to_the_byte(self):
        tokens, features, vocabulary = self.TOKENS, self.FEATURES, self.VOCABULARY
        found = assignment.read("h100", "mllm.plan.head_programs:value", ONE, tokens=tokens, **self.SIZES)
        # Hidden states and weight in bfloat16, labels, and of the four numbers a token the one that is used.
        assert found.arguments == 2 * (tokens + vocabulary) * features + 4 * tokens + 4 * tokens

    def test_is_what_the_compiled_program_says_of_itself(self):
        mesh = targets.mesh("h100")
        function, shapes = targets.program("mllm.plan.head_programs:loss")(mesh, tokens=self.TOKENS, **self.SIZES)
        whole = targets.memory(targets.compiled(function, shapes, mesh))
        found = assignment.read("h100", "mllm.plan.head_programs:loss", ONE, tokens=self.TOKENS, **self.SIZES)
        assert found.arguments == whole["argument"]
        # Of the fused head both compilations hold the same, but for what cuBLAS works in.
        assert found.peak == pytest.approx(whole["peak"], abs=8 * MIB)

    def test_has_full_logits_twice_where_cublas_multiplies_and_none_with_the_fused_head(self):
        logits = 4 * self.TOKENS * self.VOCABULARY
        loss = {"tokens": self.TOKENS, **self.SIZES}
        full = assignment.read("h100", "mllm.plan.head_programs:loss", ONE, impl="reference", **loss)
        fused = assignment.read("h100", "mllm.plan.head_programs:loss", ONE, **loss)
        assert 2 * logits < full.temporaries < 2.5 * logits
        assert fused.temporaries < logits / 4

    def test_of_several_gpus_has_what_one_of_them_holds(self):
        config = tiny.config(mesh={"fsdp": 2})
        devices = plan.find_devices(MeshConfig(fsdp=2), "h100:2")
        planner = plan.Planner(config, devices, lambda line: None)
        update = planner.compile("update", "update")
        state, batch = Programs(config, devices.mesh).update()[1]
        # An argument that is not used, as a batch's positions may be, is none.
        assert plan.on_device(state) <= update.arguments <= plan.on_device(state) + plan.on_device(batch)
