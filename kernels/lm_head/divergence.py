"""Divergence of a teacher's next-token distribution and a student's, from the hidden states of both: entry points.

Neither model's logits exist as an array. The student's side is differentiable, the teacher's is not.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from kernels.lm_head import divergence_xla, target
from kernels.lm_head.arguments import (
    check_copy,
    check_model,
    check_tokens,
    checked_softcap,
    checked_temperature,
    product_dtype,
)
from kernels.lm_head.autodiff import instantiate, values, with_wanted_sides
from kernels.lm_head.contract import Gradients, Inputs, Options
from kernels.lm_head.gpu import divergence as divergence_gpu
from kernels.lm_head.layout import HeadSharding, rows_of, run_on_mesh
from kernels.lm_head.sharded import ShardedPair
from kernels.lm_head.target import same_varying
from kernels.lm_head.tpu import divergence as divergence_tpu
from kernels.lm_head.two_softmaxes import KINDS, Divergence, Kind, Pair, PairEngine

_ENGINES: Mapping[str, PairEngine] = {
    "xla": divergence_xla,
    "mosaic_tpu": divergence_tpu,
    "mosaic_gpu": divergence_gpu,
}
_DEFAULTS = {"tpu": "mosaic_tpu"}  # where it can run; elsewhere "xla"


def token_divergence(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    teacher_hidden: Float[Array, "*N E"],
    teacher_weight: Float[Array, "W E"],
    *,
    kind: Kind = "reverse_kl",
    beta: float = 0.5,
    where: Bool[Array, "*N"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    teacher_vocabulary: int | None = None,
    weight_copy: Float[Array, "V D"] | None = None,
    dtype: Any = None,
    impl: str | None = None,
    sharding: HeadSharding | None = None,
) -> Float[Array, "*N"]:
    """The divergence of each token's two distributions over the vocabulary, float32, in nats; 0 for equal models.

    Differentiable in `hidden` and `weight` under any cotangent (reverse mode, first order).

    Args beyond those of `token_logprobs`:
        teacher_hidden, teacher_weight: bfloat16 or float32, of the teacher's own width; no gradient reaches them.
        kind: "reverse_kl" is KL(student || teacher), "forward_kl" KL(teacher || student), and "jsd" the generalised
            Jensen-Shannon divergence: with m = beta teacher + (1 - beta) student,
            beta KL(teacher || m) + (1 - beta) KL(student || m) (Agarwal et al. 2023, arXiv:2306.13649).
        beta: the teacher's share of jsd, above 0 and below 1; towards them jsd over beta (or 1 - beta) tends to
            forward_kl (or reverse_kl).
        temperature, softcap: of both models' logits.
        teacher_vocabulary: both models have the first so many tokens in common, and have no others: both softmaxes are
            over these. None: the smaller of V and W.
        weight_copy: what is multiplied in place of `weight`, as for `token_logprobs`.
        impl: "xla", which runs everywhere; "mosaic_tpu"; "mosaic_gpu", which keeps logits in float16; None: on TPUs
            mosaic_tpu where it can run, else xla.
        sharding: the layout of both models' arrays. Where V and W differ and the vocabulary is spread, the larger
            weight is copied.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    models, given = (hidden, weight, teacher_hidden, teacher_weight, weight_copy), {"where": where}
    arrays, how, options = _checked(models, given, kind, beta, temperature, softcap, teacher_vocabulary, dtype)

    def run(sharding: HeadSharding | None, *arrays: Array) -> Float[Array, "*N"]:
        rows = rows_of(arrays[6].shape, sharding)
        pair, weight = _pair(rows.flat, arrays, teacher_vocabulary)
        return rows.folded(_divergences(_engine(impl, pair, options, rows.sharding), how, options, pair, weight))

    return run_on_mesh(run, sharding, arrays, lambda tokens: tokens)


