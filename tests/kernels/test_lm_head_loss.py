"""token_loss and its gradients against float64: any objective, workspace, mask and incoming cotangent."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_head_cases import (
    MANY_TOKENS,
    MASKS,
    OBJECTIVES,
    SCALES,
    SMALL,
    UNALIGNED,
    check_loss,
    every_impl,
    every_mask,
    every_objective,
    loss_and_gradients,
    operands_for,
    poisoned,
    random_cotangents,
    random_problem,
    sparse_weights,
    values_and_gradients,
)
from oracle import exact

from kernels.lm_head import TokenLogprobs, token_loss


@every_impl
@every_objective
def test_the_loss_of_any_objective_is_as_accurate_as_full_logits(impl: str, name: str) -> None:
    problem, objective = random_problem(SMALL), OBJECTIVES[name]
    check_loss(problem, objective, operands_for(problem, objective), sparse_weights(24), impl=impl)


@every_impl
@pytest.mark.parametrize("softmax", SCALES)
def test_the_loss_is_as_accurate_as_full_logits_on_any_softmax(impl: str, softmax: str) -> None:
    problem = random_problem(UNALIGNED, SCALES[softmax], jnp.bfloat16)
    check_loss(problem, OBJECTIVES["entropy bonus"], [], sparse_weights(252), impl=impl)


@pytest.mark.parametrize("workspace", [0, 100_000, 1 << 27], ids=["none", "waves", "all"])
def test_a_sum_over_many_tokens_does_not_wear_down_in_bfloat16(workspace: int) -> None:
    problem, objective = random_problem(MANY_TOKENS, 1.0, jnp.bfloat16), OBJECTIVES["entropy bonus"]
    check_loss(problem, objective, [], jnp.ones(5003), impl="xla", workspace=workspace)


@every_impl
def test_the_loss_under_temperature_and_softcap_is_as_accurate_as_full_logits(impl: str) -> None:
    problem, objective = random_problem(SMALL, 10.0), OBJECTIVES["nonlinear in both"]
    operands = operands_for(problem, objective)
    check_loss(problem, objective, operands, sparse_weights(24), impl=impl, temperature=0.8, softcap=4.0)


@every_impl
def test_the_cotangent_of_the_loss_scales_its_gradients(impl: str) -> None:
    problem, objective, weights = random_problem(SMALL), OBJECTIVES["entropy bonus"], sparse_weights(24)

    @jax.jit
    def gradients(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(h: jax.Array, w: jax.Array) -> jax.Array:
            loss, _ = token_loss(h, w, problem.labels, objective.in_jax, weights=weights, impl=impl)
            return factor * loss + loss**2

        return jax.grad(total, argnums=(0, 1))(problem.hidden, problem.weight)

    loss, rows = loss_and_gradients(problem, objective, (), weights, impl=impl)
    for factor in (3.0, 0.0, -1e-6):
        for got, once in zip(gradients(factor), (rows.hidden, rows.weight), strict=True):
            np.testing.assert_allclose(got, (factor + 2 * loss) * once, rtol=1e-5, atol=1e-6)


@every_impl
def test_the_outputs_beside_the_loss_are_token_logprobs_without_gradient(impl: str) -> None:
    hidden, weight, labels = random_problem(SMALL)

    def metrics(h: jax.Array, w: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
        outputs = token_loss(h, w, labels, lambda logprob, entropy: -logprob, impl=impl)[1]
        return sum(jnp.sum(x) for x in outputs), outputs

    gradients, outputs = jax.jit(jax.grad(metrics, argnums=(0, 1), has_aux=True))(hidden, weight)
    assert not any(np.any(g) for g in gradients)
    want = values_and_gradients(hidden, weight, labels, random_cotangents(24), impl=impl, where=jnp.ones(24, bool))
    for got, x in zip(outputs, want, strict=False):
        np.testing.assert_allclose(got, x, rtol=1e-6, atol=1e-6)


@every_impl
@every_mask
def test_rows_of_weight_zero_give_zeros_and_leak_nothing(impl: str, mask: str) -> None:
    live, objective = MASKS[mask], OBJECTIVES["clipped ratio"]
    problem = random_problem(SMALL)
    operands = [jnp.where(live, x, jnp.nan) for x in operands_for(problem, objective)]
    weights = jnp.asarray(np.linspace(-1, 2, 24) * live, jnp.float32)
    got = check_loss(poisoned(problem, ~live), objective, operands, weights, impl=impl)
    assert not np.any([np.asarray(x)[~live] for x in got.rows[:3]])
    assert not np.any(np.asarray(got.rows.hidden)[~live])
    assert live.any() or (got.loss == 0 and not np.any(got.rows.weight))


@every_impl
def test_weights_operands_and_what_the_objective_closes_over_get_gradients_too(impl: str) -> None:
    """With loss = sum_i w_i (a_i logprob_i + c b_i entropy_i), for floating a and c and integers b."""
    problem, w = random_problem(SMALL), sparse_weights(24)
    a, b = jnp.linspace(-1, 1, 24), jnp.arange(24) % 3

    @functools.partial(jax.jit, static_argnames="impl")
    def gradients(w: jax.Array, a: jax.Array, c: jax.Array, impl: str) -> Any:
        def loss(w: jax.Array, a: jax.Array, c: jax.Array) -> jax.Array:
            objective = lambda logprob, entropy, a, b: a * logprob + c * b * entropy  # noqa: E731
            return token_loss(*problem, objective, a, b, weights=w, impl=impl)[0]

        return jax.grad(loss, argnums=(0, 1, 2))(w, a, c)

    rows = exact(*problem, lambda *_: np.zeros((3, 24)), where=np.asarray(w) != 0)
    got = gradients(w, a, jnp.float32(0.5), impl)
    want = (
        np.where(w != 0, a * rows.logprob + 0.5 * b * rows.entropy, 0),
        w * rows.logprob,
        np.sum(w * b * rows.entropy),
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
