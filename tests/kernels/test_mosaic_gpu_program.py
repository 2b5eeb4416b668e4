"""Programs with the Hopper kernels, as XLA compiles them for an H100.

Compiling takes XLA's plugin for CUDA and no GPU (`make aot-gpu`). test_on_device.py runs the kernels on a GPU.
"""

import math
import re
from typing import Any

import head_programs as head
import jax
import jax.numpy as jnp
import pytest
from compiled_program import FOR_GPUS, arrays

from mllm.plan import targets

MIB = 2**20
pytestmark = FOR_GPUS
N, V, D = 8192, 151936, 2048


def kernels(program: jax.stages.Compiled) -> set[str]:
    """Names of the kernels, by what they were traced in."""
    calls = [line for line in (program.as_text() or "").splitlines() if 'custom_call_target="mosaic_gpu' in line]
    return {name for line in calls for name in re.findall(r"lm_head_([a-z]+)", line)}


WITHOUT_A_WORKSPACE = {"forward", "slopes", "hidden", "weight"}


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
def test_temporaries_are_at_most_the_workspace_and_64_mib_and_hidden_and_numbers_a_token(program, options):
    hidden, numbers = 2 * N * options.get("features", D), 128 * N  # bytes
    allowed = options.get("workspace", 0) + 64 * MIB + hidden + numbers
    assert targets.memory(compiled(program, **options))["temp"] <= allowed


def test_it_compiles_within_rematerialisation_and_loops_over_a_mesh() -> None:
    """The interpreter's callbacks allow no `jax.checkpoint`."""
    mesh = targets.mesh("h100:8", (2, 2, 2), ("dp", "fsdp", "tp"))
    step, (hidden, *others) = head.loss(mesh, vocabulary=8192, features=512, impl="mosaic_gpu")

    def twice(hidden: Any, *others: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(lambda _, h: (None, step(h, *others))), None, jnp.stack([hidden] * 2))[1]

    program = targets.compiled(twice, (hidden, *others), mesh)
    assert kernels(program) == {"keep", *WITHOUT_A_WORKSPACE}


def test_without_a_workspace_no_array_is_larger_than_the_weight_and_none_so_large_is_copied() -> None:
    program = compiled("loss", workspace=0)
    text = program.as_text() or ""
    assert kernels(program) == WITHOUT_A_WORKSPACE
    assert max(math.prod(x.shape) for x in arrays(text)) == V * D
    assert not any(N in x.shape and V in x.shape for x in arrays(text))
    copied = [line for line in text.splitlines() if " copy(" in line or " copy-start(" in line]
    assert not any(math.prod(x.shape) >= V * D for line in copied for x in arrays(line))
    written = [line for line in text.splitlines() if f"bf16[{V},{D}]" in line.partition("=")[2][:40]]
    assert sum("custom-call" in line for line in written) == 1, "one kernel writes dW"
