"""The gated delta rule against a recurrence in float64, borders of documents, states, and its layers in a decoder.

The logits of a whole model against transformers are in tests/model/test_model.py.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiled_program import FOR_GPUS, text
from flax import nnx

from mllm.model import delta_net, weights
from mllm.model.architecture import FULL, LINEAR, Architecture
from mllm.model.decoder import Decoder
from mllm.model.delta_net import CHUNK, Rule, chunked, convolve, documents_of, empty_state, invert, recurrent
from mllm.model.layout import parameter_name
from mllm.parallel.mesh import AXES
from mllm.plan import targets
from mllm.plan.programs import Programs

FOLDER = tiny.FIXTURES / "qwen3_5"
EPSILON = float(np.finfo(np.float32).eps)


def segments_of(*lengths: int, padding: int = 0) -> jax.Array:
    return jnp.asarray(np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding]))[None]


def random_rule(segments: jax.Array, heads: int = 2, each: int = 2, slow: float = 1.0) -> Rule:
    """Operands for each token of the row; `slow` divides the decays."""
    rng, time = np.random.default_rng(len(segments[0])), segments.shape[1]
    draw = lambda *shape: jnp.asarray(rng.normal(size=(1, time, *shape)), jnp.float32)  # noqa: E731
    real = (segments != 0)[..., None, None]
    decay, beta = -jnp.exp(2 * draw(heads, each)) / slow * real, jax.nn.sigmoid(3 * draw(heads, each)) * real
    vectors = draw(heads, 6), draw(heads, 6), draw(heads, each, 5)
    return Rule(*vectors, decay=decay, beta=beta, documents=documents_of(segments))


def oracle(rule: Rule, memory: Any) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of the module's docstring for each token and head, in float64."""
    *operands, documents = (np.asarray(x) for x in rule)
    queries, keys, values, decay, beta = (x.astype(np.float64) for x in operands)
    memory, outputs = np.asarray(memory, np.float64).copy(), np.zeros(values.shape)
    for row, time, head, each in np.ndindex(decay.shape):
        state = memory[row, head, each]
        if time and documents[row, time] != documents[row, time - 1]:
            state[:] = 0
        key = keys[row, time, head] / np.sqrt(np.sum(keys[row, time, head] ** 2) + 1e-6)
        query = queries[row, time, head] / np.sqrt(np.sum(queries[row, time, head] ** 2) + 1e-6)
        state *= np.exp(decay[row, time, head, each])
        wrong = values[row, time, head, each] - key @ state
        state += np.outer(key, beta[row, time, head, each] * wrong)
        outputs[row, time, head, each] = query / np.sqrt(len(query)) @ state
    return outputs, memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "lengths", "each", "slow"),
    [
        (recurrent, (1, 20, 64), 4, 1),
        (chunked, (5,), 1, 1),
        (chunked, (64,), 2, 1e4),
        (chunked, (1, 20, 64, 3, 112), 2, 1e2),
    ],
)
def test_outputs_and_memory_match_the_float64_recurrence(run, lengths, each, slow, monkeypatch):
    """`slow` memories keep hundreds of tokens. An error is a few roundings of numbers up to the largest value."""
    monkeypatch.setattr(delta_net, "GROUP", 2)  # the longest row has two groups of chunks
    rule = random_rule(segments_of(*lengths, padding=7), each=each, slow=slow)
    memory = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, each, 6, 5)), jnp.float32)
    outputs, after = jax.jit(run)(rule, memory)
    expected, expected_after = oracle(rule, memory)
    scale = 100 * EPSILON * np.abs(expected_after).max()
    np.testing.assert_allclose(after, expected_after, rtol=0, atol=scale)
    real = sum(lengths)  # the outputs of padding are meaningless
    np.testing.assert_allclose(outputs[:, :real], expected[:, :real], rtol=0, atol=scale)


def test_the_system_of_alike_keys_is_solved_without_cancellation() -> None:
    """One token again and again, written whole: the powers of the matrix have numbers up to 10^18, its inverse 1."""
    inverse = invert(jnp.tril(jnp.ones((64, 64)), -1))
    np.testing.assert_array_equal(inverse, np.eye(64) - np.eye(64, k=-1))


