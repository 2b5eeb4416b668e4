"""The head's costs for every engine: matrix products, sizes of values, blocks visited; and the choice of an engine.

In a whole run the precision of products follows the model's dtype, and not JAX's configuration.

Compiled programs for TPUs and GPUs are in test_aot_head.py and test_mosaic_gpu_program.py.
"""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import head_programs as head
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OBJECTIVES, equations
from engines import BF16, F32, TPU_F32, TPU_TILES, V6E, XLA
from jax import lax
from tiny import ARCHITECTURE, config

from lm_head import choose_impl, divergence_loss, likeliest_tokens, target, token_logprobs, token_loss
from lm_head.contract import Inputs, Options
from lm_head.gpu import tiles as gpu_tiles
from lm_head.live_rows import LiveRows
from lm_head.tpu import engine
from lm_head.tpu import tiles as tpu_tiles
from mllm.config.model import MeshConfig
from mllm.model import attention
from mllm.parallel.mesh import make_mesh
from mllm.plan.programs import Programs, RolloutPrograms

N, V, D = XLA.shape
MIB = 2**20


def shapes_of(rows: int, vocabulary: int, features: int, dtype: Any = jnp.float32, weight: Any = None) -> Any:
    """Hidden states, weight, labels and weights."""
    shapes = (rows, features), (vocabulary, features), (rows,), (rows,)
    dtypes = dtype, weight or dtype, jnp.int32, jnp.float32
    return tuple(jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True))


def likelihood(hidden: Any, weight: Any, labels: Any, weights: Any, impl: str, entropy: float = 0) -> jax.Array:
    outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl=impl)
    return jnp.sum(weights * (outputs.logprob + outputs.lse + (entropy * outputs.entropy if entropy else 0)))


likelihood_and_entropy = functools.partial(likelihood, entropy=1)


def loss_of(objective: str, workspace: int | None, softcap: float | None = None) -> Callable[..., jax.Array]:
    def loss(hidden: Any, weight: Any, labels: Any, weights: Any, impl: Any = "xla") -> jax.Array:
        options: dict[str, Any] = {"weights": weights, "workspace": workspace, "impl": impl, "softcap": softcap}
        return token_loss(hidden, weight, labels, OBJECTIVES[objective], **options)[0]

    return loss


def divergence_of(kind: Any, workspace: int | None) -> Callable[..., jax.Array]:
    """From a teacher of the student's size."""

    def loss(hidden: Any, weight: Any, labels: Any, weights: Any, impl: Any = "xla") -> jax.Array:
        options: dict[str, Any] = {"kind": kind, "impl": impl, "weights": weights, "workspace": workspace}
        return divergence_loss(hidden, weight, 2 * hidden, 2 * weight, **options)[0]

    return loss


# --- matrix products, blocks visited ---


def products(function: Callable[..., Any], engine: str) -> float:
    """The function's matrix products by its jaxpr: they stand there once a tile, in kernels once a step of a tile."""
    weight = jnp.bfloat16 if engine == "xla, narrow weight" else jnp.float32
    by_kernels = engine == "mosaic_tpu"
    with (TPU_F32 if by_kernels else XLA).strictly():
        shapes = shapes_of(*((256, 512, 128) if by_kernels else XLA.shape), weight=weight)
        jaxpr = jax.make_jaxpr(functools.partial(function, impl=engine.split(",")[0]))(*shapes).jaxpr

    def number(jaxpr: Any) -> int:
        return sum(equation.primitive.name == "dot_general" for equation in equations(jaxpr))

    kernels = (x.params["jaxpr"] for x in equations(jaxpr) if x.primitive.name == "pallas_call")
    inside, steps = sum(map(number, kernels)), TPU_TILES["columns"] // TPU_TILES["step"]
    return number(jaxpr) - inside + inside / steps


