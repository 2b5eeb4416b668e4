"""What the xla engine and full logits cost: sizes of values, matrix products, blocks visited; and which one is chosen.

Tiles are made small here, so that a few rows already make several blocks and the last tile overlaps the one before.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lm_head_cases import assert_near, equations

from kernels.lm_head import choose_impl, target, token_logprobs, token_loss, xla
from kernels.lm_head.live_rows import LiveRows

N, D, V = 90, 16, 301
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(N, D)).astype(np.float32)
WEIGHT = RNG.normal(size=(V, D)).astype(np.float32)
LABELS = RNG.integers(0, V, N)
LIVE = RNG.random(N) < 0.5
ADVANTAGE = RNG.normal(size=N).astype(np.float32)
WEIGHTS = (LIVE * RNG.normal(size=N)).astype(np.float32)
WAVE_OF_ALL, WAVES, RECOMPUTED = 10**9, 40 * 384 * 4, 0


def objective(logprob, entropy, advantage):
    return -advantage * jnp.exp(0.1 * logprob) + 0.01 * entropy**2


def cross_entropy(logprob, entropy):
    return -logprob


def logprobs_sum(hidden, weight, **options):
    return sum(x.sum() for x in token_logprobs(hidden, weight, LABELS, **options))


def loss(hidden, weight, advantage=ADVANTAGE, weights=LIVE, **options):
    return token_loss(hidden, weight, LABELS, objective, advantage, weights=weights, **options)[0]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, request):
    if "full_size_tiles" not in request.fixturenames:
        monkeypatch.setattr(xla, "_CPU_BLOCK", 16)
        monkeypatch.setattr(xla, "_BLOCK", 16)
        monkeypatch.setattr(xla, "_TILE", 128)
        monkeypatch.setattr(xla, "_LEAST_WAVE", 8)


@pytest.fixture
def full_size_tiles():
    """The tiles of a real run; only for what is traced or compiled and not run."""


def products(function, *args) -> int:
    """Matrix products in what remains of the function when unused results are dropped."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return sum(" dot(" in line or ("custom-call(" in line and "matmul" in line) for line in text.splitlines())


# --- sizes ---


def masked_logprobs_sum(h, w, y, mask):
    return sum(x.sum() for x in token_logprobs(h, w, y, where=mask != 0))


def loss_with(workspace):
    return lambda h, w, y, mask: token_loss(h, w, y, cross_entropy, weights=mask, workspace=workspace)[0]


def shapes_of(rows, vocabulary, features, dtype=jnp.float32):
    shapes = ((rows, features), dtype), ((vocabulary, features), dtype), ((rows,), jnp.int32), ((rows,), jnp.float32)
    return tuple(jax.ShapeDtypeStruct(*x) for x in shapes)


@pytest.mark.usefixtures("full_size_tiles")
@pytest.mark.parametrize("function", [masked_logprobs_sum, *map(loss_with, (0, None, 2**24, 2**40))])
@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "backward"])
def test_no_value_carries_both_rows_and_vocabulary(function, differentiated):
    rows, vocabulary = 40_009, 151_936
    traced = jax.value_and_grad(function, (0, 1)) if differentiated else function
    jaxpr = jax.make_jaxpr(traced)(*shapes_of(rows, vocabulary, 8)).jaxpr
    shapes = {v.aval.shape for e in equations(jaxpr) for v in e.outvars}
    assert len(shapes) > 10, "the walk has not seen the loops"
    for shape in shapes:
        assert not (any(n >= rows for n in shape[:-1]) and shape[-1] >= vocabulary), shape
        # The whole of a wave's logits is the largest: 2048 rows, and never all of them.
        assert np.prod(shape) <= 2048 * 153_600, shape


