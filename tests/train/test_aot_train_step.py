"""A whole update of a model of each family, compiled by the real TPU compiler for eight chips that aren't there.

Qwen2.5-0.5B and Llama 3.2 1B have heads of 64, Qwen3-0.6B of 128. Model with all layers, head, objective, backward pass
and optimizer are those of train.py, with the configuration's own settings except for model and mesh. Parameters are
only shapes. Leaves out results, which test_train_step.py checks on CPUs, and times, which only a TPU can tell.
"""

import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import pytest
from compiled_program import arrays, exchanged, kernels, text
from tiny import make_trainer

from mllm.config import load as configs
from mllm.data.batch import Batch
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import AXES, sharding
from mllm.plan import targets
from mllm.plan.programs import Programs
from mllm.training.step import abstract_state

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs"),
]

SHAPE = {"dp": 2, "fsdp": 2, "tp": 2}
HBM = 32e9
"""Bytes of a v6e's memory."""
LENGTH = 512 + 1024
"""Tokens of a row: prompt and completion of the configuration."""
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B")
SPLASH = {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}
HEAD = {"head_forward_mean_keep", "head_kept_weight_gradient"}
"""The kernels of the head's single pass, in waves of tokens."""


@pytest.fixture(scope="module", params=MODELS)
def settings(request):
    # Random parameters need no files, and here none are made.
    overrides = [f"mesh.{axis}={size}" for axis, size in SHAPE.items()]
    return configs.load("qwen25_0p5b_grpo.yaml", ["model.init=random", f"model.source={request.param}", *overrides])


@pytest.fixture(scope="module")
def sizes(settings):
    return PRESETS[settings.model.source]


@pytest.fixture(scope="module")
def weight(sizes):
    """The shape of the vocabulary's matrix that a device multiplies with."""
    return sizes.vocab_size // SHAPE["tp"], sizes.hidden_size


@pytest.fixture(scope="module")
def program(settings):
    mesh = targets.mesh("v6e:2x4", tuple(SHAPE.values()), tuple(SHAPE))
    policy, optimizer, train_step = make_trainer(settings, mesh)

    def array(dtype):
        rows = (settings.batch_size, LENGTH)
        return jax.ShapeDtypeStruct(rows, dtype, sharding=sharding(mesh, ("batch", "time")))

    batch = Batch(*(array(jnp.int32) for _ in range(4)), *(array(jnp.float32) for _ in range(3)))
    return targets.compiled(train_step, (abstract_state(policy.params, optimizer), batch), mesh)


def test_attention_and_head_are_kernels_in_both_passes(program):
    names = kernels(program)
    assert {re.sub("_segmented.*", "", name) for name in names} == SPLASH | HEAD
    assert all("segmented" in name for name in names - HEAD)


def test_the_update_fits_in_memory_without_an_array_as_large_as_a_device_s_logits(program, settings, weight):
    memory, tokens = targets.memory(program), settings.micro_batch_size * LENGTH // (SHAPE["dp"] * SHAPE["fsdp"])
    assert memory["peak"] < HBM
    assert memory["output"] - memory["alias"] < 2**20  # the new state takes the place of the old
    assert max(math.prod(array.shape) for array in arrays(text(program))) < tokens * weight[0]


def test_the_head_s_weight_is_gathered_once_a_micro_batch(program, weight):
    """The loop over micro-batches stands once in the program. The embedding, the same array, is looked up in shards."""
    gathered = [array.shape for array in exchanged(program) if array.kind == "all-gather"]
    assert [shape for shape in gathered if shape[0] == weight[0]] == [weight]


def test_devices_add_up_the_gradients_of_matrices_in_float32(program, sizes):
    """Sums of activations over tp have a dim of tokens; the sums of vectors are also how short ones are gathered."""
    sums = [array for array in exchanged(program) if array.kind in ("all-reduce", "reduce-scatter")]
    matrices = [one for one in sums if len(one.shape) == 2 and not any(size % LENGTH == 0 for size in one.shape)]
    # Qwen3-0.6B's feed-forward matrices have, on a device, as many rows as a sequence has tokens.
    rows = {sizes.intermediate_size, sizes.num_attention_heads * sizes.head_dim}
    shards = {(count // SHAPE["tp"], sizes.hidden_size // SHAPE["fsdp"]) for count in rows}
    assert shards & {array.shape for array in matrices}
    assert {array.dtype for array in matrices} == {"f32"}


def test_gemma_s_update_on_a_v6e_has_attention_kernels_with_and_without_a_window():
    """Heads of 256; a kernel of the one kind stands beside one of the other, of which the layer's kind chooses."""
    settings = configs.load("gemma3_270m_sft.yaml", ["model.init=random"])
    mesh = targets.mesh("v6e", (1, 1, 1), AXES)
    program = targets.compiled(*Programs(settings, mesh).update(), mesh)
    names = kernels(program)
    assert {re.sub("_segmented.*", "", name) for name in names} == SPLASH | HEAD
    assert len(re.findall(r"%splash_mha_dkv\S* = .*tpu_custom_call", text(program))) == 2
    assert targets.memory(program)["peak"] < 10 * 2**30  # the logits of a micro-batch would take 8 GiB more
