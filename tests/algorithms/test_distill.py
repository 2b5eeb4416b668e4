"""Distillation's update: the divergence against a float64 oracle, its metrics, and the sampled term."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import ARCHITECTURE, config, logits, random_batch

from lm_head import TokenLogprobs
from mllm.algorithms.distill.algorithm import SampledDivergence, make_teacher_pass, measured
from mllm.algorithms.distill.algorithm import divergence as divergence_loss
from mllm.algorithms.grpo.algorithm import PolicyPasses
from mllm.algorithms.recipes import recipe_of
from mllm.data.source import FrozenModels
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.run.source_run import load_teacher
from mllm.training.head import Head, HeadInputs
from mllm.training.step import accumulate

TEACHER = Path(__file__).parent.parent / "fixtures" / "tiny_grpo"
"""The teacher has 64 features and 260 tokens. The student has 32 features and four tokens more."""
MODEL = {**ARCHITECTURE, "vocab_size": 264, "initializer_range": 0.3}
ROWS, LENGTH, TEMPERATURE = 16, 16, 0.7
BATCH = random_batch(ROWS, LENGTH)


def make_settings(estimator="full", **distill):
    return config(
        "distill",
        eval=None,
        batch_size=ROWS,
        micro_batch_size=ROWS // 2,
        model={"architecture": MODEL},
        teacher={"source": str(TEACHER), "dtype": "float32"},
        rollout={"temperature": TEMPERATURE},
        grpo={"num_generations": 1},
        distill={"estimator": estimator, **distill},
    )


def make_pair(settings):
    """The functions, and the parameters of student and teacher."""
    mesh = make_mesh(settings.mesh)
    policy = load_policy(settings, mesh)
    teacher = load_teacher(settings, mesh, policy.tokenizer)
    forward = recipe_of(settings).forward(settings, policy.graphdef, mesh, teacher.graphdef)
    return forward, policy.initial_params(), teacher.initial_params()


def update(settings, label_coef):
    """Loss, metrics and the gradient's norm of a step in two micro-batches."""
    forward, params, teacher = make_pair(settings)
    forward.head_loss = partial(divergence_loss, settings.distill, label_coef)

    @jax.jit
    def compute(params, teacher, batch):
        loss_of = lambda params, micro: forward.loss(params, micro, teacher)  # noqa: E731
        loss, outputs, gradients = accumulate(loss_of, params, batch, ROWS // 2)
        return loss, forward.metrics(batch, outputs), optax.tree.norm(gradients)

    return jax.device_get(compute(params, teacher, shard_batch(forward.mesh, BATCH)))


@cache
def both_logits():
    forward, params, teacher = make_pair(make_settings())
    tokens = [np.minimum(BATCH.tokens, last) for last in (263, 259)]
    more = BATCH.positions, BATCH.segments
    mine = logits(forward.graphdef, params, tokens[0], *more)
    return np.float64(mine), np.float64(logits(forward.teacher.graphdef, teacher, tokens[1], *more))


@pytest.mark.slow
def test_the_loss_equals_full_logits_at_the_temperature():
    """With the labels' cross-entropy. Settings allow labels with given completions only."""
    coef, (mine, yours) = 0.4, both_logits()
    log_softmax = lambda z: z - np.log(np.exp(z).sum(-1, keepdims=True))  # noqa: E731
    p, q = (log_softmax(z[..., :260] / TEMPERATURE) for z in (mine, yours))
    expected, counts = (np.exp(q) * (q - p)).sum(-1), BATCH.weights > 0
    loss, metrics, gradient = update(make_settings(kind="forward_kl"), coef)
    assert gradient > 0
    of_labels = np.take_along_axis(p, BATCH.labels[..., None], -1)[..., 0]
    assert loss == pytest.approx((BATCH.weights * (expected - coef * of_labels)).sum(), rel=2e-5)
    assert metrics["kl"] == pytest.approx(expected[counts].mean(), rel=2e-5)
    some = np.asarray(measured(BATCH))
    assert 0.05 < some[counts].mean() < 0.25
    assert not some[~counts].any()
    for name, z in (("entropy", mine), ("teacher_entropy", yours)):
        whole = log_softmax(z / TEMPERATURE)
        assert metrics[name] == pytest.approx(-(np.exp(whole) * whole).sum(-1)[some].mean(), rel=2e-5)
    agreement = mine.argmax(-1) == yours.argmax(-1)
    assert metrics["teacher_agreement"] == pytest.approx(agreement[some].mean())


def test_the_mixture_and_the_likeliest_tokens_reach_the_head():
    calls, likeliest = [], (BATCH.labels + 1) % 260

    class Asked(Head):
        def __init__(self):
            pass

        def loss(self, states, batch, objective, *operands, teacher=None, **options):
            calls.append(options)
            return jnp.zeros(()), self.logprobs(states, batch)

        def logprobs(self, states, batch):
            calls.append(batch.labels)
            zeros = jnp.zeros(batch.labels.shape)
            return TokenLogprobs(zeros, zeros, zeros, zeros)

        def likeliest(self, states, where):
            return likeliest

    zeros = HeadInputs(jnp.zeros((ROWS, LENGTH, 4)), *[jnp.zeros((260, 4))] * 2)
    divergence_loss(make_settings(kind="jsd", beta=0.3).distill, 0.0, Asked(), zeros, BATCH, zeros)
    options, _, *measured_labels = calls
    assert options == {"kind": "jsd", "beta": 0.3}
    assert [np.array_equal(labels, likeliest) for labels in measured_labels] == [True, True]


def test_the_sampled_term_keeps_the_old_log_probabilities():
    settings = make_settings(estimator="sampled").model_copy(deep=True)
    settings = settings.model_copy(update={"grpo": settings.grpo.model_copy(update={"num_iterations": 2})})
    forward, params, teacher = make_pair(settings)
    passes = PolicyPasses(settings.grpo, forward)
    passes.logprobs = lambda params, batch: np.full(batch.tokens.shape, -0.25, np.float32)
    bare = BATCH._replace(inputs=BATCH.inputs._replace(advantages=0 * BATCH.inputs.advantages, old_logprobs=None))
    batch, _ = SampledDivergence(passes, forward)(bare, params, FrozenModels(teacher=teacher), first=False)
    np.testing.assert_array_equal(batch.inputs.old_logprobs, np.full(BATCH.tokens.shape, -0.25))
    assert np.any(batch.inputs.advantages)


def test_the_sampled_term_demands_the_passes_of_grpo_and_the_teacher():
    settings = make_settings(estimator="sampled")
    assert [one.policy for one in recipe_of(settings).demands.passes] == ["teacher"]
    settings = settings.model_copy(update={"grpo": settings.grpo.model_copy(update={"num_iterations": 2})})
    assert [one.policy for one in recipe_of(settings).demands.passes] == ["policy", "teacher"]


def test_the_sampled_term_is_the_teacher_minus_sampler_logprob():
    """A token that the teacher lacks has the lowest term that there is."""
    settings = make_settings(estimator="sampled")
    forward, _, teacher = make_pair(settings)
    lacking = 0, np.flatnonzero(BATCH.weights[0])[-1]  # later tokens are not learned
    tokens, labels = BATCH.tokens.copy(), BATCH.labels.copy()
    tokens[0, lacking[1] + 1] = labels[lacking] = 262
    batch = shard_batch(forward.mesh, BATCH._replace(tokens=tokens, labels=labels))
    added, divergence = make_teacher_pass(forward)(teacher, batch)
    z = both_logits()[1] / TEMPERATURE
    logprobs = z - np.log(np.exp(z).sum(-1, keepdims=True))
    scored = np.take_along_axis(logprobs, np.minimum(labels, 259)[..., None], -1)[..., 0]
    difference, counts = np.maximum(scored - BATCH.inputs.sampler_logprobs, -20), BATCH.weights > 0
    difference[lacking] = -20
    np.testing.assert_allclose(added, np.where(counts, difference, 0), atol=1e-3)
    assert divergence == pytest.approx(-difference[counts].mean(), rel=1e-4)
