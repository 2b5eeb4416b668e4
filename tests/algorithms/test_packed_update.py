"""Packed rows of two turns have the paper's loss, and the gradients of a row for each sequence in micro-batches.

Most loss types differ in each token's loss or weight alone (test_objectives). `grpo` stands for these types, and `gspo`
for the ratio of a sequence. tests/parallel/test_mesh.py has gradients on meshes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_objectives import GROUP, LONGEST, ROWS, make_config, reference_loss, token_weights
from tiny import config, forward_of, with_inputs

from mllm.algorithms.grpo.inputs import pack
from mllm.algorithms.grpo.losses import sequence_weights
from mllm.config.run import BatchShape
from mllm.data.batch import Trajectory
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.training.step import accumulate


def with_policies(batch):
    """The batch with log-probabilities under other policies, which depend on the token and its position."""
    old, reference = (-5 + 0.4 * np.sin(k * batch.labels + batch.positions).astype(np.float32) for k in (1, 2))
    return jax.tree.map(jnp.asarray, with_inputs(batch, old_logprobs=old, reference_logprobs=reference))


def hidden_of(graphdef, params, tokens, positions):
    model = nnx.merge(graphdef, params)
    return model(tokens, positions, jnp.ones_like(tokens)), model.head_weight


@pytest.mark.slow
@pytest.mark.parametrize(("loss_type", "mode"), [("gspo", "sequence_mask"), ("grpo", "token_truncate")])
def test_two_sampled_turns_are_learned_as_in_the_paper(loss_type, mode):
    """The oracle has each trajectory alone, the model's logits in float64, and a loop over the tokens of the mask."""
    objective = make_config(loss_type, mode, num_generations=GROUP, row_length=32)
    grpo = objective.model_dump(exclude_defaults=True)
    settings = config(batch_size=ROWS, rollout={"max_completion_length": LONGEST}, grpo=grpo)
    mesh = make_mesh(settings.mesh)
    policy = load_policy(settings, mesh)
    params, forward = policy.initial_params(), forward_of(policy.graphdef, mesh, settings)

    rng = np.random.default_rng(0)
    spans = rng.integers(1, 4, (ROWS, 4))  # a prompt, a turn, an answer, a turn; the turns inside a prompt are given
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
    batch = with_policies(pack(trajectories, weights, [*advantages], BatchShape(length=32, micro=1, total=6, shards=1)))
    loss, outputs = jax.jit(forward.loss)(params, batch)
    expected = reference_loss(loss_type, mode, mask, logprob, logprob, entropy, operands)
    # The terms of the sum cancel, and each has the rounding of float32. The scale is thus the sum of absolute terms.
    scale = np.sum(token_weights(loss_type, mask) * (np.abs(advantages)[:, None] + entropy))
    assert float(loss) == pytest.approx(expected, abs=4 * np.finfo(np.float32).eps * scale)
    metrics = forward.metrics(batch, outputs)
    apart = (reference - logprob)[mask]
    assert metrics["entropy"] == pytest.approx(entropy[mask].mean(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(np.mean(np.exp(apart) - apart - 1), rel=1e-4)
    mismatch = np.abs(old - sampler)[mask].mean()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(mismatch, rel=1e-4)

    single = BatchShape(length=16, micro=1, total=1, shards=1)
    parts = zip(trajectories, weights, advantages, strict=True)
    rows = [pack([one], np.array([weight]), [advantage], single) for one, weight, advantage in parts]
    alone = with_policies(jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows))
    update = jax.jit(lambda batch, rows: accumulate(forward.loss, params, batch, rows)[2], static_argnums=1)
    gradients = update(batch, 2), update(alone, ROWS)
    for gradient, same in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert np.linalg.norm(np.float64(gradient) - same) < 1e-6 * np.linalg.norm(np.float64(same))