NO_WORKSPACE, A_SMALL_WAVE, ONE_WAVE = 0, 16 * 384 * 4, 10**9
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "function", "value", "both", "hidden", "weight"),
    [
        ("xla", likelihood_and_entropy, 1, 4, 3, 3),
        ("xla", loss_of("entropy bonus", NO_WORKSPACE), 1, 4, 3, 3),
        ("xla", loss_of("entropy bonus", XLA.waves), 1, 3, 2, 2),
        ("xla, narrow weight", loss_of("entropy bonus", A_SMALL_WAVE), 1, 4, 2, 3),
        ("xla, narrow weight", loss_of("entropy bonus", A_SMALL_WAVE + 4 * V * D), 1, 3, 2, 2),
        ("xla", loss_of("smoothed label", XLA.waves, 5.0), 1, 3, 2, 2),
        ("xla", divergence_of("reverse_kl", NO_WORKSPACE), 2, 6, 5, 5),
        ("xla", divergence_of("jsd", NO_WORKSPACE), 4, 8, 7, 7),
        ("xla", divergence_of("jsd", ONE_WAVE), 2, 4, 3, 3),
        ("chunked_logits", likelihood_and_entropy, 1, 4, 3, 3),
        ("mosaic_tpu", likelihood, 1, 4, 2, 3),
        ("mosaic_tpu", likelihood_and_entropy, 1, 6, 4, 3),
        ("mosaic_tpu", loss_of("cross-entropy", NO_WORKSPACE), 1, 4, 2, 3),
        ("mosaic_tpu", loss_of("entropy bonus", NO_WORKSPACE), 1, 5, 3, 3),
        ("mosaic_tpu", loss_of("cross-entropy", ONE_WAVE), 1, 3, 2, 2),
        ("mosaic_tpu", loss_of("smoothed label", ONE_WAVE, 5.0), 1, 5, 3, 3),
    ],
)
def test_functions_and_gradients_take_the_documented_products(engine, function, value, both, hidden, weight):
    """On a TPU dh's expectation of W comes with the values, for one more. A teacher of the student's size has r = 1.

    Several waves add up a narrow weight's gradient in float32, an array that the workspace must have room for.
    """
    taken = [products(jax.value_and_grad(function, sides), engine) for sides in ((0, 1), 0, 1)]
    assert [products(function, engine), *taken] == [value, both, hidden, weight]


@pytest.mark.parametrize(
    ("rows", "weight", "workspace", "products", "waves"),
    [(8192, jnp.bfloat16, 640, 3.77, 1), (32768, jnp.bfloat16, 2560, 3, 8), (32768, jnp.float32, 640, 3.94, 1)],
)
def test_a_loss_on_hopper_takes_as_few_products_as_documented(rows, weight, workspace, products, waves):
    """4, less the share of columns with logits kept by a workspace of so many MiB. No more is kept than it can hold.

    Waves, of all logits of some rows, are taken where they save more than reading and writing dW's sum costs.
    """
    hidden, weight, labels, weights = shapes_of(rows, 151_936, 2048, jnp.bfloat16, weight)
    options = Options(None, jnp.dtype(jnp.bfloat16), workspace * MIB)
    plan = gpu_tiles.make_plan(Inputs(hidden, weight, labels, weights, weights), options)
    count = 4 - min(plan.kept_columns / len(weight), 1)
    assert count == pytest.approx(products, abs=0.006)
    assert rows / plan.rows == waves
    assert count >= 4 - workspace * MIB / (2 * plan.rows * len(weight))


@pytest.mark.parametrize("rows", [2000, 16384])
@pytest.mark.parametrize("features", [640, 1024, 2048, 3584])
@pytest.mark.parametrize("vocabulary", [128_256, 151_936, 152_064, 248_320, 262_208])
def test_waves_on_hopper_take_every_column_at_once_by_default(vocabulary, features, rows):
    """A trainer asks for a float32 dW of a bfloat16 copy. No chunk of columns divides every vocabulary."""
    inputs = Inputs(*shapes_of(rows, vocabulary, features, jnp.bfloat16, jnp.bfloat16), jnp.float32(1))
    dtypes = jnp.dtype(BF16), jnp.dtype(F32)
    plan = gpu_tiles.make_plan(inputs, Options(None, jnp.dtype(jnp.bfloat16), None, gradient_dtypes=dtypes))
    assert (plan.rows, plan.whole) == (2048, True)
    assert 0 <= plan.kept_columns - vocabulary < plan.sizes.tiles.columns
    frozen = Options(None, jnp.dtype(jnp.bfloat16), None, wants_weight=False, gradient_dtypes=(jnp.dtype(BF16),) * 2)
    assert gpu_tiles.make_plan(inputs, frozen) == plan, "without dW waves have no sum that costs time"


