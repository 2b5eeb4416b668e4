"""The arrays and exchanges of devices: one table of axes, and the compiled programs of a rollout and a log-prob pass.

Every mesh gives the loss, gradients and log-probabilities of one device, to rounding, and its compute copies' bits;
each has a model of another family. Rollouts on a mesh: tests/sampler/test_rollout.py.
"""

import math
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_program import exchanged
from flax import nnx
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options
from runs import changed
from tiny import ARCHITECTURE, config, forward_of, random_batch

import train
from lm_head import xla
from mllm.config import load as configs
from mllm.config.model import MeshConfig
from mllm.errors import UserError
from mllm.model.layout import Layout, gather_layer_float32
from mllm.model.load import load_policy
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import bytes_on_device, claim_gpu_memory, make_mesh, shard_batch, sharding
from mllm.plan.programs import Programs, RolloutPrograms
from mllm.sampler.decoding import decoding_weights
from mllm.sampler.pages import page_size
from mllm.sampler.schedule import LOGITS, MEAN_LENGTH
from mllm.sampler.slots import CHUNK, insert, resize
from mllm.training import decode_limits
from mllm.training.step import accumulate, make_logprob_pass

SIZES = PRESETS["Qwen/Qwen2.5-3B"]


def test_a_mesh_that_leaves_devices_unused_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"mesh: dp \* fsdp \* tp = 4, but the 2 processes have 8 devices"):
        make_mesh(MeshConfig(dp=2, fsdp=1, tp=2))


