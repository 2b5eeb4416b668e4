"""Splash attention and cuDNN's against XLA's: conventions on the CPU, lowered for their devices, chosen where they run.

On the CPU splash attention is interpreted, and XLA computes in cuDNN's place with the same arguments.
"""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from tiny import ARCHITECTURE, config, forward_of, random_batch

from mllm.config.model import MeshConfig
from mllm.model import attention, load
from mllm.model.attention import Attention, AttentionChoice, choose
from mllm.model.decoder import masked_attention
from mllm.model.load import load_policy
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import make_mesh, sharding
from mllm.plan import targets

ONE = MeshConfig(fsdp=1)
EIGHT = MeshConfig(dp=2, fsdp=2, tp=2)
FOUR = MeshConfig(fsdp=1, tp=4)
HEADS_OF_64 = {**ARCHITECTURE, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


def segments_of(rows, time):
    """Row 0: padding at the left and two documents. The other rows: three documents and padding at the right."""
    place = np.arange(time)
    first = (place >= 10).astype(np.int32) + (place >= time // 2)
    others = np.where(place < time - 15, 1 + (place >= 20).astype(np.int32) + (place >= 70), 0)
    return jnp.asarray(np.stack([first] + [others] * (rows - 1)))


def inputs_of(rows, time, heads, kv_heads, head_dim, dtype):
    """Queries, keys, values and the weights of the outputs in the sum that is differentiated."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, time, size, head_dim) for size in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def differentiated(attend, queries, keys, values, weights):
    """The outputs, and the gradients of their weighted sum for queries, keys and values, as float32."""

    @jax.jit
    def run(queries, keys, values):
        out, pullback = jax.vjp(attend, queries, keys, values)
        return out, *pullback(weights.astype(out.dtype))

    return [np.asarray(x, np.float32) for x in run(queries, keys, values)]


def one_document_of(rows, time):
    """Each row begins with its only document, and ends with padding of another length."""
    return jnp.asarray(np.arange(time) < time - 10 * np.arange(rows)[:, None]).astype(jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "mesh", "packed", "sizes", "tolerance"),
    [
        ("splash", ONE, True, (2, 200, 2, 1, 128, jnp.bfloat16), 1e-2),  # two blocks, and a length that none divides
        ("cudnn", EIGHT, True, (8, 101, 4, 2, 64, jnp.bfloat16), 2e-2),
        ("cudnn", ONE, False, (3, 100, 4, 2, 64, jnp.float32), 1e-5),  # no mask: one document, and padding behind it
    ],
)
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.nightly), 20])
def test_a_kernel_matches_masked_attention(kernel, mesh, packed, sizes, tolerance, window, monkeypatch):
    monkeypatch.setattr(attention, "BLOCKS", (128,))
    # A model with sliding layers has both kinds.
    check_against_masked(Attention(kernel, make_mesh(mesh), packed, window=20), sizes, tolerance, window)


def check_against_masked(attend, sizes, tolerance, window=None):
    """`sizes`: rows, time, heads, heads of keys and values, their size, dtype."""
    window = jnp.int32(sizes[1] if window is None else window)
    segments = (segments_of if attend.packed else one_document_of)(*sizes[:2])
    *inputs, weights = inputs_of(*sizes)
    weights *= (segments != 0)[:, :, None, None]  # the outputs of padding are never used
    got = differentiated(lambda *qkv: attend(*qkv, segments, window), *inputs, weights)
    exact = [x.astype(jnp.float32) for x in inputs]
    expected = differentiated(lambda *qkv: masked_attention(*qkv, segments, window), *exact, weights)
    got[0], expected[0] = (out[segments != 0] for out in (got[0], expected[0]))
    for name, x, y in zip(("out", "queries", "keys", "values"), got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=name)


def train_gradient(mesh, **model):
    """The gradient of a small batch's loss, jitted, and its abstract arguments with their shardings."""
    model = {"architecture": HEADS_OF_64, "dtype": "bfloat16", "remat": "full", **model}
    settings = config("sft", model=model)
    policy = load_policy(settings, mesh)
    forward = forward_of(policy.graphdef, mesh, settings)
    layout = sharding(mesh, ("batch", "time"))
    rows = random_batch(8, 128)._replace(inputs=None)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), rows)
    return jax.jit(jax.grad(lambda params, batch: forward.loss(params, batch)[0])), (policy.params, batch)


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
@pytest.mark.parametrize(
    ("dtype", "configured"), [("bfloat16", "highest"), pytest.param("float32", None, marks=pytest.mark.nightly)]
)
def test_the_update_compiles_for_tpus_at_any_precision(dtype, configured):
    mesh = targets.mesh("v5e:2x4", (1, 1, 1), ("dp", "fsdp", "tp"))
    with jax.default_matmul_precision(configured):
        program = targets.compiled(*train_gradient(mesh, dtype=dtype), mesh)
    text = program.as_text()
    assert "splash_mha_dkv_segmented" in text
    assert "[8,128,2,64]" in text
    assert "[8,128,2,32]" not in text  # halves of heads


