"""Programs with the Hopper kernels, as XLA compiles them for an H100.

Compiling takes XLA's plugin for CUDA and no GPU (`make aot-gpu`). Values are in test_head_values.py and
test_head_losses.py; no GPU has run the programs.
"""

import importlib.util
import math
import shutil
from typing import Any

import head_programs as head
import jax
import jax.numpy as jnp
import numpy as np
import ptxas_report
import pytest
from compiled_program import arrays
from lm_head_cases import OBJECTIVES

from kernels.lm_head import token_loss
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.forward import Labels, is_hit, labels_in_tiles
from kernels.lm_head.gpu.products import Place
from kernels.lm_head.gpu.tiles import Tiles
from mllm.plan import targets

MIB = 2**20


def test_a_strip_s_bits_say_which_of_its_tiles_have_a_label() -> None:
    """A strip begins in any of the 32 places of an integer, and has 32 tiles at most."""
    sizes, vocabulary = Tiles(), 100 * 256 - 8
    labels = np.random.default_rng(0).integers(0, vocabulary, 192)
    labels[:64] = -1
    in_tile = labels_in_tiles(jnp.asarray(labels), vocabulary, sizes)
    for group, chunk, first in ((0, 0, 0), (1, 0, 31), (1, 7, 25), (2, 0, 64), (2, 3, 65)):
        place = Place(jnp.int32(64 * group), jnp.int32(first), jnp.int32(32), jnp.int32(0))
        bits = Labels(labels, in_tile, jnp.int32(chunk * 256), jnp.int32(0)).in_strip(place, sizes)
        own = np.isin(chunk + first + np.arange(32), labels[64 * group : 64 * (group + 1)] // 256)
        np.testing.assert_array_equal([is_hit(bits, jnp.int32(i)) for i in range(32)], own)


# --- for an H100 that isn't there ---

needs_plugin = pytest.mark.skipif(
    not targets.GPU_PLUGIN.is_dir() and importlib.util.find_spec("jax_plugins") is None,
    reason="needs XLA's plugin for CUDA, which make aot-gpu installs",
)
needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas, of the CUDA toolkit")
N, V, D = 8192, 151936, 2048
HIDDEN = 2 * N * D
NUMBERS = 128 * N  # bytes


def compiled(program: str, **options: Any) -> jax.stages.Compiled:
    mesh = targets.mesh("h100")
    return targets.compiled(*getattr(head, program)(mesh, impl="mosaic_gpu", **options), mesh)


@pytest.mark.aot_gpu
@needs_plugin
@pytest.mark.parametrize(
    ("program", "options", "workspace"),
    [
        pytest.param("value", {}, 0, id="value"),
        pytest.param("general", {"entropy": True}, 0, id="token_logprobs"),
        pytest.param("loss", {}, 0, id="none"),
        pytest.param("loss", {}, 640 * MIB, id="some"),
        pytest.param("loss", {}, 2440 * MIB, id="all"),
    ],
)
def test_temporaries_are_at_most_the_workspace_and_64_mib_and_hidden_and_numbers_a_token(
    program: str, options: dict[str, Any], workspace: int
) -> None:
    options = options | ({"workspace": workspace} if program == "loss" else {})
    assert targets.memory(compiled(program, **options))["temp"] <= workspace + 64 * MIB + HIDDEN + NUMBERS


@pytest.mark.aot_gpu
@needs_plugin
@pytest.mark.parametrize("workspace", [0, 64 * MIB], ids=["none kept", "kept"])
def test_it_compiles_within_rematerialisation_and_loops(workspace: int) -> None:
    """The interpreter's callbacks allow no `jax.checkpoint`."""
    hidden, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1024, 512), (4096, 512)))

    def total(hidden: Any, weight: Any, labels: Any) -> jax.Array:
        def step(sum_: jax.Array, batch: Any) -> tuple[jax.Array, None]:
            loss, _ = token_loss(
                batch[0], weight, batch[1], OBJECTIVES["cross-entropy"].in_jax, workspace=workspace, impl="mosaic_gpu"
            )
            return sum_ + loss, None

        return jax.lax.scan(jax.checkpoint(step), 0.0, (hidden, labels))[0]

    arguments = (hidden, weight, jax.ShapeDtypeStruct((2, 1024), jnp.int32))
    program = targets.compiled(jax.grad(total, (0, 1)), arguments, targets.mesh("h100"))
    assert "mosaic_gpu" in (program.as_text() or "")


@pytest.mark.aot_gpu
@needs_plugin
@pytest.mark.parametrize("program", ["value", "loss"])
def test_it_compiles_over_a_mesh(program: str) -> None:
    mesh = targets.mesh("h100:8", (2, 2, 2), ("dp", "fsdp", "tp"))
    program = targets.compiled(*getattr(head, program)(mesh, impl="mosaic_gpu", features=512), mesh)
    assert "mosaic_gpu" in (program.as_text() or "")


@pytest.mark.aot_gpu
@needs_plugin
def test_without_a_workspace_no_array_is_larger_than_the_weight_and_none_so_large_is_copied() -> None:
    text = compiled("loss", workspace=0).as_text() or ""
    assert "mosaic_gpu" in text
    assert max(math.prod(x.shape) for x in arrays(text)) == V * D
    assert not any(N in x.shape and V in x.shape for x in arrays(text))
    copied = [line for line in text.splitlines() if " copy(" in line or " copy-start(" in line]
    assert copied
    assert not any(math.prod(x.shape) >= V * D for line in copied for x in arrays(line))
    written = [line for line in text.splitlines() if f"bf16[{V},{D}]" in line.partition("=")[2][:40]]
    assert sum("custom-call" in line for line in written) == 2, (
        "one kernel writes dW of kept logits, one writes the rest"
    )
    assert not any(f"= f16[{V},{D}]" in line and "fusion(" in line for line in text.splitlines()), "no zeros"


@pytest.mark.aot_gpu
@needs_plugin
@needs_ptxas
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"features": 896, "entropy": True}, id="entropy"),
        pytest.param({"features": 3584, "softcap": 30.0, "entropy": True}, id="softcap"),
        pytest.param({"workspace": 640 * MIB, "softcap": 30.0}, id="some kept"),
        pytest.param({"hidden": "float32", "weight": "float32", "dtype": "bfloat16"}, id="float32 masters"),
    ],
)
def test_every_kernel_fits_a_multiprocessor_and_spills_nothing(options: dict[str, Any]) -> None:
    kernels = ptxas_report.read(f"{head.__file__}:gpu_loss", **options)
    assert len(kernels) >= 4
    for kernel in kernels:
        assert kernel.spilled == 0
        assert kernel.shared <= gpu_tiles.SHARED_MEMORY
        assert kernel.wgmma == {"m64n256k16": 4}, "one loop, over slabs of 64"
        assert kernel.multicast >= 1
        assert kernel.setmaxnreg == 2, "a loader gives registers, multipliers take them"


@pytest.mark.aot_gpu
@needs_plugin
@needs_ptxas
def test_blocks_without_a_cluster_share_no_loads() -> None:
    kernels = ptxas_report.read(f"{head.__file__}:gpu_loss", cluster=1)
    assert {kernel.multicast for kernel in kernels} == {0}
    assert not any(kernel.spilled for kernel in kernels)