TPUS = {"v5e": (197e12, 820e9), "v6e": (920e12, 1640e9)}  # operations and bytes a second


@pytest.mark.parametrize(
    ("chip", "workspace", "wave"),
    [("v6e", None, None), ("v6e", 640, 2048), ("v6e", 2560, 8192), ("v5e", None, 1024)],
)
def test_tpu_waves_are_used_only_if_waves_save_time(chip, workspace, wave, monkeypatch):
    """A wave of 1,024 rows moves 2.5 GB: 1.5 ms on a v6e. A product of its rows takes 0.7 ms."""
    info = SimpleNamespace(num_cores=1, vmem_capacity_bytes=128 * MIB)
    info.bf16_ops_per_second, info.mem_bw_bytes_per_second = TPUS[chip]
    monkeypatch.setattr(tpu_tiles, "_info", lambda: info)
    hidden, weight, labels, weights = shapes_of(8192, 151_936, 2048, jnp.bfloat16, jnp.bfloat16)
    room, dtypes = None if workspace is None else workspace * MIB, (jnp.dtype(BF16), jnp.dtype(F32))
    options = Options(None, jnp.dtype(jnp.bfloat16), room, entropy_slopes=False, gradient_dtypes=dtypes)
    plan = engine._wave(Inputs(hidden, weight, labels, weights, weights), options)
    assert (plan and plan[1]) == wave