SMALL = PRESETS["Qwen/Qwen2.5-0.5B"]  # 14 heads of 64, 2 of them for keys and values


def chosen(setting=None, architecture=SMALL, mesh=ONE, dtype="bfloat16", packed=False):
    return choose(setting, architecture, make_mesh(mesh), dtype, packed)


@pytest.fixture
def on(monkeypatch):
    """`on("tpu")`, `on("gpu")` or `on("hopper")`: then the devices report this kind, and JAX finds cuDNN."""

    def pretend(kind):
        monkeypatch.setattr(attention, "platform", lambda mesh: "gpu" if kind == "hopper" else kind)
        monkeypatch.setattr(attention, "why_not_hopper", lambda mesh: None if kind == "hopper" else "another")
        # No public function says which version there is.
        monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    return pretend


@pytest.mark.parametrize(
    ("kind", "packed", "head_dim", "kernel"),
    [
        ("tpu", True, 64, "splash"),
        ("tpu", False, 64, "splash"),
        ("gpu", True, 64, "cudnn"),
        ("gpu", False, 64, "cudnn"),
        ("hopper", True, 64, "mosaic_gpu"),
        ("hopper", False, 64, "cudnn"),
        ("hopper", False, 256, "mosaic_gpu"),
    ],
)
def test_the_device_s_kernel_is_chosen_unless_xla_is_asked_for(kind, packed, head_dim, kernel, on):
    on(kind)
    sizes = dataclasses.replace(SMALL, head_dim=head_dim)
    assert chosen(architecture=sizes, mesh=EIGHT, packed=packed) == (Attention(kernel, make_mesh(EIGHT), packed), "")
    assert chosen("xla", mesh=EIGHT) == (None, "model.attention asks for it")
    sliding = dataclasses.replace(sizes, sliding_window=20, layer_types=("sliding_attention", "full_attention") * 12)
    assert chosen(architecture=sliding, packed=packed).attention == Attention(kernel, make_mesh(ONE), packed, window=20)


def test_attention_is_told_whether_rows_are_packed(monkeypatch):
    packed = []
    monkeypatch.setattr(load, "choose", lambda *arguments: packed.append(arguments[-1]) or AttentionChoice(None, ""))
    for settings in (config("grpo"), config("sft"), config("sft", data={"packing": False})):
        load.load_policy(settings, make_mesh(settings.mesh))
    assert packed == [True, True, False]


@pytest.mark.parametrize(
    ("kernel", "change", "setting", "reason"),
    [
        ("splash", {"head_dim": 32}, {}, "it needs heads of size 64, 128 or 256, and the model's have 32"),
        ("splash", {}, {"mesh": FOUR}, "mesh.tp = 4 does not divide the model's 2 kv_heads"),
        ("cudnn", {"head_dim": 256}, {}, "it needs heads of size 64 or 128, and the model's have 256"),
        ("mosaic_gpu", {"head_dim": 96}, {"packed": True}, "it needs heads of size 64, 128 or 256"),
        ("mosaic_gpu", {}, {"packed": True, "dtype": "float32"}, "it computes in bfloat16, and model.dtype is float32"),
        ("cudnn", {}, {"dtype": "float32"}, "it computes in bfloat16, and model.dtype is float32"),
    ],
)
def test_xla_is_chosen_where_a_kernel_can_not_run(kernel, change, setting, reason, on):
    on({"splash": "tpu", "cudnn": "gpu", "mosaic_gpu": "hopper"}[kernel])
    choice = chosen(architecture=dataclasses.replace(SMALL, **change), **setting)
    assert choice.attention is None
    assert choice.reason.startswith(f"{kernel} can't be used: {reason}")


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one document"])
def test_a_plan_for_gpus_that_are_not_here(packed, on, monkeypatch):
    on("hopper")
    mesh = make_mesh(ONE)
    monkeypatch.setattr(jax, "devices", list)
    planned = choose(None, SMALL, mesh, "bfloat16", packed)
    reason = "cudnn can't be used: cuDNN picks its kernel on the GPU, which is not here"
    assert planned == ((Attention("mosaic_gpu", mesh, True), "") if packed else (None, reason))


@pytest.mark.gpu
@pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs a GPU")
@pytest.mark.parametrize("time", [100, 192, 256])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one document"])
def test_cudnn_matches_masked_attention_on_gpus(packed, time):
    check_against_masked(Attention("cudnn", make_mesh(ONE), packed), (2, time, 14, 2, 64, jnp.bfloat16), 2e-2)
