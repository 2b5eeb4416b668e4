"""The head's rules of differentiation, the same for every engine.

`loss` computes value and gradients in one pass, for a cotangent of 1; the backward rule scales them. A gradient that
isn't requested is not computed (`symbolic_zeros`). JAX never differentiates through an engine.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .arguments import refuse_gradient
from .contract import Engine, Gradients, Inputs, Options, Terms, outputs_of, weighted_sum
from .shapes import Array, Float
from .softmax import Slopes, TokenLogprobs
from .target import vary


class Objective(NamedTuple):
    """An objective in the form of `Terms`, and its dependencies."""

    function: Any  # a `Partial` of (logprob, lse, entropy[, divergence][, mean_logit], *operands) to a token's loss
    uses_tokens: bool  # whether it depends on the log-probability, the lse or the mean logit
    uses_entropy: bool
    uses_mean_logit: bool


def names_of(objective: Callable[..., Any]) -> Sequence[str]:
    """Which of `lse`, `divergence` and `mean_logit` are keyword-only arguments of the objective."""
    try:
        parameters = inspect.signature(objective).parameters.values()
    except (TypeError, ValueError):
        return ()
    keywords = [x.name for x in parameters if x.kind == x.KEYWORD_ONLY]
    return [name for name in ("lse", "divergence", "mean_logit") if name in keywords]


def close_objective(
    objective: Callable[..., Any], dtypes: Sequence[Any], varying: Set[str], has_teacher: bool
) -> Objective:
    """The objective as a function of its arguments alone: a custom rule differentiates by arguments, not by closures.

    The operands have these dtypes and, under the caller's `shard_map`, vary over these axes.
    """
    names = names_of(objective)
    mean = "mean_logit" in names
    check_arity(objective, len(dtypes), names)
    statistics = 3 + has_teacher + mean
    dtypes = [*[jnp.float32] * statistics, *dtypes]

    def by_place(*scalars: Array) -> Array:
        logprob, lse, entropy, *more = scalars
        keywords = {"lse": lse, "divergence": more[0] if has_teacher else None, "mean_logit": scalars[statistics - 1]}
        return objective(logprob, entropy, *scalars[statistics:], **{name: keywords[name] for name in names})

    if varying:
        closed = jax.make_jaxpr(by_place)(*(vary(jnp.zeros((), dtype), varying) for dtype in dtypes))
    else:
        # A set mesh would stay in the traced function, which could then not run inside `shard_map`.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            closed = jax.make_jaxpr(by_place)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))
    out: list[Any] = closed.out_avals
    if [x.shape for x in out] != [()] or not jnp.issubdtype(out[0].dtype, jnp.floating):
        raise ValueError(f"objective must give one floating number a token, not {out}")

    def function(shared: list[Array], *scalars: Array) -> Array:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, shared))(*scalars)[0]

    used = [x for operands in (closed.jaxpr.outvars, *(eqn.invars for eqn in closed.jaxpr.eqns)) for x in operands]
    logprob, lse, entropy = (any(x is variable for x in used) for variable in closed.jaxpr.invars[:3])
    shared = list(map(jnp.asarray, closed.consts))
    return Objective(jax.tree_util.Partial(function, shared), logprob or lse or mean, entropy, mean)


def check_arity(objective: Callable[..., Any], operands: int, names: Sequence[str]) -> None:
    """Raise ValueError if the objective does not accept its arguments."""
    try:
        signature = inspect.signature(objective)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(2 + operands), **dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(f"objective: {error}: it gets logprob, entropy and {operands} operands") from None


Sides = tuple[Float[Array, "N D"], Float[Array, "V D"]]
"""Hidden states and weight, the arguments of differentiation: inputs have the same arrays, or a copy."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_logprobs(engine: Engine, options: Options, inputs: Inputs, sides: Sides) -> TokenLogprobs:
    """The statistics."""
    return outputs_of(engine.forward(inputs, options.values_alone)[0], inputs, options)