@pytest.mark.usefixtures("full_size_tiles")
@pytest.mark.parametrize("workspace", [0, 2**24, 2**26])
def test_temporaries_stay_within_the_workspace_and_a_few_tiles(workspace):
    rows, vocabulary, features = 8192, 16_411, 64
    grad = jax.grad(loss_with(workspace), (0, 1))
    memory = jax.jit(grad).lower(*shapes_of(rows, vocabulary, features)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= workspace + 64 * 2**20 + 4 * rows * features


# --- work ---


def test_the_value_alone_takes_one_matrix_product():
    assert products(lambda h, w: loss(h, w, workspace=WAVES), HIDDEN, WEIGHT) == 1


@pytest.mark.parametrize(("workspace", "expected"), [(RECOMPUTED, 4), (WAVES, 3), (WAVE_OF_ALL, 3), (None, 3)])
def test_loss_and_both_gradients_take_four_products_or_three_with_a_workspace(workspace, expected):
    grad = jax.value_and_grad(lambda h, w: loss(h, w, workspace=workspace), (0, 1))
    assert products(grad, HIDDEN, WEIGHT) == expected


@pytest.mark.parametrize("side", [0, 1], ids=["hidden alone", "weight alone"])
@pytest.mark.parametrize(("workspace", "expected"), [(RECOMPUTED, 3), (WAVES, 2)])
def test_the_gradient_of_a_frozen_side_is_not_computed(side, workspace, expected):
    grad = jax.value_and_grad(lambda h, w: loss(h, w, workspace=workspace), side)
    assert products(grad, HIDDEN, WEIGHT) == expected
    if workspace == RECOMPUTED:
        assert products(jax.value_and_grad(logprobs_sum, side), HIDDEN, WEIGHT) == expected


def test_a_frozen_side_stays_frozen_through_jit_checkpoint_and_scan():
    @jax.jit
    def micro_batches(hidden, weight):
        step = jax.checkpoint(lambda total, h: (total + loss(h, weight, workspace=RECOMPUTED), None))
        return jax.lax.scan(step, 0.0, hidden[None])[0]

    # The checkpoint repeats the forward pass: z for the loss, z again, z for the backward pass, dh.
    assert products(jax.grad(micro_batches), HIDDEN, WEIGHT) <= 4


def test_a_narrow_weight_takes_waves_only_if_their_float32_sum_fits():
    narrow = jnp.asarray(WEIGHT, jnp.bfloat16)

    def count(workspace, side):
        return products(jax.value_and_grad(lambda h, w: loss(h, w, workspace=workspace), side), HIDDEN, narrow)

    both = (0, 1)
    room_for_logits = 16 * 384 * 4
    assert [count(None, both), count(room_for_logits, both), count(room_for_logits + 4 * V * D, both)] == [4, 4, 3]
    assert count(WAVE_OF_ALL, both) == 3, "one wave has nothing to sum"
    assert count(None, 0) == 2, "a frozen weight has no sum"


@pytest.mark.parametrize("live", [0, 17, N])
def test_blocks_visited_follow_the_rows_that_count(live, monkeypatch):
    visits = []
    block = LiveRows.block

    def counted(self, i, size):
        jax.debug.callback(lambda i: visits.append(int(i)), i)
        return block(self, i, size)

    monkeypatch.setattr(LiveRows, "block", counted)
    mask = np.zeros(N, np.float32)
    mask[RNG.permutation(N)[:live]] = 1
    blocks, tiles = -(-live // 16), -(-V // 128)
    jax.block_until_ready(jax.grad(loss, (0, 1))(HIDDEN, WEIGHT, weights=mask, workspace=None))
    jax.effects_barrier()
    assert len(visits) == blocks
    visits.clear()
    jax.block_until_ready(jax.grad(loss, (0, 1))(HIDDEN, WEIGHT, weights=mask, workspace=RECOMPUTED))
    jax.effects_barrier()
    assert len(visits) == blocks + tiles * blocks


# --- over devices ---


def test_tokens_over_devices_give_the_gradients_of_one():
    """In the caller's own `jax.shard_map`, which checks over which axes a value varies."""
    devices = 5
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def plain(h, w, y, a, m):
        value = token_loss(h, w, y, objective, a, weights=m)[0]
        return value + token_logprobs(h, w, y, where=m != 0).lse.sum()

    rows = P("data")
    sharded = jax.shard_map(
        lambda *args: jax.lax.psum(plain(*args), "data"),
        mesh=mesh,
        in_specs=(rows, P(), rows, rows, rows),
        out_specs=P(),
    )
    args = (HIDDEN, WEIGHT, LABELS, ADVANTAGE, LIVE.astype(np.float32))
    assert_near(jax.jit(jax.value_and_grad(sharded, (0, 1)))(*args), jax.value_and_grad(plain, (0, 1))(*args))


# --- full logits, the baseline ---

FULL_LOGITS = (64, 4096, 16)  # N, V and D


def compiled_with_full_logits(dtype=jnp.float32):
    def loss(hidden, weight, labels):
        return token_loss(hidden, weight, labels, cross_entropy, impl="full_logits")[0]

    hidden, weight, labels, _ = shapes_of(*FULL_LOGITS, dtype)
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, weight, labels).compile()


def test_a_loss_by_full_logits_takes_two_exponentials_and_two_reductions():
    n, v, _ = FULL_LOGITS
    text = compiled_with_full_logits().as_text()
    assert len(re.findall(rf"\w+\[{n},{v}\]\S* exponential\(", text)) == 2, "forward's and backward's"
    assert not re.findall(rf"\w+\[{n},{v}\]\S* log\(", text)
    assert len(re.findall(rf"\w+\[{n}\]\S* reduce\(", text)) == 2, "the maximum, and the sum of exponentials"


@pytest.mark.parametrize(("dtype", "arrays"), [(jnp.float32, 2.1), (jnp.bfloat16, 2.6)])
def test_temporaries_of_full_logits_are_the_logits_and_their_derivative(dtype, arrays):
    n, v, _ = FULL_LOGITS
    assert compiled_with_full_logits(dtype).memory_analysis().temp_size_in_bytes <= arrays * 4 * n * v


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
def test_the_choice_of_an_engine_comes_with_its_reason(platform, dtype, impl, reason, monkeypatch):
    monkeypatch.setattr(target, "platform", lambda mesh=None: platform)
    choice = choose_impl(jax.ShapeDtypeStruct((2, 32, 256), dtype), jax.ShapeDtypeStruct((1024, 256), dtype))
    assert choice.impl == impl
    assert choice.reason.startswith(reason)
