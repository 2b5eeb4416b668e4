"""What tools/bench/head.py measures: our implementations, and what others have or would write.

Every method computes the cross-entropy of the same tokens with its gradients by hidden states and weight, but for those
whose name says otherwise. Peers have options of their own, and are taken as they come. tokamax knows no weights: rows
that don't count reach it as zeros, of which each adds log V to the loss and nothing to a gradient. Methods through
torch are in bench_torch.py.

Leaves out: several devices, other objectives than the cross-entropy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels.lm_head import token_logprobs
from tools.bench.head_losses import Loss, chunked, full_logits, fused, optax_on_logits
from tools.bench.problem import Problem

Call = Callable[..., tuple[Any, ...]]
"""(hidden, weight, labels, weights, by_logprob, by_lse) -> (value,) or (value, dh, dW)."""

WORKSPACE = 640 << 20
FILTER = 2.0**-12


@dataclass(frozen=True)
class Method:
    name: str
    products: int
    """Matrix products of 2 N V D flops that TFLOP/s count: those it must make with the memory it's given. It may make
    more."""
    call: Call | None = None
    """None: a method of bench_torch.py."""
    gradients: bool = True
    general: bool = False
    """The value is logprob and lse of each token, the gradients those under random cotangents."""
    transposed: bool = False
    """The weight is [D, V]."""
    needs: tuple[str, ...] = ()
    """Modules."""
    on_gpu: bool = False
    """Runs on nothing else."""


def value_and_gradients(loss: Loss) -> Call:
    def call(hidden: Array, weight: Array, labels: Array, weights: Array, *_: Array) -> tuple[Any, ...]:
        value, gradients = jax.value_and_grad(loss, (0, 1))(hidden, weight, labels, weights)
        return value, *gradients

    return call


def value_only(loss: Loss) -> Call:
    def call(hidden: Array, weight: Array, labels: Array, weights: Array, *_: Array) -> tuple[Any, ...]:
        return (loss(hidden, weight, labels, weights),)

    return call


def general_backward(**options: Any) -> Call:
    """By `token_logprobs`: what an objective that isn't known beforehand takes."""

    def call(
        hidden: Array, weight: Array, labels: Array, weights: Array, by_logprob: Array, by_lse: Array
    ) -> tuple[Any, ...]:
        def outputs(hidden: Array, weight: Array) -> tuple[Array, Array]:
            found = token_logprobs(hidden, weight, labels, where=weights != 0, **options)
            return found.logprob, found.lse

        values, pull = jax.vjp(outputs, hidden, weight)
        return jnp.stack(values), *pull((by_logprob, by_lse))

    return call


def by_tokamax(implementation: str | None) -> Call:
    def call(hidden: Array, weight: Array, labels: Array, weights: Array, *_: Array) -> tuple[Any, ...]:
        import tokamax  # type: ignore[import-not-found]  # nothing here depends on it

        def loss(hidden: Array, weight: Array) -> Array:
            return tokamax.linear_softmax_cross_entropy_loss(hidden, labels, weight, implementation=implementation)

        # Outside of what is differentiated: gradients come back in a dtype of its choice.
        live = weights[:, None].astype(hidden.dtype)
        total, (dh, dw) = jax.value_and_grad(loss, (0, 1))(hidden * live, weight)
        value = total - jnp.sum(weights == 0) * math.log(weight.shape[1])
        return value, live * dh.astype(hidden.dtype), dw.astype(weight.dtype)

    return call


def ours(impl: str) -> list[Method]:
    methods = [
        Method(f"{impl}, workspace 640 MiB", 3, value_and_gradients(fused(impl=impl, workspace=WORKSPACE))),
        Method(f"{impl}, workspace 0", 4, value_and_gradients(fused(impl=impl, workspace=0))),
        Method(f"{impl}, default workspace", 3, value_and_gradients(fused(impl=impl))),
        Method(f"{impl}, value only", 1, value_only(fused(impl=impl)), gradients=False),
        Method(f"{impl}, general backward", 4, general_backward(impl=impl), general=True),
    ]
    if impl != "mosaic_tpu":  # which leaves nothing out
        filtered = fused(impl=impl, workspace=0, filter_eps=FILTER)
        methods.append(Method(f"{impl}, workspace 0, filter 2^-12", 4, value_and_gradients(filtered)))
    return methods


def methods(platform: str) -> list[Method]:
    """Those to try on a `cpu`, `gpu` or `tpu`, what matters most first."""
    # The chunk that a device wants: products of few tokens wait for memory.
    chunks = (256,) if platform == "cpu" else (1024, 4096)
    return [
        *ours("mosaic_tpu" if platform == "tpu" else "mosaic_gpu"),
        Method("full logits", 3, value_and_gradients(full_logits)),
        *(Method(f"scan over {n} tokens, recomputed", 4, value_and_gradients(chunked(n))) for n in chunks),
        Method("Liger, fused linear", 3, needs=("torch", "liger_kernel"), on_gpu=True),
        Method("cut-cross-entropy, exact", 4, needs=("torch", "cut_cross_entropy"), on_gpu=True),
        Method("tokamax, its choice", 3, by_tokamax(None), transposed=True, needs=("tokamax",)),
        Method("tokamax, chunked_xla", 4, by_tokamax("chunked_xla"), transposed=True, needs=("tokamax",)),
        *ours("xla"),
        Method("optax on full logits", 3, value_and_gradients(optax_on_logits)),
        Method("full logits, value only", 1, value_only(full_logits), gradients=False),
        Method("full logits in torch", 3, needs=("torch",)),
    ]


def obstacle(method: Method, problem: Problem) -> str | None:
    """Why it can't run here, by its own words when it is traced; None if it can, or fails otherwise."""
    if method.call is None:
        return None
    tokens, features, vocabulary = problem.shape
    weight = (features, vocabulary) if method.transposed else (vocabulary, features)
    by_token = jax.ShapeDtypeStruct((tokens,), jnp.float32)
    try:
        jax.eval_shape(
            method.call,
            jax.ShapeDtypeStruct((tokens, features), problem.dtype),
            jax.ShapeDtypeStruct(weight, problem.dtype),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
            *[by_token] * 3,
        )
    except Exception as error:  # any but a refusal is a fault of the method: its own process fails by it, and no other
        if isinstance(error, NotImplementedError) or str(error).startswith("impl"):
            return str(error).splitlines()[0]
    return None
