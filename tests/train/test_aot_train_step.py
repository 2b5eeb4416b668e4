"""A whole update of a model of each family, compiled by the real TPU compiler for eight chips that aren't there.

Qwen2.5-0.5B and Llama 3.2 1B have heads of 64, Qwen3-0.6B of 128. The update is train.py's: all layers, head,
objective, backward pass and optimizer. Only the settings of model and mesh differ from the configuration's. Parameters
are only shapes. Leaves out results, which test_train_step.py checks on CPUs, and times, which only a TPU can tell.
"""

import math
import re

import pytest
from compiled_program import FOR_TPUS, arrays, exchanged, kernels, text

from mllm.config import load as configs
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import AXES
from mllm.plan import targets
from mllm.plan.programs import Programs

pytestmark = [*FOR_TPUS, pytest.mark.slow]
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B")
SPLASH = {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}
HEAD = {"head_forward_mean", "head_weight_gradient"}
"""The kernels of the head's two passes: small waves would take a v6e longer."""


@pytest.mark.parametrize("model", MODELS)
def test_an_update_on_v6e_has_kernels_and_gathers_no_head(model):
    """Random parameters need no files, and here none are made."""
    overrides = ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "model.init=random", f"model.source={model}"]
    settings, sizes = configs.load("qwen25_0p5b_grpo.yaml", overrides), PRESETS[model]
    mesh = targets.mesh("v6e:2x4", (2, 2, 2), AXES)
    program, length = targets.compiled(*Programs(settings, mesh).update(), mesh), settings.batch_shape.length

    names = kernels(program)
    assert {re.sub("_segmented.*", "", name) for name in names} == SPLASH | HEAD
    assert all("segmented" in name for name in names - HEAD)

    # The shape of the vocabulary's matrix that a device multiplies with, and as many logits.
    weight, tokens = (sizes.vocab_size // 2, sizes.hidden_size), settings.batch_shape.micro * length // 4
    assert targets.memory(program).peak < 32e9
    sizes_of = program.memory_analysis()
    assert (
        sizes_of.output_size_in_bytes - sizes_of.alias_size_in_bytes < 2**20
    )  # the new state takes the place of the old
    assert max(math.prod(array.shape) for array in arrays(text(program))) < tokens * weight[0]

    # A micro-batch has fewer tokens than the vocabulary has: tokens are gathered. The embedding is looked up in shards.
    gathered = [array.shape for array in exchanged(program) if array.kind == "all-gather"]
    assert not [shape for shape in gathered if weight[0] in shape]

    # Sums of activations over tp have a dim of tokens; the sums of vectors are also how short ones are gathered.
    sums = [array for array in exchanged(program) if array.kind in ("all-reduce", "reduce-scatter")]
    matrices = [one for one in sums if len(one.shape) == 2 and not any(size % length == 0 for size in one.shape)]
    # Qwen3-0.6B's feed-forward matrices have, on a device, as many rows as a sequence has tokens.
    rows = {sizes.intermediate_size, sizes.num_attention_heads * sizes.head_dim}
    assert {(count // 2, sizes.hidden_size // 2) for count in rows} & {array.shape for array in matrices}
    assert {array.dtype for array in matrices} == {"f32"}


def test_the_3b_head_on_v6e_takes_little_memory():
    """8 rows of 1,536 tokens a device: with a gathered weight it took 2 GiB."""
    settings = configs.load("qwen25_3b_grpo.yaml", ["mesh.fsdp=8", "model.init=random", "micro_batch_size=64"])
    mesh = targets.mesh("v6e:2x4", (1, 8, 1), AXES)
    account = targets.account(*Programs(settings, mesh).head_of_update(), mesh)
    assert account.temporaries < 0.6 * 2**30


def test_the_gemma_update_on_v6e_has_both_attention_kernels():
    """Heads of 256. The program has a kernel for each kind of layer, and the layer's kind chooses."""
    settings = configs.load("gemma3_270m_sft.yaml", ["model.init=random"])
    mesh = targets.mesh("v6e", (1, 1, 1), AXES)
    program = targets.compiled(*Programs(settings, mesh).update(), mesh)
    names = kernels(program)
    assert {re.sub("_segmented.*", "", name) for name in names} == SPLASH | HEAD
    assert targets.memory(program).peak < 10 * 2**30  # the logits of a micro-batch would take 8 GiB more
