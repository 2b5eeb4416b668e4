"""One update is the same however it is computed: by which head, in which micro-batches, with how much padding."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import config, random_batch

from mllm.data.batch import Batch
from mllm.errors import UserError
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.train.optimizer import make_optimizer, make_schedule
from mllm.train.step import Forward, abstract_state, accumulate, init_state, make_logprob_pass, make_train_step

ROWS, LENGTH = 8, 16


def make_batch(seed: int = 0) -> Batch:
    return random_batch(ROWS, LENGTH, seed)


@cache
def trainer(name):
    return trainer_of(SETTINGS[name])


def trainer_of(settings):
    """Policy, optimizer and jitted update."""
    mesh = make_mesh(settings.mesh)
    policy = load_policy(settings, mesh)
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    schedule = make_schedule(settings.optimizer, settings.steps)
    return policy, optimizer, make_train_step(policy.graphdef, optimizer, schedule, settings, mesh)


def update(name, batch):
    """The parameters before, and the state and metrics after one update."""
    policy, optimizer, train_step = trainer(name)
    state = init_state(policy.initial_params(), optimizer)
    before = jax.device_get(state.params)
    return before, *train_step(state, shard_batch(make_mesh(SETTINGS[name].mesh), batch))


def gradient(settings, batch=None):
    """Loss, metrics and gradients of one step, before the optimizer hides their scale."""
    mesh = make_mesh(settings.mesh)
    policy = load_policy(settings, mesh)
    forward = Forward(policy.graphdef, settings, mesh)
    rows = settings.micro_batch_size or settings.batch_size

    @jax.jit
    def compute(params, batch):
        loss, outputs, gradients = accumulate(forward.loss, params, batch, rows)
        return {"loss": loss, **forward.metrics(batch, outputs)}, gradients

    return compute(policy.initial_params(), shard_batch(mesh, batch or make_batch()))


def assert_same(one, other, tolerance=1e-5):
    """Metrics and gradients agree to float32's rounding, relative to each array's largest value."""
    (metrics, gradients), (other_metrics, other_gradients) = one, other
    for name in metrics:
        np.testing.assert_allclose(metrics[name], other_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    for leaf, other_leaf in zip(jax.tree.leaves(gradients), jax.tree.leaves(other_gradients), strict=True):
        np.testing.assert_allclose(leaf, other_leaf, rtol=0, atol=tolerance * float(np.abs(leaf).max()))


GRPO_WITH_EVERYTHING = {
    "num_iterations": 2,
    "beta": 0.1,
    "reference": "initial",
    "entropy_coef": 0.01,
    "epsilon_high": 0.3,
}
SETTINGS = {
    "sft": config("sft", optimizer={"max_grad_norm": None}),
    "grpo": config(grpo=GRPO_WITH_EVERYTHING),
    "gspo": config(grpo={**GRPO_WITH_EVERYTHING, "loss_type": "gspo"}),
}


def changed(settings, **sections):
    return type(settings).model_validate({**settings.model_dump(), **sections})


@pytest.fixture(scope="module")
def expected():
    """Metrics and gradients of the streaming head on one device, with the whole batch at once."""
    return {name: gradient(settings) for name, settings in SETTINGS.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradient_does_not_depend_on_the_micro_batch(expected, name):
    assert_same(expected[name], gradient(changed(SETTINGS[name], micro_batch_size=2)))


def test_padding_that_is_trimmed_off_had_no_part_in_loss_and_gradient(expected):
    padding = [(0, 0), (0, LENGTH // 2)]
    assert_same(expected["grpo"], gradient(SETTINGS["grpo"], jax.tree.map(lambda x: np.pad(x, padding), make_batch())))


@pytest.mark.parametrize("name", SETTINGS)
def test_full_logits_give_the_gradient_of_the_streaming_head(expected, name):
    assert_same(expected[name], gradient(changed(SETTINGS[name], head={"impl": "reference"})))


def test_a_head_for_tpus_is_refused_on_other_devices():
    settings = changed(SETTINGS["sft"], head={"impl": "mosaic_tpu"})
    with pytest.raises(UserError, match=r"head.impl: mosaic_tpu needs a TPU, and the devices here are of the kind cpu"):
        trainer_of(settings)


def test_the_workspace_of_the_head_changes_nothing(expected):
    assert_same(expected["grpo"], gradient(changed(SETTINGS["grpo"], head={"workspace_mib": 0})))


def test_bfloat16_computes_near_float32_and_gives_gradients_to_float32_masters(expected):
    model = SETTINGS["sft"].model.model_dump()
    metrics, gradients = gradient(changed(SETTINGS["sft"], model={**model, "dtype": "bfloat16"}))
    exact_metrics, exact = expected["sft"]
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(metrics["loss"], exact_metrics["loss"], rtol=5e-3)
    np.testing.assert_allclose(optax.tree.norm(gradients), optax.tree.norm(exact), rtol=2e-2)


def test_a_loss_that_is_not_finite_skips_the_update_and_says_so():
    batch = make_batch()
    poisoned = batch._replace(advantages=np.where(batch.weights > 0, np.inf, 0).astype(np.float32))
    before, state, metrics = update("grpo", poisoned)
    assert metrics["skipped"] == 1
    assert not np.isfinite(metrics["loss"])
    for leaf, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(leaf, old)
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(state.opt_state))


def test_a_batch_in_which_nothing_counts_changes_no_parameter():
    batch = make_batch()
    before, state, metrics = update("grpo", batch._replace(weights=np.zeros_like(batch.weights)))
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    assert metrics["skipped"] == 0
    for leaf, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(leaf, old)


def test_the_log_prob_pass_gives_what_the_update_sees():
    settings = changed(SETTINGS["grpo"], micro_batch_size=4)
    policy, batch = trainer("grpo")[0], make_batch()
    logprob_pass = make_logprob_pass(policy.graphdef, settings, make_mesh(settings.mesh))
    logprobs = logprob_pass(policy.initial_params(), batch)
    assert logprobs.shape == (ROWS, LENGTH)
    assert np.all((np.asarray(logprobs) < 0) == (batch.weights > 0))
    # With the old policy's log-probabilities equal to the current ones nothing is clipped, and the ratio is 1.
    exact = batch._replace(old_logprobs=logprobs, sampler_logprobs=logprobs, reference_logprobs=logprobs)
    *_, metrics = update("grpo", exact)
    np.testing.assert_allclose(metrics["kl"], 0, atol=1e-9)
    np.testing.assert_allclose(metrics["sampling/importance_sampling_ratio/mean"], 1, rtol=1e-5)
    entropy_term = SETTINGS["grpo"].grpo.entropy_coef * metrics["entropy"]
    np.testing.assert_allclose(metrics["loss"], -(batch.advantages * batch.weights).sum() - entropy_term, atol=1e-5)


def test_the_state_is_laid_out_by_the_table_moments_included():
    settings = config(mesh={"fsdp": 2, "tp": 2})
    policy = load_policy(settings, make_mesh(settings.mesh))
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = init_state(policy.initial_params(), optimizer)
    expected = abstract_state(policy.params, optimizer)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)
    shard = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state) if leaf.shape == (260, 32)}
    assert shard == {(130, 16)}


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_an_update_keeps_the_dtypes_of_bfloat16_parameters_and_moments(optimizer, micro_batch_size):
    settings = config(
        "sft",
        model={"param_dtype": "bfloat16"},
        optimizer={"name": optimizer, "weight_decay": 0.1},
        micro_batch_size=micro_batch_size,
    )
    policy, optimizer, train_step = trainer_of(settings)
    before = abstract_state(policy.params, optimizer)
    after, _ = jax.eval_shape(train_step, before, make_batch())
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(before)]


def test_the_reported_norm_is_that_of_the_whole_gradient(expected):
    *_, metrics = update("grpo", make_batch())
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(expected["grpo"][1]), rtol=1e-5)
