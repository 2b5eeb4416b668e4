"""An update is the same under any head, any micro-batches and any padding."""

from functools import cache
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from runs import changed
from tiny import ARCHITECTURE, config, forward_of, make_trainer, random_batch, with_inputs

from mllm.algorithms.examples import make_validation
from mllm.algorithms.sft.algorithm import DocumentBatches, validation_metrics
from mllm.data.tokenizing import Document, Documents
from mllm.errors import UserError
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.parallel.processes import RowShare
from mllm.training import head
from mllm.training.head import HeadInputs
from mllm.training.optimizer import make_optimizer
from mllm.training.step import COMPILER_OPTIONS, abstract_state, accumulate, init_state, make_logprob_pass

ROWS, LENGTH = 8, 16
BATCH = random_batch(ROWS, LENGTH)
EVERYTHING = {"num_iterations": 2, "beta": 0.1, "reference": "initial", "entropy_coef": 0.01, "epsilon_high": 0.3}
SETTINGS = {
    "sft": config("sft", optimizer={"max_grad_norm": None}),
    "grpo": config(
        grpo=EVERYTHING,
        rollout={"temperature": 0.7},
        optimizer={"schedule": "linear", "warmup_steps": 2, "weight_decay": 0.1},
        steps=10,
    ),
}


@cache
def initial_params():
    """The parameters that every configuration here begins with; on the host, since an update takes their memory."""
    settings = SETTINGS["sft"]
    return jax.device_get(load_policy(settings, make_mesh(settings.mesh)).initial_params())


@cache
def grpo_trainer():
    """A function that gives the first state, and the update for batches of one shape."""
    settings = SETTINGS["grpo"]
    policy, optimizer, train_step = make_trainer(settings)
    mesh = make_mesh(settings.mesh)

    def first_state():
        params = jax.device_put(initial_params(), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
        return init_state(params, optimizer)

    return first_state, lambda state, batch: train_step(state, shard_batch(mesh, batch))


def update(batch):
    """The state and metrics after one update by GRPO."""
    first_state, train_step = grpo_trainer()
    return train_step(first_state(), batch)


def gradient_of(settings, padding=0):
    """Metrics and gradients of one step, before the optimizer hides their scale."""
    mesh = make_mesh(settings.mesh)
    forward = forward_of(load_policy(settings, mesh).graphdef, mesh, settings)
    batch = jax.tree.map(lambda x: np.pad(x, [(0, 0), (0, padding)]), BATCH)

    @jax.jit
    def compute(params, batch):
        loss, outputs, gradients = accumulate(forward.loss, params, batch, ROWS)
        return {"loss": loss, **forward.metrics(batch, outputs)}, gradients

    return compute(initial_params(), shard_batch(mesh, batch))


@pytest.mark.slow
def test_full_logits_match_the_fused_head_at_any_padding():
    """tests/algorithms/test_packed_update.py has gspo."""
    full_logits = changed(SETTINGS["grpo"], head={"impl": "full_logits"})
    expected_metrics, expected = gradient_of(full_logits, padding=LENGTH // 2)
    metrics, gradients = gradient_of(SETTINGS["grpo"])
    for name in metrics:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    for leaf, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-5 * float(np.abs(leaf).max()))
    np.testing.assert_allclose(update(BATCH)[1]["grad_norm"], optax.tree.norm(gradients), rtol=1e-5)


def test_bfloat16_gradients_are_summed_in_float32():
    """512 gradients of 1: from 256 on bfloat16 has no odd numbers."""

    def loss(params, micro):
        return params["w"].astype(jnp.float32).sum(), micro.weights

    batch = random_batch(512, 20)
    (_, _, gradients) = jax.jit(lambda *given: accumulate(loss, *given, 1))({"w": jnp.ones(3, jnp.bfloat16)}, batch)
    np.testing.assert_array_equal(gradients["w"], 512)


@pytest.mark.slow
def test_an_update_without_a_finite_gradient_moves_nothing():
    first_state, train_step = grpo_trainer()
    poisoned = with_inputs(BATCH, advantages=np.where(BATCH.weights > 0, np.inf, 0).astype(np.float32))
    state, metrics = train_step(first_state(), poisoned)
    assert metrics["skipped"] == 1
    assert not np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, state[:2], first_state()[:2])

    # A warm-up to 1e-2 over two updates, then down to 0 over eight. How far an update moves parameters shows its rate.
    rates, without_gradient = [metrics["learning_rate"]], BATCH._replace(weights=np.zeros_like(BATCH.weights))
    for batch in (BATCH, poisoned, BATCH, without_gradient, BATCH, BATCH):
        before = jax.device_get(state.params)
        state, metrics = train_step(state, batch)
        rates.append(metrics["learning_rate"])
        moved = optax.tree.norm(optax.tree.sub(state.params, before), ord="inf")
        assert 0.5 < moved / rates[-1] < 1.5 if batch is BATCH else moved == 0
    np.testing.assert_allclose(rates, [5e-3, 5e-3, 1e-2, 1e-2, 1e-2, 1e-2, 1e-2 * 7 / 8], rtol=1e-6)
    assert state.step == 7


