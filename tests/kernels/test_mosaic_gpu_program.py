"""Programs with the Hopper kernels, as XLA compiles them for an H100.

Compiling takes XLA's plugin for CUDA and no GPU (`make aot-gpu`). test_on_device.py runs the kernels on a GPU.
"""

import re
import shutil
from typing import Any

import head_programs as head
import jax
import jax.numpy as jnp
import pytest
from compiled_program import FOR_GPUS

from lm_head.gpu import tiles as gpu_tiles
from mllm.plan import targets

MIB = 2**20
pytestmark = FOR_GPUS
N, V, D = 8192, 151936, 2048


def kernels(program: jax.stages.Compiled) -> set[str]:
    """Names of the kernels, by the function that traced them."""
    calls = [line for line in (program.as_text() or "").splitlines() if 'custom_call_target="mosaic_gpu' in line]
    return {name for line in calls for name in re.findall(r"lm_head_([a-z]+)", line)}


def compiled(program: str, **options: Any) -> jax.stages.Compiled:
    mesh = targets.mesh("h100")
    return targets.compiled(*getattr(head, program)(mesh, impl="mosaic_gpu", **options), mesh)


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("value", {}),
        ("general", {"entropy": True}),
        ("loss", {"workspace": 0}),
        ("loss", {"workspace": 2560 * MIB}),
        ("loss", {"workspace": 640 * MIB, "vocabulary": 262144, "features": 640}),  # Gemma 3 270M
    ],
    ids=str,
)
def test_temporaries_fit_the_documented_memory(program, options):
    """The documented memory: the workspace, 64 MiB, and the hidden states and a few numbers a token."""
    hidden, numbers = 2 * N * options.get("features", D), 128 * N  # bytes
    allowed = options.get("workspace", 0) + 64 * MIB + hidden + numbers
    assert targets.memory(compiled(program, **options)).temporaries <= allowed


def test_trainer_waves_keep_the_logits_of_a_single_wave() -> None:
    """A float32 master with a bfloat16 copy, by default: 2,048 rows a wave, 599 MiB."""
    mesh = targets.mesh("h100")
    program = targets.compiled(*head.loss(mesh, impl="mosaic_gpu", master=True), mesh, targets.CUBLAS)
    assert kernels(program) == {"keep"}
    assert targets.memory(program).temporaries <= (599 + 64 + 32 + 16) * MIB


def test_in_plain_xla_a_wave_takes_no_more_memory_than_chunks() -> None:
    """The programs for GPUs other than Hopper's."""
    mesh = targets.mesh("h100")
    programs = (head.loss(mesh, impl=impl) for impl in ("xla", "chunked_logits"))
    xla, chunks = (targets.compiled(*program, mesh, targets.CUBLAS) for program in programs)
    assert targets.memory(xla).temporaries <= targets.memory(chunks).temporaries


def test_the_head_compiles_in_remat_and_in_loops_over_a_mesh() -> None:
    """The interpreter's callbacks allow no `jax.checkpoint`."""
    mesh = targets.mesh("h100:8", (2, 2, 2), ("dp", "fsdp", "tp"))
    step, (hidden, *others) = head.loss(mesh, vocabulary=8192, features=512, impl="mosaic_gpu")

    def twice(hidden: Any, *others: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(lambda _, h: (None, step(h, *others))), None, jnp.stack([hidden] * 2))[1]

    program = targets.compiled(twice, (hidden, *others), mesh)
    assert kernels(program) == {"keep"}


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas, of the CUDA toolkit")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"vocabulary": 131072}, id="plain"),  # a program compiled before leaves no report
        pytest.param({"features": 896, "entropy": True}, id="entropy"),
        pytest.param({"features": 3584, "softcap": 30.0, "entropy": True}, id="softcap"),
        pytest.param({"workspace": 640 * MIB, "softcap": 30.0}, id="some kept"),
        pytest.param({"hidden": "float32", "weight": "float32", "dtype": "bfloat16"}, id="float32 masters"),
    ],
)
def test_every_kernel_fits_a_multiprocessor_and_spills_nothing(options, tmp_path, monkeypatch):
    """By the reports of ptxas and the log of Mosaic's passes."""
    for name, value in {"TO": str(tmp_path), "PTX": "1", "PTXAS": "1"}.items():
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", value)
    compiled("loss", **{"workspace": 0, **options})
    kernels = list(tmp_path.glob("*.ptxas"))
    assert len(kernels) >= 4
    for path in kernels:
        report, passes = (path.with_suffix(end).read_text() for end in (".ptxas", ".mlir-passes.log"))
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
        waits = re.findall("serialized|warpgroup.wait is injected", report)
        assert not waits, "no product waits for the one before, other than where the kernel says so"
        static = re.search(r", (\d+) bytes smem", report)
        dynamic = max(map(int, re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)))
        assert dynamic + (int(static[1]) if static else 0) <= gpu_tiles.SHARED_MEMORY