@pytest.mark.parametrize(
    ("function", "passes"),
    [
        (loss_of("cross-entropy", None), 1),
        slow(loss_of("cross-entropy", NO_WORKSPACE), 1 + -(-V // 128)),
        slow(divergence_of("reverse_kl", NO_WORKSPACE), 1 + -(-V // 128)),
    ],
    ids=["in waves", "recomputed", "a teacher"],
)
def test_blocks_visited_follow_the_rows_that_count(function: Callable[..., Any], passes: int) -> None:
    """A pass visits blocks of 16 rows, at most six; without kept logits each tile of columns visits them again."""
    visited: list[int] = []
    block = LiveRows.block

    def counted(self: LiveRows, i: jax.Array, size: int) -> Any:
        jax.debug.callback(lambda: visited.append(1))
        return block(self, i, size)

    gradients = jax.jit(jax.grad(function, (0, 1)))
    order = jnp.asarray(np.random.default_rng(0).permutation(N))
    with XLA.strictly(), mock.patch.object(LiveRows, "block", counted):
        for live, blocks in ((0, 0), (17, 2), (N, 6)):
            visited.clear()
            jax.block_until_ready(gradients(*XLA.problem(), jnp.float32(order < live)))
            jax.effects_barrier()
            assert len(visited) == blocks * passes


# --- programs for real sizes, and for accelerators ---


def test_the_likeliest_tokens_take_one_product_and_no_logits() -> None:
    hidden, weight, *_ = shapes_of(40_009, 151_936, 896)
    operations = list(equations(jax.make_jaxpr(likeliest_tokens)(hidden, weight).jaxpr))
    assert max(x.aval.size for equation in operations for x in equation.outvars) <= math.prod(weight.shape)
    assert sum(equation.primitive.name == "dot_general" for equation in operations) == 1


@pytest.mark.parametrize(
    ("impl", "function", "temporaries"),
    [
        ("xla", loss_of("cross-entropy", 64 * MIB), 130 * MIB),
        slow("xla", loss_of("cross-entropy", 0), 66 * MIB),
        *(slow("xla", divergence_of("jsd", workspace), workspace + 66 * MIB) for workspace in (0, 64 * MIB)),
        slow("chunked_logits", loss_of("cross-entropy", None), 130 * MIB),
        slow("full_logits", loss_of("cross-entropy", None), 2.1 * 513 * MIB),  # the logits, and their derivative
    ],
)
def test_temporaries_stay_within_the_workspace_and_a_few_tiles(impl: str, function: Any, temporaries: float) -> None:
    """64 MiB, and an array of hidden's shape, 2 MiB."""
    gradients = jax.jit(jax.grad(functools.partial(function, impl=impl), (0, 1)))
    memory = gradients.lower(*shapes_of(8192, 16_411, 64)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= temporaries


# --- the choice ---

UNFIT = "mosaic_gpu can't run: weight is 1020 x 256, and the kernels need multiples of 8 x 64"


@pytest.mark.parametrize(
    ("platform", "weight", "dtypes", "impl", "reason"),
    [
        ("cpu", (1024, 256), ("bfloat16", None), "xla", "no TPU or Hopper GPU here"),
        ("tpu", (1024, 256), ("bfloat16", None), "mosaic_tpu", "by its compiler's schedule"),
        ("tpu", (1024, 1 << 22), ("bfloat16", None), "xla", "mosaic_tpu can't run: "),
        ("gpu", (1024, 256), ("bfloat16", None), "mosaic_gpu", "0.4 of xla's time on an H200"),
        ("gpu", (1024, 256), ("float32", "bfloat16"), "mosaic_gpu", "0.4 of xla's time on an H200"),
        ("gpu", (1024, 256), ("bfloat16", "float32"), "xla", "mosaic_gpu can't run: dtype is float32"),
        ("gpu", (1020, 256), ("bfloat16", None), "xla", UNFIT),
        ("an older gpu", (1024, 256), ("bfloat16", None), "xla", "mosaic_gpu can't run: it needs a Hopper GPU, "),
    ],
)
def test_the_choice_of_an_engine_comes_with_its_reason(platform, weight, dtypes, impl, reason, monkeypatch):
    monkeypatch.setattr(target, "platform", lambda mesh=None: platform.split()[-1])
    if platform == "gpu":
        monkeypatch.setattr(target, "why_not_hopper", lambda: None)
    arrays = (jax.ShapeDtypeStruct(shape, dtypes[0]) for shape in ((2, 32, weight[1]), weight))
    choice = choose_impl(*arrays, dtype=dtypes[1])
    assert choice.impl == impl
    assert choice.reason.startswith(reason)
    assert "\n" not in choice.reason


# --- precisions ---


def precisions(function: Callable[..., Any], arguments: Any) -> set[Any]:
    operations = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
    products = {equation.params["precision"] for equation in operations if equation.primitive.name == "dot_general"}
    assert products
    return products


def allowed(dtype: str) -> set[Any]:
    if dtype == "float32":
        return {(lax.Precision.HIGHEST, lax.Precision.HIGHEST)}
    # The last is JAX's own attention's.
    return {(lax.Precision.DEFAULT, lax.Precision.DEFAULT), lax.DotAlgorithmPreset.BF16_BF16_F32}


OTHER = "tensorfloat32"
"""A setting that names none of the allowed precisions."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("splash", "bfloat16"), pytest.param("xla", "float32", marks=pytest.mark.nightly)]
)
def test_sampler_and_trainer_multiply_at_the_same_precision(kernel, dtype, monkeypatch):
    """float32 is the highest: on a TPU both would otherwise round their operands. bfloat16 is one pass."""
    if kernel == "splash":
        monkeypatch.setattr(attention, "platform", lambda mesh: "tpu")
    architecture = {**ARCHITECTURE, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    settings = config(model={"architecture": architecture, "dtype": dtype})
    training = Programs(settings, make_mesh(MeshConfig(fsdp=1)))
    sampling = RolloutPrograms(training, settings.rollout)
    programs = {"update": training.update(), "logprob": training.logprob()}
    programs |= {"prefill": sampling.prefill(), "decode": sampling.decode()}
    with jax.default_matmul_precision(OTHER):
        for name, program in programs.items():
            merged = allowed("float32") if name == "decode" else set()  # pages' sums are float32
            assert precisions(*program) <= allowed(dtype) | merged, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "impl", ["xla", "mosaic_tpu", *(pytest.param(x, marks=pytest.mark.slow) for x in ("full_logits", "chunked_logits"))]
)
def test_the_head_multiplies_at_the_precision_of_its_operands(impl, dtype):
    sizes = {"tokens": 256, "vocabulary": 512, "features": 128, "hidden": dtype, "weight": dtype, "impl": impl}
    mesh = make_mesh(MeshConfig(fsdp=1))
    for program in (head.general(mesh, entropy=True, **sizes), head.loss(mesh, workspace=1 << 30, **sizes)):
        with jax.default_matmul_precision(OTHER), jax.sharding.use_abstract_mesh(V6E):
            assert precisions(*program) <= allowed(dtype)