def divergence_loss(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    teacher_hidden: Float[Array, "*N E"],
    teacher_weight: Float[Array, "W E"],
    *,
    weights: Float[Array, "*N"] | None = None,
    where: Bool[Array, "*N"] | None = None,
    workspace: int | None = None,
    kind: Kind = "reverse_kl",
    beta: float = 0.5,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    teacher_vocabulary: int | None = None,
    weight_copy: Float[Array, "V D"] | None = None,
    dtype: Any = None,
    impl: str | None = None,
    sharding: HeadSharding | None = None,
) -> tuple[Float[Array, ""], Float[Array, "*N"]]:
    """`sum_i weights_i * divergence_i`, and the divergences without gradient; loss, dh and dW in one pass.

    With r = E / D, in matrix products of 2 N V D flops: 3 + r where `workspace` has room for both models' logits of
    some tokens, which mosaic_tpu never keeps, else 4 + 2 r (jsd: 5 + 3 r). The arguments are those of
    `token_divergence` and `token_loss`.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    if workspace is not None and (not isinstance(workspace, int) or workspace < 0):
        raise ValueError(f"workspace must be None or a number of bytes, not {workspace!r}")
    models, given = (hidden, weight, teacher_hidden, teacher_weight, weight_copy), {"where": where, "weights": weights}
    arrays, how, options = _checked(models, given, kind, beta, temperature, softcap, teacher_vocabulary, dtype)
    options = dataclasses.replace(options, workspace=workspace)

    def run(sharding: HeadSharding | None, *arrays: Array) -> tuple[Float[Array, ""], Float[Array, "*N"]]:
        rows = rows_of(arrays[6].shape, sharding)
        pair, weight = _pair(rows.flat, arrays, teacher_vocabulary)
        shares = rows.flat(arrays[7]).astype(jnp.float32)
        loss, found = _loss(_engine(impl, pair, options, rows.sharding), how, options, pair, weight, shares)
        return loss, rows.folded(jax.lax.stop_gradient(found))

    return run_on_mesh(run, sharding, arrays, lambda tokens: (PartitionSpec(), tokens))


# --- the rules of differentiation -----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _divergences(
    engine: PairEngine, how: Divergence, options: Options, pair: Pair, weight: Float[Array, "V D"]
) -> Float[Array, "N"]:
    """The divergences, differentiable in hidden states and `weight`, of which the student's weight is a copy."""
    return engine.forward(pair, how, options.values_alone).divergence


def _divergences_forward(engine: PairEngine, how: Divergence, options: Options, pair: Any, weight: Any) -> Any:
    options, pair = with_wanted_sides(options, pair.student, weight), values(pair)
    found = engine.forward(pair, how, options.values_alone)
    return found.divergence, (options, pair, found)


def _divergences_backward(engine: PairEngine, how: Divergence, _: Options, residuals: Any, cotangent: Any) -> Any:
    options, pair, found = residuals
    gradients = engine.gradients(pair, found, instantiate(cotangent), how, options)
    return _cotangents(gradients)