def test_the_inverse_has_the_gradient_of_the_inverse() -> None:
    below = jnp.tril(jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)) / 8, jnp.float32), -1)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(64, 64)), jnp.float32)
    gradient = jax.grad(lambda x: jnp.sum(invert(x) * weight))(below)
    inverse = np.linalg.inv(np.eye(64) + np.float64(below))
    expected = np.tril(-inverse.T @ np.float64(weight) @ inverse.T, -1)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=64 * EPSILON * np.abs(expected).max())


def test_a_convolution_restarts_in_each_document_and_resumes() -> None:
    rng = np.random.default_rng(0)
    x, taps = rng.normal(size=(1, 9, 3)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    before = rng.normal(size=(1, 3, 3)).astype(np.float32)
    y, after = jax.jit(convolve)(x, taps, segments_of(4, 2, padding=3), before)
    first = np.concatenate([before[0], x[0, :4]])
    second = np.concatenate([np.zeros((3, 3)), x[0, 4:6]])
    expected = [np.sum(part[t : t + 4] * taps.T, 0) for part in (first, second) for t in range(len(part) - 3)]
    np.testing.assert_allclose(y[0, :6], expected, rtol=0, atol=8 * EPSILON * np.abs(x).max() * np.abs(taps).sum())
    np.testing.assert_array_equal(after[0], second[-3:])
    _, kept = jax.jit(convolve)(x, taps, jnp.zeros((1, 9), int), before)
    np.testing.assert_array_equal(kept, before)


def test_the_gradient_of_a_convolution_s_inputs_is_rounded_once() -> None:
    rng = np.random.default_rng(0)
    x, taps, slopes = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((1, 50, 64), (64, 4), (1, 50, 64)))
    before = jnp.zeros((1, 3, 64), jnp.bfloat16)
    total = lambda x: jnp.sum(convolve(x, taps, segments_of(50), before)[0] * slopes)  # noqa: E731
    expected, scale = np.zeros(x.shape), np.zeros(x.shape)
    for tap, ahead in enumerate((3, 2, 1, 0)):
        added = np.float64(slopes)[:, ahead:] * np.float64(taps)[:, tap]
        expected[:, : 50 - ahead] += added
        scale[:, : 50 - ahead] += np.abs(added)
    wrong = np.abs(np.float64(jax.grad(total)(x)) - expected)
    assert (wrong <= 2**-8 * np.abs(expected) + 8 * EPSILON * scale).all()


@cache
def made(*kinds: str) -> tuple[Architecture, nnx.State]:
    sizes = replace(weights.read_config(FOLDER), layer_types=kinds, num_hidden_layers=len(kinds), initializer_range=0.1)
    return sizes, nnx.state(Decoder(sizes, rngs=nnx.Rngs(0)))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(70, 70), pytest.param((64, 1, 200), marks=pytest.mark.nightly)])
def test_a_packed_row_matches_its_documents_alone(lengths: Sequence[int]) -> None:
    """The first row of one batch is packed; each other row has a document and padding."""
    sizes, params = made(LINEAR, FULL)
    graphdef = nnx.split(Decoder.abstract(sizes, dtype=jnp.float32))[0]
    total, rows = sum(lengths), [lengths, *((length,) for length in lengths)]
    documents = np.split(np.random.default_rng(0).integers(0, 96, total), np.cumsum(lengths)[:-1])
    tokens = jnp.stack([np.resize(x, total) for x in (np.concatenate(documents), *documents)])
    segments = jnp.concatenate([segments_of(*row, padding=total - sum(row)) for row in rows])
    positions = jnp.stack([np.resize(np.concatenate([np.arange(length) for length in row]), total) for row in rows])

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def run(params: nnx.State, is_learned: Any) -> tuple[jax.Array, jax.Array]:
        hidden = nnx.merge(graphdef, params).apply_layers(tokens, positions, segments)[0]
        return jnp.sum(jnp.sin(hidden) * (is_learned[:, None] & (segments != 0))[..., None]), hidden

    gradient, (together, *alone) = run(params, jnp.arange(len(rows)) == 0)
    apart = np.concatenate([hidden[:length] for hidden, length in zip(alone, lengths, strict=True)])
    np.testing.assert_allclose(together, apart, rtol=0, atol=1e-5)
    summed, leaves = run(params, jnp.arange(len(rows)) > 0)[0], jax.tree_util.tree_leaves_with_path(gradient)
    for (path, leaf), expected in zip(leaves, jax.tree.leaves(summed), strict=True):
        assert np.abs(expected).max() > 0 or parameter_name(path) in ("norm", "head")
        limit = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=limit, err_msg=parameter_name(path))