@pytest.mark.parametrize("platform", COMPILER_OPTIONS)
def test_xla_has_the_options_of_an_update(platform):
    """It refuses an option that it does not have, also for another device."""
    assert jax.jit(lambda x: x + 1, compiler_options=COMPILER_OPTIONS[platform])(1) == 2


def test_an_update_is_compiled_with_its_platform_s_options(monkeypatch):
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", {"xla_no_such_option": True})
    policy, optimizer, train_step = make_trainer(SETTINGS["sft"])
    batch = shard_batch(make_mesh(SETTINGS["sft"].mesh), BATCH)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such_option'"):
        train_step.lower(abstract_state(policy.params, optimizer), batch).compile()


@pytest.mark.slow
def test_the_log_prob_pass_matches_the_update():
    settings = changed(SETTINGS["grpo"], micro_batch_size=4)
    mesh = make_mesh(settings.mesh)
    logprobs = make_logprob_pass(forward_of(load_policy(settings, mesh).graphdef, mesh, settings))
    logprobs = logprobs(initial_params(), BATCH)
    assert logprobs.shape == (ROWS, LENGTH)
    assert np.all((np.asarray(logprobs) < 0) == (BATCH.weights > 0))
    # With the old policy's log-probabilities equal to the current ones nothing is clipped, and the ratio is 1. Both
    # sides must divide the logits by the temperature, which is not 1 here.
    _, metrics = update(
        with_inputs(BATCH, old_logprobs=logprobs, sampler_logprobs=logprobs, reference_logprobs=logprobs)
    )
    np.testing.assert_allclose(metrics["kl"], 0, atol=1e-9)
    np.testing.assert_allclose(metrics["sampling/importance_sampling_ratio/mean"], 1, rtol=1e-5)
    entropy_term = settings.grpo.entropy_coef * metrics["entropy"]
    np.testing.assert_allclose(
        metrics["loss"], -(BATCH.inputs.advantages * BATCH.weights).sum() - entropy_term, atol=1e-5
    )


def test_the_state_s_moments_are_laid_out_as_their_parameters():
    settings = config(mesh={"fsdp": 2, "tp": 2})
    policy = load_policy(settings, make_mesh(settings.mesh))
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    params = jax.device_put(initial_params(), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    state, expected = init_state(params, optimizer), abstract_state(policy.params, optimizer)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)
    shard = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state) if leaf.shape == (260, 32)}
    assert shard == {(130, 16)}


def test_the_head_gets_its_workspace_and_refuses_other_devices(monkeypatch):
    settings = changed(SETTINGS["sft"], head={"workspace_mib": 3})
    monkeypatch.setattr(head.lm_head, "token_loss", called := Mock(side_effect=InterruptedError))
    weight, forward = jnp.zeros((260, 32)), forward_of(None, make_mesh(settings.mesh), settings)
    with pytest.raises(InterruptedError):
        forward.head_loss(forward.head, HeadInputs(jnp.zeros((ROWS, LENGTH, 32)), weight, weight), BATCH)
    assert called.call_args.kwargs["workspace"] == 3 * 2**20
    with pytest.raises(UserError, match=r"head.impl: mosaic_tpu needs a TPU, and the devices here are of the kind cpu"):
        make_trainer(changed(SETTINGS["sft"], head={"impl": "mosaic_tpu"}))


# Validation measures every learned token once, as full logits in float64 would

