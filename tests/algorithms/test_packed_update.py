"""Gradients of packed rows are those of a row for each sequence, whatever is left out because it has no gradient.

Most loss types differ from dapo in each token's loss or weight alone (test_objectives). `grpo` stands for one update
a rollout, with the importance weights of whole completions by the current policy.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_objectives import LONGEST, ROWS, make_config, reference_loss, token_weights
from tiny import config, forward_of, with_inputs

from mllm.algorithms.grpo.batch import pack
from mllm.algorithms.grpo.losses import sequence_weights
from mllm.algorithms.grpo.settings import GrpoConfig
from mllm.config.schema import Rows
from mllm.data.batch import Trajectory
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.training.step import accumulate

SEQUENCES, GROUP, PROMPT, COMPLETION = 40, 4, 8, 16
PENALTIES = {"beta": 0.1, "reference": "initial", "entropy_coef": 0.01}
PENALTIES |= {"importance_sampling": "sequence_mask"}
MESHES = {(1, 1, 1): (3, None), (2, 2, 2): (4, 61)}
"""The mesh's shape: micro-batch and row length, by default the longest sequence's."""
ONE_DEVICE = (1, 1, 1)


def make_settings(loss_type, penalties, mesh=ONE_DEVICE):
    micro, row_length = MESHES[mesh]
    several = {"num_iterations": 2, **({"dual_clip": 1.2} if penalties else {})} if loss_type != "grpo" else {}
    objective = {**several, "loss_type": loss_type, "row_length": row_length}
    return config(
        batch_size=SEQUENCES,
        rollout={"max_prompt_length": PROMPT, "max_completion_length": COMPLETION},
        grpo={**objective, **(PENALTIES if penalties else {})},
        mesh=dict(zip(("dp", "fsdp", "tp"), mesh, strict=True)),
        micro_batch_size=micro,
    )


def make_trajectories(settings):
    """Trajectories of many lengths, with their weights and advantages, some with a given token among the sampled ones.

    Those of the second group have no advantage, and two don't count at all.
    """
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / 5, SEQUENCES), COMPLETION)
    trajectories = []
    for length in lengths:
        prompt = rng.integers(2, PROMPT + 1)
        sampled = np.arange(prompt + length) >= prompt
        sampled[prompt + 2 : prompt + 3] = length < 4
        tokens = rng.integers(1, 260, sampled.size).astype(np.int32)
        trajectories.append(Trajectory(tokens, sampled, rng.normal(-5, 0.3, sampled.sum()).astype(np.float32)))
    counted = np.array([0 if i in (3, 17) else len(one.logprobs) for i, one in enumerate(trajectories)])
    advantages = rng.normal(size=SEQUENCES)
    advantages[GROUP : 2 * GROUP] = 0
    return trajectories, sequence_weights(settings.section(GrpoConfig), counted, COMPLETION), advantages


def one_a_row(trajectories, weights, advantages):
    """The batch with a row for each trajectory, padded behind; tests/data/test_packing.py has what a row holds."""
    single = Rows(length=24, micro=1, total=1, shards=1)
    parts = (np.split(numbers, SEQUENCES) for numbers in (weights, advantages))
    rows = [pack([one], weight, advantage, single) for one, weight, advantage in zip(trajectories, *parts, strict=True)]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)


def with_policies(batch):
    """The batch with log-probabilities under other policies, which depend on the token and its position."""
    old, reference = (-5 + 0.4 * np.sin(k * batch.labels + batch.positions).astype(np.float32) for k in (1, 2))
    return with_inputs(batch, old_logprobs=old, reference_logprobs=reference)


def program(loss_type, penalties, shape, whole):
    """A function from a batch to loss and gradients, in micro-batches or of the whole batch at once."""
    settings = make_settings(loss_type, penalties, shape)
    rows = SEQUENCES if whole else settings.rows.micro
    mesh = make_mesh(settings.mesh)
    policy = load_policy(settings, mesh)
    forward = forward_of(policy.graphdef, mesh, settings)
    params = jax.device_put(initial(), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    compute = jax.jit(lambda params, batch: accumulate(forward.loss, params, batch, rows)[::2])
    return lambda batch: jax.device_get(compute(params, shard_batch(mesh, batch)))


@cache
def initial():
    settings = make_settings("grpo", penalties=False)
    return jax.device_get(load_policy(settings, make_mesh(settings.mesh)).initial_params())


def errors(got, exact):
    """The norm of each parameter's difference, relative to the norm of its gradient."""
    norms = [np.linalg.norm(np.float64(leaf)) for leaf in jax.tree.leaves(exact)]
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(exact), norms, strict=True)
    return [np.linalg.norm(np.float64(one) - other) / norm for one, other, norm in leaves]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_type", "penalties", "mesh"),
    [
        ("dapo", False, ONE_DEVICE),
        ("gspo", True, (2, 2, 2)),
        pytest.param("grpo", True, ONE_DEVICE, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_packed_rows_give_the_gradients_of_a_row_for_each_sequence(loss_type, penalties, mesh):
    settings = make_settings(loss_type, penalties, mesh)
    rows, (trajectories, weights, advantages) = settings.rows, make_trajectories(settings)
    learned = np.flatnonzero((weights > 0) & (penalties | (advantages != 0)))
    assert len(learned) == SEQUENCES - (2 if penalties else 2 + GROUP)
    batch = pack([trajectories[i] for i in learned], weights[learned], advantages[learned], rows)
    assert rows.micro < np.count_nonzero(batch.segments.any(axis=1)) < 0.6 * len(learned)
    got = program(loss_type, penalties, mesh, whole=False)(with_policies(batch))
    alone = with_policies(one_a_row(trajectories, weights, advantages))
    expected = program(loss_type, penalties, ONE_DEVICE, whole=True)(alone)
    assert max(errors(got[1], expected[1])) < 1e-6
    np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=1e-6)


def hidden_of(graphdef, params, tokens, positions):
    model = nnx.merge(graphdef, params)
    return model(tokens, positions, jnp.ones_like(tokens)), model.head_weight


@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [
        ("gspo", "sequence_mask"),
        pytest.param("grpo", "token_truncate", marks=pytest.mark.slow),
        pytest.param("cispo", "token_mask", marks=pytest.mark.nightly),
    ],
)
def test_two_sampled_turns_with_given_tokens_around_them_are_learned_as_the_paper_has_it(loss_type, mode):
    """The oracle has each trajectory alone, the model's logits in float64, and a loop over the tokens of the mask."""
    objective = make_config(loss_type, mode, num_generations=GROUP, row_length=32)
    settings = config(
        batch_size=ROWS, rollout={"max_completion_length": LONGEST}, grpo=objective.model_dump(exclude_defaults=True)
    )
    mesh = make_mesh(settings.mesh)
    policy = load_policy(settings, mesh)
    params, forward = policy.initial_params(), forward_of(policy.graphdef, mesh, settings)

    rng = np.random.default_rng(0)
    spans = rng.integers(1, 4, (ROWS, 4))  # a prompt, whose own turns are given, two turns, and an answer between them
    edges = np.cumsum(spans, axis=1)[..., None]
    at = np.arange(edges.max() + 1)
    mask = ((at >= edges[:, 0]) & (at < edges[:, 1])) | ((at >= edges[:, 2]) & (at < edges[:, 3]))
    tokens = rng.integers(1, 260, mask.shape).astype(np.int32)
    places = np.broadcast_to(at, mask.shape)
    hidden, weight = jax.jit(partial(hidden_of, policy.graphdef))(params, tokens, np.int32(places))
    logits = np.float64(hidden) @ np.float64(weight).T
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    logprob, entropy = np.zeros((2, *mask.shape))  # of each token, which the one before it predicts
    logprob[:, 1:] = np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    entropy[:, 1:] = -(np.exp(logits) * logits).sum(-1)[:, :-1]
    old, reference = (-5 + 0.4 * np.sin(k * tokens + places - 1) for k in (1, 2))  # as `with_policies` has them
    sampler = old + rng.normal(scale=0.1, size=old.shape)
    advantages = rng.normal(size=ROWS)
    operands = np.broadcast_to(advantages[:, None], mask.shape), old, sampler, reference

    trajectories = [
        Trajectory(ids[:end], learned[:end], np.float32(theirs[learned]))
        for ids, learned, theirs, end in zip(tokens, mask, sampler, edges[:, 3, 0] + np.arange(ROWS) % 2, strict=True)
    ]
    weights = sequence_weights(objective, mask.sum(1), LONGEST)
    batch = with_policies(pack(trajectories, weights, advantages, Rows(length=32, micro=1, total=6, shards=1)))
    batch = jax.tree.map(jnp.asarray, batch)
    loss, outputs = jax.jit(forward.loss)(params, batch)
    expected = reference_loss(loss_type, mode, mask, logprob, logprob, entropy, operands)
    # Its terms cancel, and each has the rounding of float32: what they sum up to without their signs is the scale.
    scale = np.sum(token_weights(loss_type, mask) * (np.abs(advantages)[:, None] + entropy))
    assert float(loss) == pytest.approx(expected, abs=4 * np.finfo(np.float32).eps * scale)
    metrics = forward.algorithm.metrics(batch, outputs)
    apart = (reference - logprob)[mask]
    assert metrics["entropy"] == pytest.approx(entropy[mask].mean(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(np.mean(np.exp(apart) - apart - 1), rel=1e-4)
    mismatch = np.abs(old - sampler)[mask].mean()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(mismatch, rel=1e-4)
