"""What devices hold and exchange in the programs of a rollout and of the log-prob pass, by their compiled text."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_program import arrays, exchanged, text
from tiny import ARCHITECTURE, config, random_batch

from kernels.lm_head import xla
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, sharding
from mllm.rl import rollout
from mllm.rl.rollout import Completions, DecodeInputs, decode, decoding_weights, generate, prefill
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
def programs(policy):
    """The compiled programs of a rollout: `gather` makes decoding weights, `prefill` and `decode` read them."""

    def placed(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    rows = sharding(make_mesh(SETTINGS.mesh), ("batch",))
    prompts, per_row = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows) for shape in ((ROWS, PROMPT), (ROWS,)))
    inputs = DecodeInputs(per_row, per_row, jnp.array([1]), 0, 0, 0)
    options = {"options": SETTINGS.rollout, "greedy": False}

    gather = decoding_weights.lower(policy.graphdef, policy.params).compile()
    weights = jax.tree.map(placed, policy.params, gather.output_shardings)
    first = prefill.lower(policy.graphdef, weights, prompts, inputs, **options).compile()
    state = jax.tree.map(placed, first.out_info, first.output_shardings)
    chunk = decode.lower(policy.graphdef, weights, state, inputs, LIMIT, **options).compile()
    return SimpleNamespace(gather=gather, prefill=first, decode=chunk)


def test_decoding_weights_are_sharded_over_tp_alone(policy, programs):
    axes = {axis for sharding in jax.tree.leaves(programs.gather.output_shardings) for axis in sharding.spec}
    assert axes == {"tp", None}
    assert {array.kind for array in exchanged(programs.gather)} == {"all-gather"}
    # q_bias, k_bias and v_bias have no dim along fsdp.
    assert len(exchanged(programs.gather)) == len(jax.tree.leaves(policy.params)) - 3


def test_prefill_and_decode_gather_no_parameters(programs):
    for program in (programs.prefill, programs.decode):
        gathered = [array.shape for array in exchanged(program) if array.kind == "all-gather"]
        assert not [shape for shape in gathered if HIDDEN in shape]


def test_prefill_and_decode_sum_their_own_rows_over_tp_and_exchange_no_keys_or_values(programs):
    for program, tokens in ((programs.prefill, PROMPT), (programs.decode, 1)):
        summed = {array.shape for array in exchanged(program) if array.shape[-1] == HIDDEN}
        assert summed == {(ROWS // 4, tokens, HIDDEN)}
        assert not [array for array in exchanged(program) if HEAD_DIM in array.shape]


def test_each_device_holds_its_own_rows_and_heads_of_the_cache(programs):
    slots = PROMPT + LIMIT
    for program in (programs.prefill, programs.decode):
        caches = {array.shape for array in arrays(text(program)) if len(array.shape) == 5 and slots in array.shape}
        assert (ARCHITECTURE["num_hidden_layers"], ROWS // 4, slots, KV_HEADS // 2, HEAD_DIM) in caches
        assert not [shape for shape in caches if ROWS in shape[1:2]]


def test_a_decode_state_takes_the_place_of_the_one_before(programs):
    """So the program is compiled once, and there is no second cache."""
    before, after = programs.decode.input_shardings[0][1], programs.decode.output_shardings
    carried = 0
    for info, one, other in zip(*map(jax.tree.leaves, (programs.decode.out_info, before, after)), strict=True):
        assert one.is_equivalent_to(other, len(info.shape))
        carried += math.prod(other.shard_shape(info.shape)) * info.dtype.itemsize
    assert programs.decode.memory_analysis().alias_size_in_bytes == carried


def test_a_rollout_of_several_batches_gathers_the_weights_once(policy, monkeypatch):
    gathered, batches = [], []

    def complete(graphdef, weights, prompts, *_, **settings):
        batches.append(len(prompts))
        rows = np.zeros(len(prompts), np.int32)
        return Completions(np.zeros((len(prompts), LIMIT), np.int32), np.zeros((len(prompts), LIMIT)), rows, rows > 0)

    monkeypatch.setattr(rollout, "decoding_weights", lambda *arguments: gathered.append(arguments))
    monkeypatch.setattr(rollout, "complete", complete)
    options = SETTINGS.rollout.model_copy(update={"batch_size": 5})  # 8, so that 4 devices share the rows
    settings = {"options": options, "stop_ids": (1,), "pad_id": 0, "seed": 0, "step": 0}
    assert len(generate(policy.graphdef, policy.params, [[5] * PROMPT] * 9, **settings).tokens) == 9
    assert batches == [8, 8]
    assert len(gathered) == 1


def test_the_log_prob_pass_splits_the_rows_and_calls_the_head_s_forward_pass_only(policy, monkeypatch):
    called = []
    for name in ("statistics", "forward", "gradients", "loss_and_gradients"):
        own = getattr(xla, name)
        monkeypatch.setattr(xla, name, lambda *given, name=name, own=own: called.append(name) or own(*given))
    mesh = make_mesh(SETTINGS.mesh)
    logprob_pass = make_logprob_pass(policy.graphdef, SETTINGS, mesh)
    program = logprob_pass.lower(policy.params, random_batch(ROWS, PROMPT)).compile()
    assert called == ["statistics"]
    shapes = {array.shape for array in arrays(text(program))}
    assert (ROWS // 4, PROMPT, HIDDEN) in shapes
    assert (ROWS, PROMPT, HIDDEN) not in shapes
    assert program.output_shardings.is_equivalent_to(sharding(mesh, ("batch",)), 2)