COUNT = 21
"""With 8 rows the last batch is incomplete, packed or not."""
RNG = np.random.default_rng(0)
SHARP_MODEL = {"architecture": {**ARCHITECTURE, "initializer_range": 0.2}}


def validation_settings(packing=True, **sections):
    return config("sft", micro_batch_size=4, data={"max_length": 24, "packing": packing}, model=SHARP_MODEL, **sections)


@pytest.fixture(scope="module")
def measured():
    """Documents and their metrics from logits in float64. A third end with the model's likeliest token."""
    policy = load_policy(validation_settings(), make_mesh(SETTINGS["sft"].mesh))
    tokens = RNG.integers(0, 260, (COUNT, 20)).astype(np.int32)
    logits = np.float64(tiny.logits(policy.graphdef, policy.initial_params(), tokens))
    documents, logprobs, correct = [], [], []
    for number, (ids, before) in enumerate(zip(tokens, logits, strict=True)):
        length = int(RNG.integers(2, 20))
        learned = RNG.random(length) < 0.6
        learned[0], learned[-1] = False, True
        if number % 3 == 0:
            ids[length - 1] = before[length - 2].argmax()
        documents.append(Document(ids[:length], learned))
        rows, labels = before[np.flatnonzero(learned) - 1], ids[:length][learned]
        of_label = rows[np.arange(len(labels)), labels]
        logprobs.extend(of_label - np.log(np.exp(rows).sum(1)))
        correct.extend(of_label == rows.max(1))
    loss = -np.mean(logprobs)
    metrics = {"loss": loss, "perplexity": np.exp(loss), "token_accuracy": np.mean(correct)}
    assert metrics["token_accuracy"] > 0.04
    sizes, hashes = np.int32([document.size for document in documents]), np.zeros(COUNT, np.uint64)
    listed = Documents(sizes, hashes, lambda indices: [documents[i] for i in indices], "")
    return listed, {f"validation/{name}": value for name, value in metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections", [{"packing": False}, pytest.param({"mesh": {"dp": 2, "fsdp": 2, "tp": 2}}, marks=pytest.mark.nightly)]
)
def test_validation_is_the_mean_over_all_learned_tokens(measured, sections):
    documents, metrics = measured
    one = validation_settings(**sections)
    mesh = make_mesh(one.mesh)
    policy = load_policy(one, mesh)
    params = jax.device_put(policy.initial_params(), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    polls = []
    batches = DocumentBatches(one.data, documents, one.batch_size, share=RowShare.of_mesh(mesh))
    forward = forward_of(policy.graphdef, mesh, one)
    validate = make_validation(validation_metrics, forward, batches.validate, lambda: polls.append(1))
    values = validate(params, 0)
    assert values.keys() == metrics.keys()
    for name, value in values.items():
        np.testing.assert_allclose(value, metrics[name], rtol=2e-6, err_msg=name)
    assert validate(params, 7) == values
    assert len(polls) == 2 * (2 if one.data.packing else 3)


@pytest.mark.slow
def test_the_loss_uses_the_vocabulary_copy_and_temperature():
    """The trainer multiplies a narrower copy; a teacher's is its own."""
    rng, mesh = np.random.default_rng(0), make_mesh(SETTINGS["sft"].mesh)
    hidden, weight = rng.normal(size=(ROWS, LENGTH, 8)).astype(np.float32), rng.normal(size=(260, 8)).astype(np.float32)
    states = HeadInputs(hidden, 0 * weight, weight)
    z = hidden @ weight.T / 0.7
    expected = np.take_along_axis(jax.nn.log_softmax(z), BATCH.labels[..., None], -1)[..., 0]
    policy = head.Head(SETTINGS["grpo"].head, mesh, 0.7)
    loss, tokens = policy.loss(states, BATCH, lambda logprob, entropy: -logprob)
    for result in (tokens, policy.logprobs(states, BATCH)):
        np.testing.assert_allclose(result.logprob, np.where(BATCH.weights > 0, expected, 0), atol=1e-4)
    assert loss == pytest.approx(-float((BATCH.weights * expected).sum()), rel=1e-5)
    own = lambda logprob, entropy, *, divergence: divergence  # noqa: E731
    assert policy.loss(states, BATCH, own, teacher=states)[0] == pytest.approx(0, abs=1e-6)
