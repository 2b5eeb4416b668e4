"""The kernels of the gated delta rule, interpreted: the recurrence in float64, gradients, devices, and where they run.

This command runs the kernels on a GPU:

    python -m pytest -m gpu tests/model/test_delta_kernel.py
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_program import FOR_GPUS, text
from flax import nnx
from test_delta_net import EPSILON, FOLDER, gpu_precisions, oracle, segments_of

from mllm.config import load as configs
from mllm.config.model import MeshConfig
from mllm.model import delta_kernel, delta_net, layer, weights
from mllm.model.architecture import DeltaNet
from mllm.model.decoder import Decoder
from mllm.model.delta_net import EXACT, Precisions, Rule, documents_of, empty_state, kernels_can_run
from mllm.model.layout import Layout
from mllm.parallel.mesh import AXES, make_mesh
from mllm.plan import targets
from mllm.plan.programs import Programs


def rule_of(segments, *, heads=2, each=1, sizes=(64, 64), slow=1.0, dtype=jnp.float32):
    """A rule, a memory before it, and slopes of the outputs and of the last memory; `slow` divides the decays."""
    rng, (rows, time) = np.random.default_rng(each), segments.shape
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    real = (segments != 0)[..., None, None]
    per_token = partial(draw, rows, time, heads)
    decay, beta = -jnp.exp(2 * per_token(each)) / slow * real, jax.nn.sigmoid(3 * per_token(each)) * real
    vectors = (per_token(*size).astype(dtype) for size in ((sizes[0],), (sizes[0],), (each, sizes[1])))
    memory, slope = (draw(rows, heads, each, *sizes) for _ in range(2))
    return Rule(*vectors, decay, beta, documents_of(segments)), memory, (per_token(each, sizes[1]), slope)


def differentiated(run, rule, memory, slopes):
    """The results of a run, then their gradients for the operands and the memory."""

    @jax.jit
    def program(operands, memory):
        results, pull = jax.vjp(lambda operands, memory: run(Rule(*operands, rule.documents), memory), operands, memory)
        return results, pull(slopes)

    return [np.float64(x) for x in jax.tree.leaves(program(tuple(rule[:5]), memory))]


CASES = {
    "documents end in chunks and between them": (segments_of(1, 63, 40, 3, padding=11), {"each": 2}),
    "a document of three chunks, another size of values": (segments_of(160), {"sizes": (64, 128), "slow": 1e2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_match_the_recurrence(case):
    """Gradients are compared with the gradients of `delta_net.recurrent`, in float32."""
    segments, options = CASES[case]
    rule, memory, slopes = rule_of(segments, **options)
    slopes = slopes[0] * (segments != 0)[..., None, None, None], slopes[1]
    got = differentiated(partial(delta_kernel.chunked, precisions=EXACT, interpret=True), rule, memory, slopes)
    expected = differentiated(delta_net.recurrent, rule, memory, slopes)
    real = int((segments != 0).sum())  # the outputs of padding are meaningless
    got[0], expected[0] = got[0][:, :real], oracle(rule, memory)[0][:, :real]
    expected[1] = oracle(rule, memory)[1]
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=400 * EPSILON * np.abs(y).max())


def test_sums_of_decays_are_in_float32_like_the_inverse():
    """The inverse: ten products, as in test_delta_net.py."""
    run, rule = partial(delta_kernel.chunked, interpret=True), rule_of(segments_of(65))[0]
    assert gpu_precisions(run, rule) == {"BF16_BF16_F32_X6": 11, "TF32_TF32_F32": 8}


def add_delta(mesh, own_kernels=True):
    """A layer's result for 4 rows and its state, with the kernels interpreted where they are allowed."""
    sizes = replace(weights.read_config(FOLDER), linear_key_head_dim=64, linear_value_head_dim=64)
    layout = Layout(make_mesh(MeshConfig(**mesh)))
    graph, params = nnx.split(Decoder(sizes, rngs=nnx.Rngs(0), dtype=jnp.float32, layout=layout).delta)
    one = nnx.merge(graph, jax.tree.map(lambda x: x[0], params))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 70, sizes.hidden_size)), jnp.float32)
    segments = jnp.where(jnp.arange(70) < 66, 1 + (jnp.arange(70) > 20), 0) * jnp.ones((4, 1), int)
    none = empty_state(4, sizes.delta_net, jnp.float32)
    return jax.jit(lambda *given: one.add_delta(*given, layout, own_kernels))(x, segments, none)


