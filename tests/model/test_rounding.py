"""A bfloat16 model is that of its matrices' dithered copies, in the trainer, the sampler and validation; and int8."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import ARCHITECTURE, config, forward_of, random_batch

from mllm.algorithms.examples import make_validation
from mllm.algorithms.sft.algorithm import validation_metrics
from mllm.model.architecture import Architecture
from mllm.model.compute_copy import Rounding, compute_copy
from mllm.model.decoder import Decoder
from mllm.model.int8 import is_int8, quantize
from mllm.model.layer import AttentionLayer
from mllm.model.layout import QUANTIZED, map_parameters
from mllm.model.load import load_policy
from mllm.model.lora import Lora
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel.mesh import make_mesh
from mllm.sampler import sampling
from mllm.sampler.decoding import Pages, abstract_cache, abstract_decoding_weights, apply_tokens, decoding_weights
from mllm.sampler.sampler import Sampler

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.08}
SIZES |= {"tie_word_embeddings": False}
ROWS, PROMPT = random_batch(16, 64), 6
COUNTED = ROWS.weights[:, PROMPT - 1 : -1] > 0


class Model:
    """A bfloat16 model of 16 rows of tokens; its parameters are passed in float32."""

    def __init__(self, rounding="dithered"):
        model = {"architecture": {**ARCHITECTURE, **SIZES}, "dtype": "bfloat16", "compute_rounding": rounding}
        lengths = {"max_prompt_length": PROMPT, "max_completion_length": 64 - PROMPT}
        self.settings = config(model=model, rollout=lengths)
        mesh = make_mesh(self.settings.mesh)
        self.policy = load_policy(self.settings, mesh)
        forward = forward_of(self.policy.graphdef, mesh, self.settings)
        self.logprobs = jax.jit(lambda params: forward.logprobs(params, jax.tree.map(jnp.asarray, ROWS)).logprob)
        self.validate = make_validation(validation_metrics, forward, lambda: [ROWS], lambda: None)

    def trained(self, params):
        return np.asarray(self.logprobs(params)[:, PROMPT - 1 : -1])[COUNTED]

    def validated(self, params):
        return np.array(list(self.validate(params, 0).values()))

    def sampled(self, params):
        """The sampler's log-probabilities, where it draws these tokens."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "sequence_keys", lambda seed, step, sequences: sequences)
            patch.setattr(sampling, "draw", draw)
            sampler = Sampler(self.policy.graphdef, Renderer(bytes_tokenizer()), (-1,), self.settings.rollout, 0)
            completions = sampler.complete(params, ROWS.tokens[:, :PROMPT].tolist(), step=0)
        return np.array([one.logprobs for one in completions])[COUNTED]


model = cache(Model)


def draw(logits, sequences, positions, likeliest, options):
    tokens = jnp.asarray(ROWS.tokens)[sequences, PROMPT + positions]
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return sampling.Draw(tokens, jnp.take_along_axis(logprobs, tokens[:, None], 1)[:, 0], None, jnp.zeros(len(tokens)))


def is_matrix(name):
    return name in ("embed", "head") or name.endswith("_weight")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layers.q_bias", "norm"])
def test_norms_and_biases_are_not_rounded(kind):
    """From 1 the next number in bfloat16 is 1 + 2^-7."""
    ones = map_parameters(lambda x, name: x if is_matrix(name) else jnp.ones_like(x), model().policy.initial_params())
    above = map_parameters(lambda x, name: x + 2**-10 if name == kind else x, ones)
    for of in (model().trained, model().sampled):
        assert (of(above) != of(ones)).mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("target", ["q", "v"])
