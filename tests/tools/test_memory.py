"""The comparison of heads by memory: that they are the same loss, and how the figures are shown."""

import jax
import numpy as np
import pytest
import tiny

from mllm.data.batch import Batch
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.plan import memory as plan
from mllm.train.step import Forward
from tools import memory

ROWS, LENGTH, VOCABULARY, FEATURES = 2, 6, 260, 32


def test_optax_on_logits_is_the_same_loss_with_the_same_gradients():
    config = tiny.config()
    mesh = make_mesh(config.mesh)
    graphdef = load_policy(config, mesh).graphdef
    random = np.random.default_rng(0)
    hidden, weight = random.normal(size=(ROWS, LENGTH, FEATURES)), random.normal(size=(VOCABULARY, FEATURES))
    labels, weights = random.integers(VOCABULARY, size=(ROWS, LENGTH)), random.integers(2, size=(ROWS, LENGTH))
    advantages, sampled = random.normal(size=(ROWS, LENGTH)), -random.uniform(5, 6, size=(ROWS, LENGTH))
    ints, floats = (lambda x: x.astype(np.int32)), (lambda x: x.astype(np.float32))
    tokens = ints(labels)
    batch = Batch(tokens, tokens, tokens, tokens, floats(weights), floats(advantages), floats(sampled))

    def loss_and_gradients(kind):
        function = jax.value_and_grad(kind(graphdef, config, mesh).head_loss, (0, 1), has_aux=True)
        (loss, tokens), gradients = jax.jit(function)(floats(hidden), floats(weight), batch)
        return loss, tokens.logprob * batch.weights, gradients

    found, expected = loss_and_gradients(memory.OptaxOnLogits), loss_and_gradients(Forward)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_head_changes_nothing_but_itself_and_the_batch_holds_several_micro_batches():
    config = tiny.config(mesh={"fsdp": 2})
    mesh = make_mesh(config.mesh)
    reference, fused = memory.at(config, "reference", 4, mesh), memory.at(config, "fused", 4, mesh)
    assert reference.micro_batch_size == fused.micro_batch_size == 8
    assert reference.batch_size == fused.batch_size == 4 * 8
    assert reference.head.impl == "reference"
    assert fused.head == config.head


def test_the_table_brackets_what_does_not_fit():
    devices = plan.Devices("one", make_mesh(tiny.config().mesh), 1, 3 * 2**30, None)
    rows = [
        {"head": head, "micro_batch": micro, "fits": peak < 3, "peak": peak * 2**30, "head_alone": 2**29}
        for head, peaks in {"reference": (2, 4), "optax": (2, 3), "fused": (1, 1)}.items()
        for micro, peak in zip((1, 8), peaks, strict=True)
    ]
    lines = memory.table(rows, devices).splitlines()
    assert lines[2] == "| 1 | 2.0 | 2.0 | 1.0 | 0.5 | 0.5 | 0.5 |"
    assert lines[3] == "| 8 | (4.0) | (3.0) | 1.0 | 0.5 | 0.5 | 0.5 |"


def test_bad_arguments_are_refused_in_one_line(capsys):
    assert memory.main(["--config", "tiny_sft.yaml", "--measure", "--target", "v6e"]) == 2
    assert memory.main(["--config", "tiny_sft.yaml", "--micro-batches", "0"]) == 2
    assert memory.main(["--config", "tiny_sft.yaml", "--target", "v9x"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in errors] == [" --measure", " --micro-batches", " --target"]


def test_the_picture_has_a_panel_a_head(tmp_path):
    devices = plan.Devices("one", make_mesh(tiny.config().mesh), 1, 3 * 2**30, None)
    parts = dict.fromkeys(memory.PARTS, 2**30)
    rows = [{"head": head, "micro_batch": 1, "fits": False, "peak": 5 * 2**30, "parts": parts} for head in memory.HEADS]
    memory.draw(rows, devices, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 0


@pytest.mark.slow
def test_a_measured_update_takes_about_what_the_compiler_says():
    # Large enough to stand out from what else the process does.
    config = tiny.config("sft", data={"max_length": 512})
    larger = memory.at(config, "fused", 16, make_mesh(config.mesh))
    devices = plan.find_devices(config.mesh, None)
    measured, said = (memory.account(larger, devices, "fused", "update", how).peak for how in ("measured", "compiler"))
    assert 0.5 * said < measured < 1.5 * said