@pytest.mark.slow
def test_layers_share_no_masks_of_chunks() -> None:
    """Else XLA computes all masks before the loop over layers, and each use in a layer reads them from memory."""
    sizes, params = made(LINEAR, FULL, LINEAR, FULL)
    graphdef = nnx.split(Decoder.abstract(sizes, dtype=jnp.float32))[0]

    def total(params: nnx.State, tokens: Any) -> jax.Array:
        return jnp.sum(nnx.merge(graphdef, params)(tokens, tokens, tokens))

    program = text(jax.jit(jax.grad(total)).lower(params, jnp.ones((1, 130), int)).compile())
    loops = [arrays for arrays in re.findall(r" = (\(.*?\)) while\(", program) if "f32[2," in arrays]
    assert len(loops) >= 2, "a loop for each pass"
    assert not any(re.findall(rf"pred\[[\d,]+,{CHUNK},{CHUNK}\]", arrays) for arrays in loops)


@pytest.mark.slow
def test_tokens_go_on_from_the_state_of_a_row() -> None:
    sizes, params = made(LINEAR, FULL)
    layer = nnx.merge(
        nnx.split(Decoder.abstract(sizes, dtype=jnp.float32).delta)[0], jax.tree.map(lambda x: x[0], params["delta"])
    )
    x, ones = jnp.asarray(np.random.default_rng(0).normal(size=(2, 80, 32)), jnp.float32), jnp.ones((2, 80), int)
    none, add = empty_state(2, sizes.delta_net, jnp.float32), jax.jit(lambda *arguments: layer.add_delta(*arguments))
    same = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    whole, last = add(x, ones, none)
    padded, state = add(x, (jnp.arange(80) < jnp.asarray([[66], [71]])).astype(int), none)
    same(padded[0, :66], whole[0, :66])
    same(padded[1, :71], whole[1, :71])
    for token in range(66, 80):  # row 1 is 5 tokens ahead, and waits as padding at last
        at = jnp.minimum(jnp.asarray([token, token + 5]), 79)[:, None]
        given = jnp.take_along_axis(x, at[..., None], axis=1)
        added, state = add(given, jnp.asarray([[1], [int(token + 5 < 80)]]), state)
        same(added[0, 0], whole[0, token])
    jax.tree.map(same, state, last)


# products in a bfloat16 model


def gpu_precisions(run: Any, rule: Rule) -> dict[str, int]:
    """How many products a bfloat16 model has of each precision on a GPU."""
    precisions = delta_net.Precisions.of(jnp.bfloat16, "gpu")
    memory = jnp.zeros((1, 2, rule.decay.shape[-1], rule.keys.shape[-1], rule.values.shape[-1]))
    program = jax.make_jaxpr(partial(run, precisions=precisions))(rule, memory)
    return Counter(re.findall(r"precision=(\S+)", str(program)))


def test_a_gpu_inverts_in_float32_and_has_11_bits_in_other_products() -> None:
    """The inverse merges blocks five times, by two products each."""
    assert gpu_precisions(chunked, random_rule(segments_of(65))) == {"BF16_BF16_F32_X6": 10, "TF32_TF32_F32": 8}


def test_a_float32_model_and_a_cpu_have_exact_products() -> None:
    exact = delta_net.Precisions(jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    assert {delta_net.Precisions.of(jnp.float32, platform) for platform in ("cpu", "gpu", "tpu")} == {exact}
    assert delta_net.Precisions.of(jnp.bfloat16, "cpu") == exact
    assert delta_net.Precisions.of(jnp.bfloat16, "tpu") == exact._replace(products=jax.lax.Precision.HIGH)


class TestByTheGpuCompiler:
    pytestmark = FOR_GPUS

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_only_bfloat16_updates_multiply_on_matrix_units(self, dtype: str):
        mesh = targets.mesh("h100", (1, 1, 1), AXES)
        model = {"architecture": tiny.QWEN35, "dtype": dtype}
        program = targets.compiled(*Programs(tiny.config("sft", model=model), mesh).update(), mesh)
        wide = re.findall(r"= f32\S* dot\((.*)", text(program))
        algorithms = {match[1] if (match := re.search(r"algorithm=(\w+)", line)) else None for line in wide}
        expected = {"dot_tf32_tf32_f32", "dot_bf16_bf16_f32_x6"}
        assert algorithms >= expected if dtype == "bfloat16" else not algorithms & expected
        assert dtype == "float32" or not any("highest" in line and "algorithm" not in line for line in wide)
