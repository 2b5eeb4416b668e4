"""What devices hold and exchange in the programs of a rollout and of the log-prob pass, by their compiled text."""

import math

import jax
import jax.numpy as jnp
import pytest
from compiled_program import arrays, exchanged, text
from tiny import ARCHITECTURE, config, random_batch

from kernels.lm_head import xla
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, sharding
from mllm.rl import rollout
from mllm.rl.rollout import DecodeInputs, decode, decoding_weights, generate, prefill
from mllm.train.step import make_logprob_pass

HIDDEN, ROWS, PROMPT, LIMIT = ARCHITECTURE["hidden_size"], 8, 16, 12
SETTINGS = config(
    mesh={"fsdp": 4, "tp": 2},
    grpo={"num_generations": 4, "beta": 0.1, "reference": "initial"},
    rollout={"max_prompt_length": PROMPT, "max_completion_length": LIMIT},
)
KV_HEADS, HEAD_DIM = ARCHITECTURE["num_key_value_heads"], HIDDEN // ARCHITECTURE["num_attention_heads"]


@pytest.fixture(scope="module")
def policy():
    return load_policy(SETTINGS, make_mesh(SETTINGS.mesh))


@pytest.fixture(scope="module")
def gathering(policy):
    return decoding_weights.lower(policy.graphdef, policy.params).compile()


def lie(leaf, layout):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)


@pytest.fixture(scope="module")
def asked(policy, gathering):
    """Weights, prompts, and what draws their tokens."""
    rows = sharding(make_mesh(SETTINGS.mesh), ("batch",))
    prompts, of_rows = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows) for shape in ((ROWS, PROMPT), (ROWS,)))
    weights = jax.tree.map(lie, policy.params, gathering.output_shardings)
    return weights, prompts, DecodeInputs(of_rows, of_rows, jnp.array([1]), 0, 0, 0)


HOW = {"options": SETTINGS.rollout, "greedy": False}


@pytest.fixture(scope="module")
def prefilling(policy, asked):
    return prefill.lower(policy.graphdef, *asked, **HOW).compile()


@pytest.fixture(scope="module")
def decoding(policy, asked, prefilling):
    weights, _, inputs = asked
    state = jax.tree.map(lie, prefilling.out_info, prefilling.output_shardings)
    return decode.lower(policy.graphdef, weights, state, inputs, LIMIT, **HOW).compile()


def test_gathering_for_a_rollout_leaves_parameters_divided_over_tp_alone(policy, gathering):
    axes = {axis for layout in jax.tree.leaves(gathering.output_shardings) for axis in layout.spec}
    assert axes == {"tp", None}
    assert {array.kind for array in exchanged(gathering)} == {"all-gather"}
    assert len(exchanged(gathering)) == len(jax.tree.leaves(policy.params)) - 3  # q_bias, k_bias, v_bias have no fsdp


def test_a_rollout_gathers_no_parameters(prefilling, decoding):
    for program in (prefilling, decoding):
        gathered = [array.shape for array in exchanged(program) if array.kind == "all-gather"]
        assert not [shape for shape in gathered if HIDDEN in shape]


def test_a_rollout_adds_up_its_own_rows_over_tp_and_exchanges_no_keys_or_values(prefilling, decoding):
    for program, tokens in ((prefilling, PROMPT), (decoding, 1)):
        added = {array.shape for array in exchanged(program) if array.shape[-1] == HIDDEN}
        assert added == {(ROWS // 4, tokens, HIDDEN)}
        assert not [array for array in exchanged(program) if HEAD_DIM in array.shape]


def test_a_device_has_its_own_rows_and_heads_of_the_cache(prefilling, decoding):
    slots = PROMPT + LIMIT
    for program in (prefilling, decoding):
        caches = {array.shape for array in arrays(text(program)) if len(array.shape) == 5 and slots in array.shape}
        assert (ARCHITECTURE["num_hidden_layers"], ROWS // 4, slots, KV_HEADS // 2, HEAD_DIM) in caches
        assert not [shape for shape in caches if ROWS in shape[1:2]]


def test_a_turn_of_the_loop_takes_the_place_of_the_one_before(decoding):
    """So the program is compiled once, and there is no second cache."""
    before, after = decoding.input_shardings[0][1], decoding.output_shardings
    carried = 0
    for info, one, other in zip(*map(jax.tree.leaves, (decoding.out_info, before, after)), strict=True):
        assert one.is_equivalent_to(other, len(info.shape))
        carried += math.prod(other.shard_shape(info.shape)) * info.dtype.itemsize
    assert decoding.memory_analysis().alias_size_in_bytes == carried


def test_a_rollout_of_many_slices_gathers_once(policy, monkeypatch):
    gathered = []

    def counted(*arguments):
        gathered.append(1)
        return decoding_weights(*arguments)

    monkeypatch.setattr(rollout, "decoding_weights", counted)
    params = jax.tree.map(lambda leaf: jax.device_put(jnp.zeros(leaf.shape), leaf.sharding), policy.params)
    options = SETTINGS.rollout.model_copy(update={"batch_size": 5})  # in rows for 4 devices: 8
    ending = {"stop_ids": (1,), "pad_id": 0, "seed": 0, "step": 0}
    assert len(generate(policy.graphdef, params, [[5] * PROMPT] * 9, options=options, **ending).tokens) == 9
    assert len(gathered) == 1


def log_prob_program(policy):
    mesh = make_mesh(SETTINGS.mesh)
    logprob_pass = make_logprob_pass(policy.graphdef, SETTINGS, mesh)
    return logprob_pass.lower(policy.params, random_batch(ROWS, PROMPT)).compile()


def test_the_log_prob_pass_is_forward_only_by_the_head_s_pass_of_one_product(policy, monkeypatch):
    called = []
    for name in ("statistics", "forward", "gradients", "loss_and_gradients"):
        own = getattr(xla, name)
        monkeypatch.setattr(xla, name, lambda *given, name=name, own=own: called.append(name) or own(*given))
    log_prob_program(policy)
    assert called == ["statistics"]


def test_the_log_prob_pass_divides_the_rows(policy):
    program = log_prob_program(policy)
    shapes = {array.shape for array in arrays(text(program))}
    assert (ROWS // 4, PROMPT, HIDDEN) in shapes
    assert (ROWS, PROMPT, HIDDEN) not in shapes
    rows = sharding(make_mesh(SETTINGS.mesh), ("batch",))
    assert program.output_shardings.is_equivalent_to(rows, 2)
