"""Programs with the Hopper kernels: JAX's transformations, refusals, and what XLA compiles for an H100.

Compiling takes XLA's plugin for CUDA and no GPU (`make aot-gpu`). Values are in test_mosaic_values.py and
test_mosaic_loss.py; no GPU has run the programs.
"""

import importlib.util
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_program import arrays
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from lm_head_cases import OBJECTIVES, operands_for, random_problem, sparse_weights
from mosaic_engines import GPU_SIZES
from strict_gpu import needs_interpreter, strict_interpreter

from kernels.lm_head import TokenLogprobs, token_logprobs, token_loss
from kernels.lm_head.gpu import tiles as gpu_tiles
from mllm.plan import gpus, resources, targets
from mllm.plan import head_programs as head
from tools import tune, tune_child

MIB = 2**20
PROBLEM = random_problem((200, 296, 128), scale=2.0, dtype=jnp.bfloat16)
OBJECTIVE = OBJECTIVES["clipped ratio"]
ARGUMENTS = (*PROBLEM, sparse_weights(200))


def token_logprobs_of(hidden: Any, weight: Any, labels: Any, weights: Any) -> tuple[jax.Array, TokenLogprobs]:
    outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl="mosaic_gpu")
    return jnp.sum(weights * (outputs.logprob * outputs.entropy + jnp.sin(outputs.lse))), outputs


def token_loss_of(hidden: Any, weight: Any, labels: Any, weights: Any) -> tuple[jax.Array, TokenLogprobs]:
    operands = (x[: len(labels)] for x in operands_for(PROBLEM, OBJECTIVE))
    options: dict[str, Any] = {"weights": weights, "workspace": 0, "impl": "mosaic_gpu"}
    return token_loss(hidden, weight, labels, OBJECTIVE.in_jax, *operands, **options)


every_entry_point = pytest.mark.parametrize("scalar", [token_logprobs_of, token_loss_of])


def gradients_of(scalar: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)


def strictly(function: Callable[..., Any], *args: Any) -> Any:
    with gpu_tiles.override(GPU_SIZES), strict_interpreter():
        return jax.block_until_ready(jax.jit(function)(*args))


def assert_near(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=2**-7, atol=2**-7 * np.abs(y).max())


# --- transformations ---


@needs_interpreter
@every_entry_point
def test_two_runs_agree_bit_for_bit(scalar: Callable[..., Any]) -> None:
    run = gradients_of(scalar)
    jax.tree.map(np.testing.assert_array_equal, strictly(run, *ARGUMENTS), strictly(run, *ARGUMENTS))


@needs_interpreter
@pytest.mark.slow
def test_jax_refuses_refs_that_vary_inside_shard_map() -> None:
    """A caller's own `shard_map` needs `check_vma=False`, as that of `sharding=` has it."""
    tokens, everywhere = P("dp"), P()
    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))

    def sharded(*args: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
        value, outputs = token_logprobs_of(*args)
        return jax.lax.psum(value, "dp"), outputs

    run = jax.shard_map(
        sharded, mesh=mesh, in_specs=(tokens, everywhere, tokens, tokens), out_specs=(everywhere, tokens)
    )
    with pytest.raises(ValueError, match="does not support Refs with varying manual axis types"):
        strictly(gradients_of(run), *ARGUMENTS)


@needs_interpreter
@pytest.mark.slow
@every_entry_point
def test_vmap_is_a_loop(scalar: Callable[..., Any]) -> None:
    hidden, weight, labels, weights = ARGUMENTS
    others = (hidden[::-1], -weight, 295 - labels, weights[::-1])
    got = strictly(jax.vmap(gradients_of(scalar)), *map(jnp.stack, zip(ARGUMENTS, others, strict=True)))
    for i, alone in enumerate((ARGUMENTS, others)):
        assert_near([x[i] for x in jax.tree.leaves(got)], strictly(gradients_of(scalar), *alone))


# --- refusals ---


def assert_refused(
    match: str,
    hidden: Any = jnp.bfloat16,
    weight: Any = jnp.bfloat16,
    words: int = 256,
    features: int = 64,
    **options: Any,
) -> None:
    arrays = [jax.ShapeDtypeStruct((n, features), dtype) for n, dtype in ((8, hidden), (words, weight))]
    with gpu_tiles.override(GPU_SIZES), pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda h, w: token_logprobs(h, w, np.zeros(8, int), impl="mosaic_gpu", **options), *arrays)


