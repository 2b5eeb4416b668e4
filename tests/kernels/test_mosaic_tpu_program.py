"""Programs with the TPU kernels: refusals, work and memory, JAX's transformations, lowering for TPUs.

Work is counted in the jaxpr, in products of N x V x D, over every step of every kernel's grid. What the compiler makes
of the programs is tested in test_aot_head.py, values in test_head_values.py and test_head_losses.py.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import head_programs as head
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.extend.core import Jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from lm_head_cases import OBJECTIVES, equations, jaxprs_of, operands_for, random_problem, sparse_weights
from strict_tpu import strict_interpreter

from kernels.lm_head import TokenLogprobs, token_logprobs, token_loss
from kernels.lm_head.tpu import tiles

OBJECTIVE = OBJECTIVES["clipped ratio"]
PROBLEM = random_problem((200, 300, 64), scale=2.0)
OPERANDS = operands_for(PROBLEM, OBJECTIVE)
ARGUMENTS = (*PROBLEM, sparse_weights(200))
ONE_WAVE = 1 << 30
V6E = AbstractMesh(
    (1,), ("chip",), (AxisType.Auto,), abstract_device=AbstractDevice("TPU v6 lite", num_cores=1, platform="tpu")
)


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


def strictly(function: Callable[..., Any], *args: Any) -> Any:
    with strict_interpreter():
        return jax.block_until_ready(jax.jit(function)(*args))


@functools.cache
def plainly(scalar: Callable[..., Any]) -> Any:
    return strictly(gradients_of(scalar), *ARGUMENTS)


def assert_near(got: Any, want: Any) -> None:
    """Asserts that arrays differ by at most 1 part in 50,000 of the largest number: another order of the same sums."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.max(np.abs(y), initial=1.0))


# --- refusals ---


def outputs_of(hidden: Any, weight: Any) -> TokenLogprobs:
    return token_logprobs(hidden, weight, np.zeros(8, int), impl="mosaic_tpu")


def test_a_cpu_without_the_interpreter_is_refused() -> None:
    with pytest.raises(ValueError, match="CPU"):
        outputs_of(jnp.zeros((8, 128)), jnp.zeros((256, 128)))


def test_features_that_fit_no_tile_are_refused_and_the_largest_term_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_override", {})
    arguments = [jax.ShapeDtypeStruct((n, 1 << 22), jnp.float32) for n in (8, 256)]
    with jax.sharding.use_abstract_mesh(V6E), pytest.raises(ValueError, match=r"MiB of VMEM, \d+ of them for its \w+"):
        jax.eval_shape(outputs_of, *arguments)


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


# --- transformations ---


def test_vmap_is_a_python_loop() -> None:
    hidden, weight, labels, weights = ARGUMENTS
    others = (hidden[::-1], -weight, 299 - labels, weights[::-1])
    lenient = functools.partial(pl.pallas_call, interpret=True)  # the strict one's callbacks don't allow `vmap`
    with mock.patch.object(pl, "pallas_call", lenient):
        got = jax.jit(jax.vmap(gradients_of(token_loss_of)))(*map(jnp.stack, zip(ARGUMENTS, others, strict=True)))
    for i, want in enumerate((plainly(token_loss_of), strictly(gradients_of(token_loss_of), *others))):
        assert_near([x[i] for x in jax.tree.leaves(got)], want)