@pytest.mark.parametrize(
    ("given", "share"),
    [({}, 0.9), ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 0.5), ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, 0.6)],
)
def test_jax_may_use_most_of_a_gpu_or_the_share_that_is_given(given, share, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    claim_gpu_memory()
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == share


@pytest.mark.parametrize("start", ["train", "--plan", "from Python"])
def test_gpu_memory_is_claimed_before_a_device_is_used(start, monkeypatch):
    def claim():
        raise UserError("claimed")

    monkeypatch.setattr("mllm.parallel.mesh.claim_gpu_memory", claim)
    monkeypatch.setattr(jax, "device_count", lambda: pytest.fail("a device was used"))
    if start == "from Python":
        with pytest.raises(UserError, match="claimed"):
            train.train(configs.load("tiny_sft.yaml"))
    else:
        assert train.main(["--config", "tiny_sft.yaml", *[start] * (start == "--plan")]) == 2


@pytest.mark.parametrize(
    ("axes", "change", "message"),
    [
        ({"tp": 8}, {"vocab_size": 260}, "mesh.tp: 8 does not divide the model's vocab_size of 260; .* works is 4"),
        ({"tp": 3}, {"intermediate_size": 36}, "mesh.tp: 3 does not .* num_attention_heads of 16; .* works is 2"),
        ({"fsdp": 8}, {"hidden_size": 36}, "mesh.fsdp: 8 does not divide the model's hidden_size of 36; .* works is 6"),
    ],
)
def test_an_indivisible_size_is_refused_with_the_nearest_fit(axes, change, message):
    with pytest.raises(UserError, match=message):
        Layout.of(make_mesh(MeshConfig(**{"fsdp": 1, **axes})), replace(SIZES, **change))


@pytest.mark.parametrize(("tp", "axis"), [(2, "tp"), (4, None)])
def test_kv_heads_are_whole_where_tp_does_not_divide_them(tp, axis):
    assert SIZES.num_key_value_heads == 2
    layout = Layout.of(make_mesh(MeshConfig(fsdp=1, tp=tp)), SIZES)
    assert layout.sharding(("kv_heads", "head_dim")).spec[0] == axis


HIDDEN, ROWS, PROMPT, LIMIT = ARCHITECTURE["hidden_size"], 16, 16, 12
SETTINGS = config(
    batch_size=ROWS,
    mesh={"fsdp": 4, "tp": 2},
    grpo={"num_generations": 4, "beta": 0.1, "reference": "initial"},
    rollout={"max_prompt_length": PROMPT, "max_completion_length": LIMIT},
)
MOST = SETTINGS.rollout.total_length
PAGE = page_size(MOST)
KV_HEADS, HEAD_DIM = ARCHITECTURE["num_key_value_heads"], HIDDEN // ARCHITECTURE["num_attention_heads"]


@pytest.fixture(scope="module")
def policy():
    return load_policy(SETTINGS, make_mesh(SETTINGS.mesh))


@pytest.fixture(scope="module")
def programs(policy):
    """The compiled programs of a rollout."""
    shapes = RolloutPrograms(Programs(SETTINGS, make_mesh(SETTINGS.mesh)), SETTINGS.rollout)
    layout, layer = shapes.model.layout, shapes.cache()[0]
    per_row, places = (layout.abstract(shape, jnp.int32, ("batch",)) for shape in ((ROWS,), (ROWS, 2)))
    per_page = layout.abstract(shapes.cache()[0].keys.shape[:1], jnp.int32, ("batch",))
    called = {
        "insert": insert.lower(layer, shapes.prefilled().cache[0], per_row, places, layout=layout),
        "resize": resize.lower(layer, per_page, layout=layout),
        **{name: getattr(shapes, name)()[0].lower(*getattr(shapes, name)()[1]) for name in ("prefill", "decode")},
    }
    return SimpleNamespace(**{name: lowered.compile() for name, lowered in called.items()})


@pytest.mark.parametrize("name", ["prefill", "decode", "insert", "resize"])
def test_devices_exchange_no_keys_or_values(programs, name):
    shapes = {array.shape for array in exchanged(getattr(programs, name)) if len(array.shape) == 4}
    assert not [shape for shape in shapes if shape[1] <= KV_HEADS and shape[3] == HEAD_DIM]


def test_a_chunk_s_tail_reuses_the_memory_of_the_last_tail(programs):
    """The program is thus compiled once. Each device holds its own slots and heads, and its own pages of the cache."""
    for info, one in zip(
        *map(jax.tree.leaves, (programs.decode.in_avals[0][3], programs.decode.input_shardings[0][3])), strict=True
    ):
        assert one.shard_shape(info.shape) == (ROWS // 4 * -(-MOST // PAGE), KV_HEADS // 2, PAGE, HEAD_DIM)
    before, after = programs.decode.input_shardings[0][1], programs.decode.output_shardings[2]
    carried = 0
    for info, one, other in zip(*map(jax.tree.leaves, (programs.decode.out_info[2], before, after)), strict=True):
        assert one.is_equivalent_to(other, len(info.shape))
        assert other.shard_shape(info.shape) == (ROWS // 4, KV_HEADS // 2, CHUNK, HEAD_DIM)
        carried += math.prod(other.shard_shape(info.shape)) * info.dtype.itemsize
    assert programs.decode.memory_analysis().alias_size_in_bytes == carried


def test_decode_room_is_the_memory_that_training_leaves(policy, monkeypatch):
    """Evaluation alone may need more slots than there is room for, so they never depend on the number of prompts."""
    fitting_room = partial(decode_limits.fitting_limits, policy, SETTINGS.rollout, SETTINGS.optimizer, True)
    least, most = (fitting_room(memory) for memory in (2**20, 2**30))
    assert least.slots == 4  # one for each device that has rows of its own, with its tokens
    assert least.tokens >= 4 * MOST
    evaluated = changed(SETTINGS, rollout={"max_slots": most.slots}, eval={}, task={"heldout": 16})
    shapes = RolloutPrograms(Programs(evaluated, make_mesh(SETTINGS.mesh)), evaluated.rollout)
    assert shapes.slots == 16
    token = bytes_on_device(shapes.cache()) / (16 / 4) / (-(-MOST // PAGE) * PAGE)
    assert 0.7 * 2**30 < most.tokens / 4 * token + most.slots / 4 * (LOGITS * 4 * 260 / 2 + CHUNK * token) < 2**30
    assert most.tokens / most.slots == pytest.approx(MEAN_LENGTH * MOST, rel=0.01)
    monkeypatch.setattr(decode_limits, "gather_objects", lambda own: [own, 2**28, 2**30])  # of three processes
    assert fitting_room(None) == fitting_room(2**28)


@pytest.mark.slow
def test_the_log_prob_pass_keeps_rows_and_runs_forward_only(policy, monkeypatch):
    called = []
    for name in ("forward", "gradients", "loss_and_gradients"):
        own = getattr(xla, name)
        monkeypatch.setattr(xla, name, lambda *given, name=name, own=own: called.append(name) or own(*given))
    mesh = make_mesh(SETTINGS.mesh)
    logprob_pass = make_logprob_pass(forward_of(policy.graphdef, mesh, SETTINGS))
    program = logprob_pass.lower(policy.params, random_batch(ROWS, PROMPT)).compile()
    assert called == ["forward"]
    assert program.output_shardings.is_equivalent_to(sharding(mesh, ("batch",)), 2)


# Results

MODEL = {**ARCHITECTURE, "vocab_size": 264, "num_attention_heads": 8, "initializer_range": 0.2, "head_dim": 4}
"""With 2 heads of keys and values, which tp = 8 does not divide."""
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
DELTA |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
GRPO = {"num_iterations": 2, "beta": 0.1, "reference": "initial", "entropy_coef": 0.01}


def make_settings(family, shape):
    mesh, model = dict(zip(("dp", "fsdp", "tp"), shape, strict=True)), {"architecture": {**MODEL, "model_type": family}}
    if family == "qwen3_5_text":
        model["architecture"] |= DELTA
    return config(model=model, mesh=mesh, batch_size=ROWS, micro_batch_size=ROWS // 2, grpo=GRPO)


@cache
def initial(family):
    """The parameters, on one device."""
    settings = make_settings(family, (1, 1, 1))
    return load_policy(settings, make_mesh(settings.mesh)).initial_params()


def compute_results(family, shape):
    """Loss and gradients of a step in two micro-batches, and log-probabilities."""
    settings = make_settings(family, shape)
    mesh = make_mesh(settings.mesh)
    policy = load_policy(settings, mesh)
    params = jax.device_put(initial(family), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    forward, batch = forward_of(policy.graphdef, mesh, settings), random_batch(ROWS, PROMPT)
    gradients = jax.jit(lambda params, batch: accumulate(forward.loss, params, batch, ROWS // 2))
    loss, _, gradient = gradients(params, shard_batch(mesh, batch))
    return jax.device_get((loss, gradient, make_logprob_pass(forward)(params, batch)))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param("qwen3", (2, 2, 2), marks=pytest.mark.slow),
        pytest.param("qwen2", (1, 1, 8), marks=pytest.mark.nightly),
        pytest.param("qwen3_5_text", (1, 2, 4), marks=pytest.mark.nightly),
    ],
)
def test_loss_gradients_and_log_probs_match_one_device(family, shape):
    """All axes at once, and tp as far as it goes. dp or fsdp alone exchanges nothing beyond the first case."""
    loss, gradients, logprobs = compute_results(family, shape)
    expected_loss, expected, expected_logprobs = compute_results(family, (1, 1, 1))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    near = 1e-4 if family == "qwen3_5_text" else 2e-5  # delta nets: 4e-5 seen
    for leaf, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=near * np.abs(other).max())
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-5)


def compute_copies(shape):
    """The matrices that sampler and trainer multiply, from masters between bfloat16's numbers."""
    settings = make_settings("qwen3", shape)
    settings = changed(settings, model=settings.model.model_dump() | {"dtype": "bfloat16"})
    policy = load_policy(settings, mesh := make_mesh(settings.mesh))
    params = jax.device_put(initial("qwen3"), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    assert len(params["embed"][...].sharding.device_set) == mesh.size

    @jax.jit
    def of_trainer(params):
        model = nnx.merge(policy.graphdef, params)
        layers = [jax.tree.map(itemgetter(index), params["layers"]) for index in range(2)]
        layers = [
            gather_layer_float32(x, model.rounding, model.layout, jnp.asarray(i), "layers")
            for i, x in enumerate(layers)
        ]
        embedded = model.look_up(jnp.arange(264).reshape(2, -1)).reshape(264, -1)
        return layers, embedded, model.head_copy(model.head_weight)

    return jax.tree.map(np.asarray, (decoding_weights(policy.graphdef, params), of_trainer(params)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [pytest.param((1, 8, 1), marks=pytest.mark.nightly), (2, 2, 2)])
def test_compute_copies_match_one_device_to_the_bit(shape):
    """The sampler and the trainer have copies."""
    sampler, (layers, embedded, head) = expected = compute_copies((1, 1, 1))
    of_both = (layers, embedded, head), (sampler.layers["layers"], *[sampler.outer["embed"][...]] * 2)
    for one, other in ((compute_copies(shape), expected), of_both):
        for leaf, same in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(np.float32(leaf), np.float32(same))
    assert (np.float32(head) != initial("qwen3")["embed"][...].astype(jnp.bfloat16)).mean() > 0.2
