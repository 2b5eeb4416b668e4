"""Programs with the TPU kernels: what they read, lowering for TPUs, grids and tiles of chips that aren't there.

What the compiler makes of the programs is tested in test_aot_head.py, products and sizes in test_head_work.py.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import head_programs as head
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import V6E
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.sharding import AbstractDevice, Mesh
from lm_head_cases import OBJECTIVES, equations, operands_for, random_problem, sparse_weights
from strict_tpu import strict_interpreter

from kernels.lm_head import TokenLogprobs, token_logprobs, token_loss
from kernels.lm_head.tpu import tiles

OBJECTIVE = OBJECTIVES["clipped ratio"]
PROBLEM = random_problem((200, 300, 64), scale=2.0)
OPERANDS = operands_for(PROBLEM, OBJECTIVE)
ARGUMENTS = (*PROBLEM, sparse_weights(200))
ONE_WAVE = 1 << 30


def token_logprobs_of(hidden: Any, weight: Any, labels: Any, weights: Any) -> tuple[jax.Array, TokenLogprobs]:
    outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl="mosaic_tpu")
    return jnp.sum(weights * (outputs.logprob * outputs.entropy + jnp.sin(outputs.lse))), outputs


def token_loss_of(hidden: Any, weight: Any, labels: Any, weights: Any) -> tuple[jax.Array, TokenLogprobs]:
    options: dict[str, Any] = {"weights": weights, "workspace": ONE_WAVE, "impl": "mosaic_tpu"}
    return token_loss(hidden, weight, labels, OBJECTIVE.in_jax, *(x[: len(labels)] for x in OPERANDS), **options)


every_entry_point = pytest.mark.parametrize("scalar", [token_logprobs_of, token_loss_of])


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with tiles.override(rows=128, columns=256, step=128, call=256):
        yield


@functools.cache
def gradients_of(scalar: Callable[..., Any]) -> Callable[..., Any]:
    """(hidden, weight, labels, weights) to ((scalar, outputs), gradients in hidden and weight)."""
    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)


# --- rows that count ---


def traffic(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Numbers that kernels read on the chip, and that are copied to and from there, when the function is run."""
    found = {"read": 0, "fetched": 0, "written back": 0}
    with strict_interpreter():
        get = interpreter.get

        @functools.wraps(get)
        def counting(*place: Any, **reader: Any) -> Any:
            token, value = get(*place, **reader)
            kind = "fetched" if "input_name" in reader else "read" if "source_info" in reader else "written back"
            found[kind] += value.size if value.size > 1 else 0
            return token, value

        with mock.patch.object(interpreter, "get", counting):
            jax.block_until_ready(jax.jit(lambda *args: function(*args))(*args))  # a new one, so traced anew
            jax.effects_barrier()
    return found


@every_entry_point
def test_blocks_of_rows_that_do_not_count_are_neither_read_nor_fetched(scalar: Callable[..., Any]) -> None:
    """128 of 200 rows, in a call of two blocks, against the same 128 rows in a call of one."""
    hidden, weight, labels = PROBLEM
    some = jnp.where(jnp.arange(200) < 128, 0.5, 0)
    of_two = traffic(gradients_of(scalar), hidden, weight, labels, some)
    with tiles.override(rows=128, columns=256, step=128, call=128):
        of_one = traffic(gradients_of(scalar), hidden[:128], weight, labels[:128], some[:128])
    for kind in ("read", "fetched"):
        assert of_two[kind] == of_one[kind] > weight.size


# --- programs for TPUs ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_program_for_tpus_can_be_exported_without_one(dtype: Any) -> None:
    arguments = [x.astype(dtype) if x.ndim == 2 else x for x in ARGUMENTS]

    def run(*arguments: Any) -> Any:
        return jax.tree.leaves([gradients_of(scalar)(*arguments) for scalar in (token_logprobs_of, token_loss_of)])

    with jax.sharding.use_abstract_mesh(V6E):
        text = jax.export.export(jax.jit(run), platforms=["tpu"])(*arguments).mlir_module()
    assert "tpu_custom_call" in text
    assert "dot_general" not in text


@pytest.mark.parametrize("tokens", [300, 8192])
@pytest.mark.parametrize(
    ("function", "options"), [("general", {"entropy": True}), ("loss", {"workspace": 600 * 2 * 32000})]
)
def test_a_chip_with_two_cores_has_blocks_for_both_in_every_call(
    function: str, options: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first dim of a grid is the one that cores share: blocks of rows, or for dW tiles of the weight."""
    monkeypatch.setattr(tiles, "_override", {})
    monkeypatch.setattr(tiles, "_call_rows", None)
    v5p = V6E.update(abstract_device=AbstractDevice("TPU v5", num_cores=2, platform="tpu"))
    sizes = {"tokens": tokens, "vocabulary": 32000, "features": 3584, "impl": "mosaic_tpu"}
    run, arguments = getattr(head, function)(Mesh(np.array(jax.devices()[:1]), ("chip",)), **sizes, **options)
    with jax.sharding.use_abstract_mesh(v5p):
        jaxpr = jax.make_jaxpr(run)(*arguments).jaxpr
    grids = [e.params["grid_mapping"].grid for e in equations(jaxpr) if e.primitive.name == "pallas_call"]
    assert grids
    assert min(grid[0] for grid in grids) >= 2


@pytest.mark.parametrize("mib", [64, 128])
@pytest.mark.parametrize("kernel", ["forward", "hidden", "weight", "kept"])
def test_no_size_of_hidden_states_has_steps_that_keep_half_of_a_matrix_unit_idle(kernel: Any, mib: int) -> None:
    narrow, sums = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    for features in (576, 896, 1536, 2048, 2560, 3584, 4096, 5120, 8192):
        case = tiles.Case(kernel, 8192, 151936, features, narrow, narrow, narrow, sums, kernel == "forward")
        found = tiles.best(case, mib << 20)
        assert found is not None
        assert found.step >= 256