def test_shard_map_over_tokens_gives_the_same() -> None:
    """The scalars of two shards are summed; the weight and its gradient are replicated; varying axes are checked."""
    tokens, everywhere = P("dp"), P()

    @functools.partial(
        jax.shard_map,
        mesh=Mesh(np.array(jax.devices()[:2]), ("dp",)),
        in_specs=(tokens, everywhere, tokens, tokens),
        out_specs=(everywhere, tokens),
    )
    def sharded(*args: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
        value, outputs = token_logprobs_of(*args)
        return jax.lax.psum(value, "dp"), outputs

    assert_near(
        strictly(jax.value_and_grad(sharded, argnums=(0, 1), has_aux=True), *ARGUMENTS), plainly(token_logprobs_of)
    )


@every_entry_point
@pytest.mark.parametrize("strictness", [{"cores": 2}, {"copies": "on_wait"}], ids=["two cores", "late copies"])
def test_the_kernels_wait_for_their_copies_and_may_run_on_two_cores(
    scalar: Callable[..., Any], strictness: dict[str, Any]
) -> None:
    with strict_interpreter(**strictness):
        got = jax.block_until_ready(jax.jit(gradients_of(scalar))(*ARGUMENTS))
    assert_near(got, plainly(scalar))


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


def test_a_tile_s_steps_fit_the_sublanes_that_keep_their_maxima() -> None:
    with pytest.raises(AssertionError):
        tiles.Tiles(rows=128, columns=2048, step=128)


# --- work and memory ---

N, V, D = 256, 512, 128  # whole tiles
ALIGNED = (
    jax.ShapeDtypeStruct((N, D), jnp.float32),
    jax.ShapeDtypeStruct((V, D), jnp.float32),
    jax.ShapeDtypeStruct((N,), jnp.int32),
    jax.ShapeDtypeStruct((N,), jnp.float32),
)


def multiplications(jaxpr: Jaxpr) -> int:
    """In matrix products; of a condition's branches the dearest counts, and a while loop's body once."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [multiplications(x) for x in jaxprs_of(equation)]
        match equation.primitive.name:
            case "dot_general":
                (lhs, rhs), ((contracted, _), _) = equation.invars, equation.params["dimension_numbers"]
                shared = math.prod(lhs.aval.shape[i] for i in contracted)
                total += lhs.aval.size * rhs.aval.size // shared
            case "cond":
                total += max(inner)
            case "scan":
                total += equation.params["length"] * sum(inner)
            case "pallas_call":
                total += math.prod(equation.params["grid_mapping"].grid) * sum(inner)
            case _:
                total += sum(inner)
    return total


def products(function: Callable[..., Any], *args: Any) -> float:
    with strict_interpreter():
        return multiplications(jax.make_jaxpr(function)(*args).jaxpr) / (N * V * D)


def likelihood(hidden: Any, weight: Any, labels: Any, weights: Any) -> jax.Array:
    outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl="mosaic_tpu")
    return jnp.sum(weights * (outputs.logprob + outputs.lse))


def likelihood_and_entropy(hidden: Any, weight: Any, labels: Any, weights: Any) -> jax.Array:
    outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl="mosaic_tpu")
    return jnp.sum(weights * (outputs.logprob + outputs.lse + outputs.entropy))


def loss_of(name: str, workspace: int = 0) -> Callable[..., jax.Array]:
    def loss(hidden: Any, weight: Any, labels: Any, weights: Any) -> jax.Array:
        options: dict[str, Any] = {"weights": weights, "workspace": workspace, "impl": "mosaic_tpu"}
        return token_loss(hidden, weight, labels, OBJECTIVES[name].in_jax, **options)[0]

    return loss


PLAIN, SINGLE_PASS, WITH_ENTROPY = (
    loss_of("cross-entropy"),
    loss_of("cross-entropy", ONE_WAVE),
    loss_of("entropy bonus"),
)


@pytest.mark.parametrize(
    ("function", "both", "hidden_alone", "weight_alone"),
    [
        pytest.param(likelihood, 4, 2, 3, id="token_logprobs"),
        pytest.param(likelihood_and_entropy, 6, 4, 3, id="token_logprobs, entropy"),
        pytest.param(PLAIN, 4, 2, 3, id="token_loss"),
        pytest.param(WITH_ENTROPY, 5, 3, 3, id="token_loss, entropy"),
        pytest.param(SINGLE_PASS, 3, 2, 2, id="token_loss with a workspace"),
    ],
)
def test_gradients_take_so_many_products(
    function: Callable[..., Any], both: int, hidden_alone: int, weight_alone: int
) -> None:
    """The values' own among them. The expectation of W, which dh is made of, comes with the values for one more."""
    taken = [products(jax.value_and_grad(function, sides), *ALIGNED) for sides in ((0, 1), 0, 1)]
    assert taken == [both, hidden_alone, weight_alone]
    assert products(function, *ALIGNED) == 1, "the value alone"


@pytest.mark.parametrize("function", [likelihood_and_entropy, PLAIN])
def test_without_a_workspace_no_value_has_rows_and_vocabulary(function: Callable[..., Any]) -> None:
    rows, vocabulary, features = 40_009, 151_936, 896
    shapes = [(rows, features), (vocabulary, features), (rows,), (rows,)]
    dtypes = [jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32]
    arguments = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]
    with jax.sharding.use_abstract_mesh(V6E):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(function, (0, 1)))(*arguments).jaxpr
    seen = [x.aval.shape for equation in equations(jaxpr) for x in equation.outvars if hasattr(x.aval, "shape")]
    assert any(equation.primitive.name == "pallas_call" for equation in equations(jaxpr))
    assert max(math.prod(shape) for shape in seen) <= vocabulary * features
    for shape in seen:
        assert not (any(n >= rows for n in shape[:-1]) and shape[-1] >= vocabulary), shape
