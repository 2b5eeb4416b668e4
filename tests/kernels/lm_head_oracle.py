"""How near to the oracle (kernels/lm_head/reference.py) an answer of the LM head has to come.

`plain`, the ordinary JAX program with full logits, is the yardstick of accuracy.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from kernels.lm_head.reference import HAIR, SLACK, Exact


class Plain(NamedTuple):
    """The same five results as `Exact`, from float32 arithmetic on full logits."""

    logprob: Float[jax.Array, " N"]
    lse: Float[jax.Array, " N"]
    entropy: Float[jax.Array, " N"]
    hidden: Float[jax.Array, "N D"]
    weight: Float[jax.Array, "V D"]


def plain(
    hidden: Float[jax.Array, "N D"],
    weight: Float[jax.Array, "V D"],
    labels: Int[jax.Array, " N"],
    total: Callable[..., Float[jax.Array, ""]],
    *,
    where: Bool[jax.Array, " N"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Plain:
    """The ordinary program with full logits: products of the inputs' dtype, float32 in between.

    It is as accurate as full logits get: the logits are not rounded to bfloat16; on the way to the gradients
    only the products' operands and results are. `total` makes a scalar of (logprob, lse, entropy).
    """
    live = jnp.ones(labels.shape, bool) if where is None else where
    hidden = jnp.where(live[:, None], hidden, 0)

    def outputs(raw: Float[jax.Array, "N V"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        z = (raw if softcap is None else softcap * jnp.tanh(raw / softcap)) / temperature
        log_p = jax.nn.log_softmax(z)
        logprob = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
        lse = jax.nn.logsumexp(z, axis=1)
        return jnp.where(live, logprob, 0), jnp.where(live, lse, 0), jnp.where(live, entropy, 0)

    def product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)

    values, pull_back = jax.vjp(outputs, product("nd,vd->nv", hidden, weight))
    (dz,) = pull_back(jax.grad(lambda outputs: total(*outputs))(values))
    dz = dz.astype(hidden.dtype)
    dh = product("nv,vd->nd", dz, weight).astype(hidden.dtype)
    dw = product("nv,nd->vd", dz, hidden).astype(weight.dtype)
    return Plain(*values, dh, dw)


def assert_as_accurate_as_plain(got: Any, yardstick: Plain, truth: Exact) -> None:
    """The criterion: of each of the five results, the root-mean-square and the largest error against `truth`.

    `got` has the fields of `Plain`. NaN anywhere in `got` fails.
    """
    for name in Plain._fields:
        want, ours, theirs = (np.asarray(getattr(x, name), np.float64) for x in (truth, got, yardstick))
        assert ours.shape == want.shape, f"{name} has shape {ours.shape}, not {want.shape}"
        hair = HAIR * getattr(truth.resolution, name)
        for norm in (root_mean_square, largest_magnitude):
            error, allowed = norm(ours - want), SLACK * norm(theirs - want) + hair
            assert error <= allowed, (
                f"{norm.__name__} error of {name} is {error:.3g}; plain has {norm(theirs - want):.3g}, "
                f"and with the hair {hair:.3g} allowed is {allowed:.3g}"
            )


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0


def largest_magnitude(x: np.ndarray) -> float:
    return float(np.max(np.abs(x))) if x.size else 0.0