def test_a_product_is_rounded_once_after_bias_and_adapter(target):
    """The product is q, with an adapter or without. Operands are on the grid, but x a^T, which is small, is rounded."""
    sizes, lora = Architecture.from_hf(ARCHITECTURE, "test"), Lora(8, 16.0, (target,))
    graphdef, params = nnx.split(
        AttentionLayer(sizes, sizes.num_hidden_layers, jnp.bfloat16, jnp.float32, nnx.Rngs(0), lora)
    )
    rng, names = np.random.default_rng(3), ["q_weight", "q_bias", "q_a", "q_b"][: 4 if target == "q" else 2]
    shapes = {(32, 32): 0.1, (32,): 0.1, (8, 32): 0.1, (32, 8): 0.003, (1, 90, 32): 1, (90, 32): 1}
    arrays = [jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16) for shape, scale in shapes.items()]

    def product(x, *numbers):
        given = dict(zip(names, numbers, strict=True))
        return nnx.merge(graphdef, nnx.State({**params, **given})).product("q", x)[0]

    y, pull = jax.vjp(product, arrays[4], *(array.astype(jnp.float32) for array in arrays[: len(names)]))
    w, bias, a, b, (x,), dy = map(np.float64, arrays)
    b *= 2 * (target == "q")  # the scale
    exact = x @ w.T + bias + x @ a.T @ b.T
    half_ulp, of_low = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8), 2**-8 * np.abs(x @ a.T) @ np.abs(b.T)
    assert (np.abs(np.float64(y) - exact) <= half_ulp + of_low + 1e-6).all()
    wanted = [dy @ w + dy @ b @ a, dy.T @ x, dy.sum(0), b.T @ dy.T @ x, 2 * dy.T @ (x @ a.T)][: len(names) + 1]
    for gradient, want in zip(pull(arrays[5]), wanted, strict=True):
        assert np.linalg.norm(np.float64(gradient).reshape(want.shape) - want) < 2**-8 * np.linalg.norm(want)


@pytest.mark.slow
def test_a_dithered_model_equals_its_copies_to_the_bit():
    """Trainer, sampler and validation read nothing else of the matrices."""
    params = model().policy.initial_params()
    copies = map_parameters(
        lambda x, name: compute_copy(x, DITHERED, name).astype(jnp.float32) if is_matrix(name) else x, params
    )
    dithered, nearest = model(), model("nearest")
    for of in (Model.trained, Model.sampled, Model.validated):
        assert of(dithered, params).tobytes() == of(nearest, copies).tobytes() != of(nearest, params).tobytes()


# The cast, against NumPy: 16 bits that belong to a weight are added, 16 cut off. The added bits are found from the
# copies alone

SHAPE = (192, 256)
DITHERED = Rounding(jnp.dtype("bfloat16"), dithered=True)
RNG = np.random.default_rng(0)


def copied(values, name="embed", **options):
    copy = compute_copy(jnp.asarray(values, jnp.float32), DITHERED, name, **options)
    assert copy.dtype == jnp.bfloat16
    return np.asarray(copy).astype(np.float32)


def bits_of(name, shape=SHAPE, **options):
    """The threshold of each weight: among the 2^16 numbers from 1 to its neighbour, how many are rounded up."""
    kept = np.zeros(shape, np.uint32)
    for bit in reversed(range(16)):
        higher = kept | np.uint32(1 << bit)
        kept = np.where(copied((higher + np.uint32(0x3F800000)).view(np.float32), name, **options) == 1, higher, kept)
    return 65535 - kept


@pytest.fixture(scope="module")
def bits():
    return bits_of("embed")


def cut(values, bits):
    return ((values.view(np.uint32) + bits) & np.uint32(0xFFFF0000)).view(np.float32)


def assert_same_bits(one, other):
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_bfloat16_numbers_are_not_changed_by_rounding():
    """Every bfloat16 number: both zeros, subnormal numbers, the largest, and infinities. NaN stays NaN."""
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).reshape(256, 256)
    copies, number = copied(every), ~np.isnan(every)
    assert_same_bits(copies[number], every[number])
    assert np.isnan(copies[~number]).all()
    assert np.isnan(copied(np.array([[0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF]], np.uint32).view(np.float32))).all()


def test_other_numbers_become_a_neighbour_by_their_last_bits(bits):
    """The farther neighbour is taken where the last bits and the weight's threshold carry."""
    values = (RNG.normal(size=SHAPE) * 10.0 ** RNG.integers(-36, 37, SHAPE)).astype(np.float32)
    assert_same_bits(copied(values), cut(values, bits))
    assert ((copied(values) == cut(values, 0)) | (copied(values) == cut(values, 0xFFFF))).all()