_divergences.defvjp(_divergences_forward, _divergences_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _loss(
    engine: PairEngine,
    how: Divergence,
    options: Options,
    pair: Pair,
    weight: Float[Array, "V D"],
    shares: Float[Array, "N"],
) -> tuple[Float[Array, ""], Float[Array, "N"]]:
    """The loss, and the divergences, whose cotangents have no effect."""
    found = engine.forward(pair, how, options.values_alone).divergence
    return _weighted_sum(pair, shares, found), found


def _loss_forward(engine: PairEngine, how: Divergence, options: Options, pair: Any, weight: Any, shares: Any) -> Any:
    options, pair, shares = with_wanted_sides(options, pair.student, weight), values(pair), values(shares)
    if options.wants_any:
        found, gradients = engine.loss_and_gradients(pair, shares, how, options)
    else:
        found, gradients = engine.forward(pair, how, options), (None, None)
    loss = _weighted_sum(pair, shares, found.divergence), found.divergence
    return loss, (jnp.where(pair.student.live, found.divergence, 0), gradients)


def _loss_backward(engine: PairEngine, how: Divergence, options: Options, residuals: Any, cotangents: Any) -> Any:
    divergences, gradients = residuals
    g_loss = instantiate(cotangents[0])
    scaled = jax.tree.map(lambda x: (g_loss * x).astype(x.dtype), gradients)
    return *_cotangents(scaled), g_loss * divergences


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _weighted_sum(pair: Pair, shares: Float[Array, "N"], divergences: Float[Array, "N"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(pair.student.live, shares * divergences, 0))


def _cotangents(gradients: Gradients) -> tuple[Pair, Array | None]:
    """The cotangents of the pair and of the weight, which gets that of its copy; None stands for zeros."""
    nothing = Inputs(None, None, None, None, None)  # type: ignore[arg-type]
    return Pair(nothing._replace(hidden=gradients[0]), nothing), gradients[1]  # type: ignore[arg-type]


# --- arguments --------------------------------------------------------------------------------------------------------


def _engine(impl: str | None, pair: Pair, options: Options, sharding: HeadSharding | None) -> PairEngine:
    if impl not in (None, *_ENGINES):
        raise ValueError(f"impl must be None or one of {', '.join(_ENGINES)}, not {impl!r}")
    if sharding is not None:
        for prefix, model in zip(("", "teacher_"), pair, strict=True):
            sharding.check(model.hidden, model.weight, prefix)
    platform = target.platform(None if sharding is None else sharding.mesh)
    engine = _placed(impl or _DEFAULTS.get(platform, "xla"), sharding)
    why_not = engine.obstacle(pair, options)
    if why_not is None:
        return engine
    if impl is None:
        return _placed("xla", sharding)
    raise ValueError(f"impl: {impl} can't run here: {why_not}")


def _placed(name: str, sharding: HeadSharding | None) -> PairEngine:
    """The engine of that name, on every device of a mesh if there is one."""
    engine = _ENGINES[name]
    return engine if sharding is None or sharding.mesh.size == 1 else ShardedPair(sharding.in_use(), engine)


def _pair(
    flat: Callable[[Array], Array], arrays: Sequence[Array], teacher_vocabulary: int | None
) -> tuple[Pair, Float[Array, "V D"]]:
    """The pair, whose student multiplies the copy of the weight, and the weight."""
    hidden, weight, teacher_hidden, teacher_weight, copy, temperature, live, weights = arrays
    live = flat(live & (weights != 0))
    columns = None if teacher_vocabulary is None else jnp.int32(teacher_vocabulary)

    def side(hidden: Array, weight: Array) -> Inputs:
        none = jnp.zeros(live.shape, jnp.int32)
        return Inputs(flat(hidden), weight, none, live, temperature, columns)

    return Pair(side(hidden, copy), side(teacher_hidden, teacher_weight)), weight


def _checked(
    models: Sequence[Any],
    per_token: Mapping[str, Any],
    kind: str,
    beta: float,
    temperature: Any,
    softcap: float | None,
    teacher_vocabulary: int | None,
    dtype: Any,
) -> tuple[tuple[Array, ...], Divergence, Options]:
    """The arrays that `_pair` takes, in its order; how the distributions are compared, and options."""
    hidden, weight, teacher_hidden, teacher_weight, copy = models
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind == "jsd" and not 0 < beta < 1:
        raise ValueError(f"beta must be above 0 and below 1, not {beta}; kind names forward_kl and reverse_kl")
    check_model("", hidden, weight)
    check_model("teacher_", teacher_hidden, teacher_weight)
    copy = weight if copy is None else copy
    check_copy(copy, weight)
    lead = np.shape(hidden)[:-1]
    if np.shape(teacher_hidden)[:-1] != lead:
        shape = list(np.shape(teacher_hidden)[:-1])
        raise ValueError(f"teacher_hidden must have hidden's leading shape {list(lead)}, not {shape}")
    check_tokens(lead, "hidden", {name: x for name, x in per_token.items() if x is not None})
    shared = min(np.shape(weight)[0], np.shape(teacher_weight)[0])
    if teacher_vocabulary is not None and not 1 <= teacher_vocabulary <= shared:
        raise ValueError(f"teacher_vocabulary must be within [1, {shared}], not {teacher_vocabulary}")
    where, weights = (per_token.get(name) for name in ("where", "weights"))
    live = np.ones(lead, np.bool_) if where is None else where
    shares = np.ones(lead, np.float32) if weights is None else weights
    everything = (hidden, weight, teacher_hidden, teacher_weight, copy, checked_temperature(temperature), live, shares)
    arrays = same_varying(tuple(map(jnp.asarray, everything)))
    widest = jax.ShapeDtypeStruct((), jnp.result_type(arrays[0], *arrays[2:5]))
    product = product_dtype(dtype, widest, widest)
    options = Options(checked_softcap(softcap), product, gradient_dtypes=(arrays[0].dtype, arrays[1].dtype))
    return arrays, Divergence(kind, float(beta) if kind == "jsd" else 0.0), options
