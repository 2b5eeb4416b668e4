"""The head's rules of differentiation, the same for every engine.

`loss` makes value and gradients in one pass, for a cotangent of 1, and backward scales them. A side that isn't
differentiated is left out (`symbolic_zeros`). JAX differentiates nothing in an engine.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .contract import Engine, Gradients, Inputs, Options, Terms, weighted_sum
from .shapes import Array, Float
from .softmax import Slopes, TokenLogprobs
from .target import vary


def _named_statistics(objective: Callable[..., Any]) -> Sequence[str]:
    """Which of `lse` and `mean_logit` the objective requires by keyword."""
    try:
        parameters = inspect.signature(objective).parameters.values()
    except (TypeError, ValueError):
        return ()
    required = [x.name for x in parameters if x.kind == x.KEYWORD_ONLY and x.default is x.empty]
    return [name for name in ("lse", "mean_logit") if name in required]


def close_objective(objective: Callable[..., Any], dtypes: Sequence[Any], varying: Set[str]) -> tuple[Any, bool, bool]:
    """The objective as `Terms` have it; whether it uses the entropy, and whether `mean_logit` is a last operand.

    What it closes over becomes an argument: a custom rule differentiates by its arguments only. The operands have these
    dtypes and, under the caller's `shard_map`, vary over these axes.
    """
    names = _named_statistics(objective)
    dtypes = [*[jnp.float32] * 3, *dtypes, *[jnp.float32] * ("mean_logit" in names)]

    def by_place(logprob: Array, lse: Array, entropy: Array, *operands: Array) -> Array:
        given = {"lse": lse, "mean_logit": operands[-1] if operands else None}
        own = operands[: len(operands) - ("mean_logit" in names)]
        return objective(logprob, entropy, *own, **{name: given[name] for name in names})

    if varying:
        closed = jax.make_jaxpr(by_place)(*(vary(jnp.zeros((), dtype), varying) for dtype in dtypes))
    else:
        # A mesh that is set would stay with what is traced under it, which could then not run inside `shard_map`.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            closed = jax.make_jaxpr(by_place)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))
    out: list[Any] = closed.out_avals
    if [x.shape for x in out] != [()] or not jnp.issubdtype(out[0].dtype, jnp.floating):
        raise ValueError(f"objective must give one floating number a token, not {out}")

    def function(shared: list[Array], *scalars: Array) -> Array:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, shared))(*scalars)[0]

    entropy, used = closed.jaxpr.invars[2], (closed.jaxpr.outvars, *(eqn.invars for eqn in closed.jaxpr.eqns))
    uses_entropy = any(x is entropy for operands in used for x in operands)
    shared = list(map(jnp.asarray, closed.consts))
    return jax.tree_util.Partial(function, shared), uses_entropy, "mean_logit" in names


Sides = tuple[Float[Array, "N D"], Float[Array, "V D"]]
"""The (student's) hidden states and weight, by which the rules differentiate: inputs have the same, or a copy."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_logprobs(engine: Engine, options: Options, inputs: Inputs, sides: Sides) -> TokenLogprobs:
    """The statistics."""
    return engine.forward(inputs, options.values_alone)[0].outputs(inputs.live)


def _token_logprobs_forward(engine: Engine, options: Options, inputs: Any, sides: Any) -> tuple[TokenLogprobs, Any]:
    options, inputs = with_wanted(options, sides), values(inputs)
    softmax, saved = engine.forward(inputs, options)
    return softmax.outputs(inputs.live), (options, inputs, softmax, saved)


def _token_logprobs_backward(
    engine: Engine, _: Options, residuals: Any, cotangents: TokenLogprobs
) -> tuple[None, Gradients]:
    options, inputs, softmax, saved = residuals
    slopes = Slopes(*map(instantiate, cotangents[:3]))
    options = dataclasses.replace(options, entropy_slopes=not isinstance(cotangents.entropy, SymbolicZero))
    return None, engine.gradients(inputs, softmax, saved, slopes, options)


token_logprobs.defvjp(_token_logprobs_forward, _token_logprobs_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss(engine: Any, options: Options, inputs: Any, sides: Sides, terms: Terms) -> tuple[Float[Array, ""], Any]:
    """The loss of an engine's statistics, and these, whose cotangents have no effect."""
    tokens = engine.forward(inputs, options.values_alone)[0].outputs(inputs.live)
    return weighted_sum(inputs.live, tokens[:3], terms), tokens


def _loss_forward(
    engine: Any, options: Options, inputs: Any, sides: Any, terms: Any
) -> tuple[tuple[Float[Array, ""], Any], Any]:
    options, (inputs, terms) = with_wanted(options, sides), values((inputs, terms))
    if options.wants_any:
        found, gradients = engine.loss_and_gradients(inputs, terms, options)
    else:
        found, gradients = engine.forward(inputs, options)[0], (None, None)
    tokens = found.outputs(inputs.live)
    value, pull = jax.vjp(functools.partial(weighted_sum, inputs.live, tokens[:3]), terms)
    return (value, tokens), (pull, gradients)


def _loss_backward(
    _engine: Any, _options: Options, residuals: Any, cotangents: tuple[Any, Any]
) -> tuple[None, Gradients, Terms]:
    pull, gradients = residuals
    g_loss = instantiate(cotangents[0])
    (g_terms,) = pull(g_loss)
    # Where the cotangent is the constant 1, as under `jax.grad` of this loss, XLA drops the product.
    return None, jax.tree.map(lambda x: (g_loss * x).astype(x.dtype), gradients), g_terms


loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def with_wanted(options: Options, sides: Any) -> Options:
    """The options that leave out what isn't differentiated; `sides` are those of a rule with symbolic zeros."""
    return dataclasses.replace(options, wants_hidden=sides[0].perturbed, wants_weight=sides[1].perturbed)


def values(perturbable: Any) -> Any:
    """The values of a rule's arguments."""
    return jax.tree.map(lambda x: x.value, perturbable)


def instantiate(cotangent: Any) -> Array:
    """The cotangent, zeros where it is symbolic."""
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent
