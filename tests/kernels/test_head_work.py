"""What the head costs: matrix products, sizes of values, blocks visited, of every engine; and which one is chosen.

Products of the Pallas kernels are counted in the jaxpr, over every step of every grid; those of XLA in what is
compiled. What the compilers for TPUs and GPUs make of the programs is tested in test_aot_head.py and
test_mosaic_gpu_program.py.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import head_programs as head
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TPU_F32, TPU_TILES, V6E, XLA
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.extend.core import Jaxpr
from jax.sharding import AbstractDevice, Mesh
from lm_head_cases import OBJECTIVES, equations, jaxprs_of, random_problem
from strict_tpu import strict_interpreter

from kernels.lm_head import choose_impl, target, token_logprobs, token_loss
from kernels.lm_head.live_rows import LiveRows
from kernels.lm_head.tpu import tiles

N, V, D = XLA.shape
NO_WORKSPACE, ONE_WAVE = 0, 10**9


def shapes_of(rows: int, vocabulary: int, features: int, dtype: Any = jnp.float32, weight: Any = None) -> Any:
    """Hidden states, weight, labels and weights."""
    shapes = (rows, features), (vocabulary, features), (rows,), (rows,)
    dtypes = dtype, weight or dtype, jnp.int32, jnp.float32
    return tuple(jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True))


def likelihood(hidden: Any, weight: Any, labels: Any, weights: Any, impl: str) -> jax.Array:
    outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl=impl)
    return jnp.sum(weights * (outputs.logprob + outputs.lse))


def likelihood_and_entropy(hidden: Any, weight: Any, labels: Any, weights: Any, impl: str) -> jax.Array:
    outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl=impl)
    return jnp.sum(weights * (outputs.logprob + outputs.lse + outputs.entropy))


def loss_of(objective: str, workspace: int | None) -> Callable[..., jax.Array]:
    def loss(hidden: Any, weight: Any, labels: Any, weights: Any, impl: Any = "xla") -> jax.Array:
        options: dict[str, Any] = {"weights": weights, "workspace": workspace, "impl": impl}
        return token_loss(hidden, weight, labels, OBJECTIVES[objective].in_jax, **options)[0]

    return loss


# --- matrix products, blocks visited ---


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


def products(function: Callable[..., Any], impl: str, weight: Any = jnp.float32) -> float:
    """Matrix products in what remains of the function when unused results are dropped."""
    if impl == "mosaic_tpu":
        whole_tiles = (256, 512, 128)
        with TPU_F32.strictly():
            jaxpr = jax.make_jaxpr(functools.partial(function, impl=impl))(*shapes_of(*whole_tiles)).jaxpr
        return multiplications(jaxpr) / math.prod(whole_tiles)
    with XLA.strictly():
        compiled = jax.jit(functools.partial(function, impl=impl)).lower(*shapes_of(N, V, D, weight=weight)).compile()
    lines = (compiled.as_text() or "").splitlines()
    return sum(" dot(" in line or ("custom-call(" in line and "matmul" in line) for line in lines)


@pytest.mark.parametrize(
    ("impl", "function", "both", "hidden_alone", "weight_alone"),
    [
        pytest.param("xla", likelihood_and_entropy, 4, 3, 3, id="xla, token_logprobs"),
        pytest.param("xla", loss_of("entropy bonus", NO_WORKSPACE), 4, 3, 3, id="xla, token_loss"),
        pytest.param("xla", loss_of("entropy bonus", XLA.waves), 3, 2, 2, id="xla, token_loss in waves"),
        pytest.param("xla", loss_of("entropy bonus", ONE_WAVE), 3, 2, 2, id="xla, token_loss in one wave"),
        pytest.param("xla", loss_of("entropy bonus", None), 3, 2, 2, id="xla, token_loss by default"),
        pytest.param("mosaic_tpu", likelihood, 4, 2, 3, id="tpu, token_logprobs"),
        pytest.param("mosaic_tpu", likelihood_and_entropy, 6, 4, 3, id="tpu, token_logprobs with entropy"),
        pytest.param("mosaic_tpu", loss_of("cross-entropy", NO_WORKSPACE), 4, 2, 3, id="tpu, token_loss"),
        pytest.param("mosaic_tpu", loss_of("entropy bonus", NO_WORKSPACE), 5, 3, 3, id="tpu, token_loss with entropy"),
        pytest.param("mosaic_tpu", loss_of("cross-entropy", ONE_WAVE), 3, 2, 2, id="tpu, token_loss in one wave"),
    ],
)
def test_gradients_take_so_many_products(
    impl: str, function: Callable[..., Any], both: int, hidden_alone: int, weight_alone: int
) -> None:
    """The values' own among them. On a TPU dh's expectation of W comes with the values, for one more."""
    taken = [products(jax.value_and_grad(function, sides), impl) for sides in ((0, 1), 0, 1)]
    assert taken == [both, hidden_alone, weight_alone]
    assert products(function, impl) == 1, "the value alone"


def test_a_frozen_side_stays_frozen_through_checkpoint_and_scan() -> None:
    loss = loss_of("entropy bonus", NO_WORKSPACE)

    def micro_batches(hidden: Any, weight: Any, labels: Any, weights: Any, impl: str) -> jax.Array:
        step = jax.checkpoint(lambda total, h: (total + loss(h, weight, labels, weights, impl), None))
        return jax.lax.scan(step, 0.0, hidden[None])[0]

    # The checkpoint repeats the forward pass: z for the loss, z again, z for the backward pass, dh.
    assert products(jax.grad(micro_batches), "xla") <= 4


def test_a_narrow_weight_takes_waves_only_if_their_float32_sum_fits() -> None:
    def count(workspace: int | None, sides: Any) -> float:
        loss = loss_of("entropy bonus", workspace)
        return products(jax.value_and_grad(loss, sides), "xla", jnp.bfloat16)

    both, room_for_logits = (0, 1), 16 * 384 * 4
    assert [count(None, both), count(room_for_logits, both), count(room_for_logits + 4 * V * D, both)] == [4, 4, 3]
    assert count(ONE_WAVE, both) == 3, "one wave has nothing to sum"
    assert count(None, 0) == 2, "a frozen weight has no sum"


@pytest.mark.parametrize("live", [0, 17, N])
def test_blocks_visited_follow_the_rows_that_count(live: int, monkeypatch: pytest.MonkeyPatch) -> None:
    visits: list[int] = []
    block = LiveRows.block

    def counted(self: LiveRows, i: jax.Array, size: int) -> Any:
        jax.debug.callback(lambda i: visits.append(int(i)), i)
        return block(self, i, size)

    monkeypatch.setattr(LiveRows, "block", counted)
    mask = np.zeros(N, np.float32)
    mask[np.random.default_rng(0).permutation(N)[:live]] = 1
    blocks, columns = -(-live // 16), -(-V // 128)
    for workspace, expected in ((None, blocks), (NO_WORKSPACE, blocks + columns * blocks)):
        visits.clear()
        with XLA.strictly():
            jax.block_until_ready(jax.grad(loss_of("cross-entropy", workspace), (0, 1))(*XLA.problem(), mask))
        jax.effects_barrier()
        assert len(visits) == expected


ENTRIES = {"token_logprobs": likelihood_and_entropy, "token_loss": loss_of("cross-entropy", ONE_WAVE)}
every_entry = pytest.mark.parametrize("function", ENTRIES.values(), ids=list(ENTRIES))


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


@every_entry
def test_blocks_of_rows_that_do_not_count_are_neither_read_nor_fetched_on_tpus(function: Callable[..., Any]) -> None:
    """128 of 200 rows, in a call of two blocks, against the same 128 rows in a call of one."""
    gradients = jax.value_and_grad(functools.partial(function, impl="mosaic_tpu"), (0, 1))
    hidden, weight, labels = random_problem((200, 300, 64), 2.0)
    some = jnp.where(jnp.arange(200) < 128, 0.5, 0)
    with tiles.override(**TPU_TILES):
        of_two = traffic(gradients, hidden, weight, labels, some)
    with tiles.override(**TPU_TILES | {"call": 128}):
        of_one = traffic(gradients, hidden[:128], weight, labels[:128], some[:128])
    for kind in ("read", "fetched"):
        assert of_two[kind] == of_one[kind] > weight.size


# --- sizes, with the tiles of a real run ---


LARGE = (40_009, 151_936, 896)
A_WAVE = 2048 * 153_600  # its logits, of so many rows and never all of them


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("impl", "function", "largest"),
    [
        *(("xla", f, A_WAVE) for f in (likelihood, *(loss_of("cross-entropy", x) for x in (0, None, 2**24, 2**40)))),
        *(("mosaic_tpu", f, LARGE[1] * LARGE[2]) for f in (likelihood_and_entropy, loss_of("cross-entropy", 0))),
    ],
)
def test_no_value_carries_both_rows_and_vocabulary(
    impl: str, function: Callable[..., Any], largest: int, differentiated: bool
) -> None:
    (rows, vocabulary, _), function = LARGE, functools.partial(function, impl=impl)
    with jax.sharding.use_abstract_mesh(V6E):
        traced = jax.value_and_grad(function, (0, 1)) if differentiated else function
        jaxpr = jax.make_jaxpr(traced)(*shapes_of(*LARGE, jnp.bfloat16)).jaxpr
    found = list(equations(jaxpr))
    assert any(equation.primitive.name == "pallas_call" for equation in found) == (impl == "mosaic_tpu")
    shapes = {x.aval.shape for equation in found for x in equation.outvars if hasattr(x.aval, "shape")}
    assert len(shapes) > 10, "the walk has not seen the loops"
    for shape in shapes:
        assert not (any(n >= rows for n in shape[:-1]) and shape[-1] >= vocabulary), shape
        assert math.prod(shape) <= largest, shape


@pytest.mark.parametrize("workspace", [0, 2**24, 2**26])
def test_temporaries_stay_within_the_workspace_and_a_few_tiles(workspace: int) -> None:
    rows, vocabulary, features = 8192, 16_411, 64
    gradients = jax.jit(jax.grad(loss_of("cross-entropy", workspace), (0, 1)))
    memory = gradients.lower(*shapes_of(rows, vocabulary, features)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= workspace + 64 * 2**20 + 4 * rows * features


# --- programs for TPUs ---


@every_entry
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_program_for_tpus_can_be_exported_without_one(function: Callable[..., Any], dtype: Any) -> None:
    gradients = jax.jit(jax.value_and_grad(functools.partial(function, impl="mosaic_tpu"), (0, 1)))
    with jax.sharding.use_abstract_mesh(V6E):
        text = jax.export.export(gradients, platforms=["tpu"])(*shapes_of(200, 300, 64, dtype)).mlir_module()
    assert "tpu_custom_call" in text
    assert "dot_general" not in text


@pytest.mark.parametrize("tokens", [300, 8192])
@pytest.mark.parametrize(
    ("function", "options"), [("general", {"entropy": True}), ("loss", {"workspace": 600 * 2 * 32000})]
)
def test_a_chip_with_two_cores_has_blocks_for_both_in_every_call(
    function: str, options: dict[str, Any], tokens: int
) -> None:
    """The first dim of a grid is the one that cores share: blocks of rows, or for dW tiles of the weight."""
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


# --- full logits, the baseline ---


@pytest.mark.parametrize(("dtype", "arrays"), [(jnp.float32, 2.1), (jnp.bfloat16, 2.6)])
def test_full_logits_take_their_memory_and_their_derivative_s_two_exponentials_and_two_reductions(
    dtype: Any, arrays: float
) -> None:
    n, v, d = 64, 4096, 16
    function = functools.partial(loss_of("cross-entropy", None), weights=None, impl="full_logits")
    compiled = jax.jit(jax.value_and_grad(function, (0, 1))).lower(*shapes_of(n, v, d, dtype)[:3]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= arrays * 4 * n * v
    text = compiled.as_text() or ""
    assert len(re.findall(rf"\w+\[{n},{v}\]\S* exponential\(", text)) == 2, "forward's and backward's"
    assert not re.findall(rf"\w+\[{n},{v}\]\S* log\(", text)
    assert len(re.findall(rf"\w+\[{n}\]\S* reduce\(", text)) == 2, "the maximum, and the sum of exponentials"


# --- the choice ---


@pytest.mark.parametrize(
    ("platform", "dtype", "impl", "reason"),
    [
        ("cpu", "float32", "xla", "no TPU or Hopper GPU here"),
        ("tpu", "bfloat16", "mosaic_tpu", "by its compiler's schedule"),
        ("tpu", "float16", "xla", "mosaic_tpu can't run: hidden is float16"),
        ("gpu", "bfloat16", "xla", "mosaic_gpu has not been timed on a device"),
    ],
)
def test_the_choice_of_an_engine_comes_with_its_reason(
    platform: str, dtype: str, impl: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "platform", lambda mesh=None: platform)
    choice = choose_impl(jax.ShapeDtypeStruct((2, 32, 256), dtype), jax.ShapeDtypeStruct((1024, 256), dtype))
    assert choice.impl == impl
    assert choice.reason.startswith(reason)
