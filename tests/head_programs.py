"""Programs of the head to compile, on meshes with dp, fsdp and tp."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from lm_head import HeadSharding, token_logprobs, token_loss

Program = tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]]


def value(mesh: Mesh, **sizes: Any) -> Program:
    """Log-probability, logsumexp and entropy of every token."""
    options, arguments = options_and_shapes(mesh, **sizes)

    def logprobs(hidden: Array, weight: Array, labels: Array, live: Array, *_: Array) -> Any:
        return token_logprobs(hidden, weight, labels, where=live != 0, **options)

    return logprobs, arguments


def general(mesh: Mesh, *, entropy: bool = False, **sizes: Any) -> Program:
    """The outputs of `value`, and the gradients under cotangents of the outputs (of the entropy with `entropy`)."""
    statistics, arguments = value(mesh, **sizes)
    outputs = 3 if entropy else 2

    def gradients(hidden: Array, weight: Array, labels: Array, live: Array, *cotangents: Array) -> Any:
        def split(hidden: Array, weight: Array) -> Any:
            results = tuple(statistics(hidden, weight, labels, live))[:3]
            return results[:outputs], results[outputs:]

        results, pull, rest = jax.vjp(split, hidden, weight, has_aux=True)
        return results + rest, pull(cotangents[:outputs])

    return gradients, arguments


def loss(
    mesh: Mesh,
    *,
    workspace: int | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    master: bool = False,
    **sizes: Any,
) -> Program:
    """A policy-gradient loss, optionally with an entropy bonus, and its gradients by hidden states and weight.

    With `master` the weight is float32 and has a copy, as the trainer's.
    """
    options, arguments = options_and_shapes(mesh, **sizes)
    if master:
        copy = arguments[1]
        of_master = jax.ShapeDtypeStruct(copy.shape, jnp.float32, sharding=copy.sharding)
        arguments = arguments[0], of_master, *arguments[2:], copy

    def objective(logprob: Array, tokens_entropy: Array, advantage: Array, old: Array) -> Array:
        ratio = jnp.exp(logprob - old)
        clipped = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return clipped - 0.01 * tokens_entropy if entropy else clipped

    def step(hidden: Array, weight: Array, labels: Array, weights: Array, *operands: Array) -> Any:
        def total(hidden: Array, weight: Array) -> Any:
            per_token = operands[:2]  # advantages, and log-probabilities of the policy that sampled
            given = {"weights": weights, "workspace": workspace, "softcap": softcap, **options}
            given["weight_copy"] = operands[-1] if master else None
            return token_loss(hidden, weight, labels, objective, *per_token, **given)

        return jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, weight)

    return step, arguments


def options_and_shapes(
    mesh: Mesh,
    *,
    tokens: int = 8192,
    features: int = 2048,
    vocabulary: int = 151936,
    hidden: str = "bfloat16",
    weight: str = "bfloat16",
    dtype: str | None = None,
    impl: str | None = None,
) -> tuple[dict[str, Any], Sequence[jax.ShapeDtypeStruct]]:
    """The head's options; and hidden states, weight, labels and four numbers for each token, with their shardings."""
    sharding = HeadSharding(mesh, ("dp", "fsdp"), "tp", "fsdp") if "tp" in mesh.axis_names else None
    hidden_spec = PartitionSpec() if sharding is None else sharding.hidden_spec
    weight_spec = PartitionSpec() if sharding is None else sharding.weight_spec

    def array(shape: tuple[int, ...], kind: str, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind), sharding=NamedSharding(mesh, spec))

    per_token = PartitionSpec(*hidden_spec[:1])
    arguments = (
        array((tokens, features), hidden, hidden_spec),
        array((vocabulary, features), weight, weight_spec),
        array((tokens,), "int32", per_token),
        *(array((tokens,), "float32", per_token) for _ in range(4)),
    )
    return {"dtype": dtype, "impl": impl, "sharding": sharding}, arguments