@pytest.mark.slow
def test_thresholds_are_uniform_and_independent(bits):
    """49,152 draws from 65,536 numbers are expected to bring up 52.8 % of the numbers."""
    assert 0.51 < len(np.unique(bits)) / 65536 < 0.55
    np.testing.assert_allclose(np.histogram(bits, 16, (0, 65536))[0] / bits.size, 1 / 16, rtol=0.1)
    others = [bits_of(name) for name in ("head", "layers.q_weight", "layers.k_weight")]
    shifted = [np.roll(bits, by, (0, 1)) for by in ((1, 0), (0, 1), (1, 1), (1, -1), (64, 0))]
    for other in (*others, *shifted, *(bits_of("embed", layer=layer) for layer in (1, 2, 35))):
        assert abs(np.corrcoef(bits.ravel(), other.ravel())[0, 1]) < 0.03
        assert (bits == other).mean() < 0.001


@pytest.mark.nightly
def test_thresholds_are_the_same_in_every_process_and_shape(bits):
    """A run is resumed, sampled or exported by a process other than its trainer."""
    assert bits[[0, 0, 1, 191], [0, 1, 0, 255]].tolist() == [36794, 12080, 62708, 48799]
    np.testing.assert_array_equal(bits_of("embed", (7, 300))[:, :256], bits[:7])


def test_looked_up_rows_equal_the_rows_of_the_matrix():
    values, tokens = RNG.normal(size=SHAPE).astype(np.float32), RNG.integers(0, SHAPE[0], (3, 50))
    assert_same_bits(copied(values[tokens], rows=jnp.asarray(tokens)[..., None]), copied(values)[tokens])


@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_tied_head_is_rounded_like_the_embedding(name):
    """An untied head is rounded by its own name."""
    sizes = Architecture.from_hf({**ARCHITECTURE, "tie_word_embeddings": name == "embed"}, "test")
    model, values = Decoder.abstract(sizes, dtype=jnp.bfloat16, dithered=True), RNG.normal(size=SHAPE)
    copy = model.head_copy(jnp.asarray(values, jnp.float32)).astype(jnp.float32)
    assert_same_bits(np.asarray(copy), copied(values, name))


ON_TWO = {"rank": 4, "alpha": 8.0, "targets": ("q", "down")}


def random_matrix(seed=0, shape=(64, 512)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dequantized(matrix):
    return np.asarray(matrix.values, np.float32) * np.asarray(matrix.scales)[:, None]


def test_each_row_has_a_scale_and_errors_within_half_a_step():
    exact = random_matrix() * 10.0 ** np.arange(-32, 32)[:, None]
    exact[3] = 0
    matrix = quantize(jnp.asarray(exact))
    assert (matrix.values.dtype, matrix.scales.dtype) == (jnp.int8, jnp.float32)
    np.testing.assert_allclose(matrix.scales, np.abs(exact).max(1) / 127, rtol=1e-6)
    assert (np.abs(dequantized(matrix) - exact) <= 0.501 * np.asarray(matrix.scales)[:, None]).all()


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        pytest.param({"fsdp": 2, "tp": 2}, {"lora": ON_TWO}, marks=pytest.mark.nightly),
        pytest.param({}, {"architecture": {"tie_word_embeddings": False}, "lora": ON_TWO}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_decode_step_uses_the_int8_matrices(mesh, model):
    tied = config().model.architecture
    model = {**model, "architecture": {**tied, **model.get("architecture", {})}}
    settings = config(mesh=mesh, model=model)
    policy = load_policy(settings, make_mesh(settings.mesh))
    params = policy.initial_params()
    weights = decoding_weights(policy.graphdef, params, int8=True)
    abstract = abstract_decoding_weights(nnx.merge(policy.graphdef, policy.params), policy.params, int8=True)[0]
    for leaf, like in zip(jax.tree.leaves(weights), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)

    def widened(x):
        return jnp.asarray(dequantized(x)) if is_int8(x) else x

    plain = jax.tree.map(widened, weights, is_leaf=is_int8)
    matrices = [x for x in jax.tree.leaves(weights, is_leaf=is_int8) if is_int8(x)]
    assert len(matrices) == 7 * 2 + len(QUANTIZED & set(weights.outer))
    tokens, none = jnp.asarray([5, 77, 258, 0]), jnp.zeros(4, jnp.int32)
    shapes = abstract_cache(nnx.merge(policy.graphdef, policy.params), [4], 32)
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    pages = (Pages(jnp.arange(4), none, jnp.arange(4)[:, None]),)
    step = jax.jit(lambda x: apply_tokens(policy.graphdef, x, cache, pages, cache, tokens[:, None], none, 0)[0])
    result, expected = step(weights), step(plain)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