def test_float32_products_are_refused() -> None:
    assert_refused("impl: mosaic_gpu .* dtype is float32", jnp.float32)
    assert_refused("impl: mosaic_gpu .* dtype is float32", dtype=jnp.float32)


@pytest.mark.parametrize("argument", ["hidden", "weight"])
def test_float16_is_refused(argument: str) -> None:
    assert_refused(f"impl: mosaic_gpu .* {argument} is float16", dtype=jnp.bfloat16, **{argument: jnp.float16})


@pytest.mark.parametrize(("words", "features"), [(256, 63), (256, 72), (257, 64)])
def test_sizes_that_make_no_tiles_are_refused(words: int, features: int) -> None:
    assert_refused(f"impl: mosaic_gpu .* weight is {words} x {features}.* multiples of", words=words, features=features)


def test_a_cpu_without_the_interpreter_is_refused_in_one_line_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"impl: mosaic_gpu can't run here: .*(CPU|Hopper)") as refusal:
        token_logprobs(*PROBLEM, impl="mosaic_gpu")
    assert "\n" not in str(refusal.value)


def test_without_an_impl_a_cpu_takes_the_xla_engine() -> None:
    own, xla = (str(jax.make_jaxpr(lambda *x, i=impl: token_logprobs(*x, impl=i))(*PROBLEM)) for impl in (None, "xla"))
    assert "pallas" not in own
    assert own == xla


def test_a_gpu_takes_the_kernels_by_default_only_where_they_were_timed_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the entries that tools/tune.py writes."""
    shape = [8192, 2048, 151936]  # N, D and V
    for seconds, faster in ((1.0, True), (3.0, False)):
        times = {"seconds": dict.fromkeys(tune.ON_GPU, seconds), "xla_seconds": dict.fromkeys(tune.ON_GPU, 2.0)}
        trial = {"entry": tune_child.gpu_entry(shape, {}), "kind": "gpu", **times}
        monkeypatch.setattr(gpu_tiles, "_TABLE", [])
        assert not gpu_tiles.faster(2048)
        monkeypatch.setattr(gpu_tiles, "_TABLE", [tune.as_noted(trial, {"shape": shape}, jax.__version__)])
        assert gpu_tiles.faster(2048) == faster


# --- for an H100 that isn't there ---

needs_plugin = pytest.mark.skipif(
    not gpus.FOLDER.is_dir() and importlib.util.find_spec("jax_plugins") is None,
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
def test_under_vmap_jax_compiles_no_such_kernel() -> None:
    shapes = (((2, 512, 512), jnp.bfloat16), ((2, 1024, 512), jnp.bfloat16), ((2, 512), jnp.int32))
    arguments = [jax.ShapeDtypeStruct(*x) for x in shapes]
    run = jax.vmap(lambda *x: token_logprobs(*x, impl="mosaic_gpu").logprob)
    with pytest.raises(NotImplementedError, match="only supports batching with a batch dimension of 1"):
        targets.compiled(run, arguments, targets.mesh("h100"))


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
    assert sum("custom-call" in line for line in written) == 2, "dW is written where logits were kept, and elsewhere"
    assert sum(f"= f16[{V},{D}]" in line and "fusion(" in line for line in text.splitlines()) == 1, "zeros, once"


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
    _, kernels = resources.read(f"{Path(__file__).with_name('gpu_programs.py')}:variant", **options)
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
    _, kernels = resources.read(f"{Path(__file__).with_name('gpu_programs.py')}:variant", cluster=1)
    assert {kernel.multicast for kernel in kernels} == {0}
    assert not any(kernel.spilled for kernel in kernels)