@pytest.mark.slow
def test_devices_take_their_rows_and_heads(monkeypatch):
    used = []
    monkeypatch.setattr(layer, "kernels_can_run", lambda *given: used.append(given) or True)
    expected = add_delta({"fsdp": 1}, own_kernels=False)
    assert not used
    for mesh in ({"fsdp": 1}, {"dp": 2, "fsdp": 2, "tp": 2}):
        got = add_delta(mesh)
        assert used.pop()[1] == jnp.float32
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_decoder_tells_its_delta_nets_whether_kernels_are_allowed(allowed, monkeypatch):
    asked = []
    monkeypatch.setattr(layer, "kernels_can_run", lambda *given: asked.append(given))
    model = Decoder(weights.read_config(FOLDER), rngs=nnx.Rngs(0), dtype=jnp.float32, own_kernels=allowed)
    tokens = jnp.ones((1, 20), int)
    jax.eval_shape(lambda tokens: model.apply_layers(tokens, tokens, tokens)[0], tokens)
    assert bool(asked) == allowed


NET = DeltaNet(key_heads=16, value_heads=16, key_dim=128, value_dim=128, taps=4)


@pytest.mark.parametrize(
    ("change", "dtype", "fit"),
    [
        ({}, "bfloat16", True),
        ({"key_dim": 64}, "bfloat16", True),
        ({"value_dim": 32}, "bfloat16", False),
        ({}, "float32", False),
    ],
)
def test_kernels_run_on_hopper_gpus_in_bfloat16(change, dtype, fit, monkeypatch):
    mesh, net = make_mesh(MeshConfig(fsdp=1)), NET._replace(**change)
    assert not kernels_can_run(net, jnp.dtype(dtype), mesh), "the mesh has CPUs"
    monkeypatch.setattr(delta_net, "why_not_hopper", lambda mesh: None)
    assert kernels_can_run(net, jnp.dtype(dtype), mesh) == fit
    assert not kernels_can_run(net, jnp.dtype(dtype), None)


@pytest.mark.gpu
@pytest.mark.skipif("jax.default_backend() != 'gpu' or target.why_not_hopper()", reason="needs a Hopper GPU")
@pytest.mark.parametrize("each", [1, 2])
def test_the_kernels_give_the_same_numbers_on_a_gpu(each):
    """Beside XLA's products of the same precision; only a GPU can show a race, so the same bits again and again."""
    segments = jnp.concatenate([segments_of(300, 200, padding=12), segments_of(512)])
    rule, memory, slopes = rule_of(segments, heads=16, each=each, sizes=(128, 128), slow=1e2, dtype=jnp.bfloat16)
    slopes = slopes[0] * (segments != 0)[..., None, None, None], slopes[1]
    precisions = Precisions.of(jnp.bfloat16, "gpu")
    run = partial(delta_kernel.chunked, precisions=precisions)
    first = differentiated(run, rule, memory, slopes)
    expected = differentiated(partial(delta_net.chunked, precisions=precisions), rule, memory, slopes)
    first[0] = first[0] * np.asarray(segments != 0)[..., None, None, None]
    expected[0] = expected[0] * np.asarray(segments != 0)[..., None, None, None]
    for x, y in zip(first, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-7 * np.abs(y).max())  # gradients are bfloat16
    for _ in range(20):
        for x, y in zip(first[1:], differentiated(run, rule, memory, slopes)[1:], strict=True):
            np.testing.assert_array_equal(x, y)


class TestByTheGpuCompiler:
    pytestmark = FOR_GPUS

    def test_an_update_of_qwen35_has_five_kernels_a_delta_net(self):
        mesh = targets.mesh("h100:8", (1, 4, 2), AXES)
        options = ["mesh.fsdp=4", "mesh.tp=2", "data.max_length=1024", "batch_size=4", "model.remat=full"]
        program = targets.compiled(*Programs(configs.load("qwen35_0p8b_sft.yaml", options), mesh).update(), mesh)
        names = set(re.findall(r"/delta_(\w+)/pallas_call", text(program)))
        assert names == {"prepare", "advance", "memories_gradient", "chunks_gradient", "operands_gradient"}