def _token_logprobs_forward(engine: Engine, options: Options, inputs: Any, sides: Any) -> tuple[TokenLogprobs, Any]:
    options, inputs = _with_wanted(options, sides), _values(inputs)
    softmax, saved = engine.forward(inputs, options)
    return outputs_of(softmax, inputs, options), (options, inputs, softmax, saved)


def _token_logprobs_backward(
    engine: Engine, _: Options, residuals: Any, cotangents: TokenLogprobs
) -> tuple[None, Gradients]:
    options, inputs, softmax, saved = residuals
    if not isinstance(cotangents.collision, SymbolicZero | None):
        refuse_gradient("collision")
    slopes = Slopes(*map(_instantiate, cotangents[:3]))
    options = dataclasses.replace(options, entropy_slopes=not _is_symbolic(cotangents.entropy))
    return None, engine.gradients(inputs, softmax, saved, slopes, options)


token_logprobs.defvjp(_token_logprobs_forward, _token_logprobs_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss(
    engine: Engine, options: Options, inputs: Inputs, sides: Sides, terms: Terms
) -> tuple[Float[Array, ""], TokenLogprobs]:
    """The loss, and the tokens' statistics."""
    tokens = outputs_of(engine.forward(inputs, options.values_alone)[0], inputs, options)
    return weighted_sum(inputs.live, tokens.statistics, terms), tokens


def _loss_forward(
    engine: Engine, options: Options, inputs: Any, sides: Any, terms: Any
) -> tuple[tuple[Float[Array, ""], TokenLogprobs], Any]:
    options, (inputs, terms) = _with_wanted(options, sides), _values((inputs, terms))
    if options.wants_any:
        softmax, gradients = engine.loss_and_gradients(inputs, terms, options)
    else:
        softmax, gradients = engine.forward(inputs, options)[0], (None, None)
    tokens = outputs_of(softmax, inputs, options)
    value, pull = jax.vjp(functools.partial(weighted_sum, inputs.live, tokens.statistics), terms)
    return (value, tokens), (pull, gradients, inputs, options)


def _loss_backward(
    engine: Engine, _: Options, residuals: Any, cotangents: tuple[Any, Any]
) -> tuple[None, Gradients, Terms]:
    pull, gradients, inputs, options = residuals
    g_loss, given = _instantiate(cotangents[0]), cotangents[1].statistics
    (g_terms,) = pull(g_loss)
    # Where the cotangent is the constant 1, as under `jax.grad` of this loss, XLA drops the product.
    gradients = jax.tree.map(lambda x: (g_loss * x).astype(x.dtype), gradients)
    if options.wants_any and not all(map(_is_symbolic, jax.tree.leaves(given, is_leaf=_is_symbolic))):
        # The statistics themselves are differentiated as well; only then are there further passes.
        entropy = not _is_symbolic(given.entropy)
        options = dataclasses.replace(options, entropy_slopes=entropy, token_slopes=True)
        slopes = jax.tree.map(_instantiate, given, is_leaf=_is_symbolic)
        if options.mean_over is not None:
            slopes = slopes._replace(mean_logit=slopes.mean_logit / options.mean_over)
        softmax, saved = engine.forward(inputs, options)
        gradients = jax.tree.map(jnp.add, gradients, engine.gradients(inputs, softmax, saved, slopes, options))
    return None, gradients, g_terms


loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _with_wanted(options: Options, sides: Any) -> Options:
    """The options with only the requested gradients; `sides` are a rule's arguments, with symbolic zeros."""
    return dataclasses.replace(options, wants_hidden=sides[0].perturbed, wants_weight=sides[1].perturbed)


def _values(perturbable: Any) -> Any:
    """The values of a rule's arguments."""
    return jax.tree.map(lambda x: x.value, perturbable)


def _is_symbolic(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero)


def _instantiate(cotangent: Any) -> Array:
    """The cotangent, zeros where it is symbolic."""
    return jnp.zeros(cotangent.shape, cotangent.dtype) if _is_symbolic(cotangent) else cotangent
