"""The head's entry points: arguments are checked, leading dims flattened, and an engine is picked."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, Shaped

from kernels.lm_head import autodiff, chunked_logits, full_logits, target, xla
from kernels.lm_head.arguments import (
    check_copy,
    check_labels,
    check_model,
    check_tokens,
    checked_candidates,
    checked_softcap,
    checked_temperature,
    product_dtype,
)
from kernels.lm_head.contract import Engine, Inputs, Objective, Options, Terms
from kernels.lm_head.gpu import engine as mosaic_gpu
from kernels.lm_head.layout import HeadSharding, rows_of, run_on_mesh
from kernels.lm_head.sharded import Sharded
from kernels.lm_head.softmax import TokenLogprobs
from kernels.lm_head.target import same_varying, varying_axes
from kernels.lm_head.tpu import engine as mosaic_tpu

Impl = Literal["full_logits", "chunked_logits", "xla", "mosaic_tpu", "mosaic_gpu"]

_ENGINES: Mapping[str, Engine] = {
    "full_logits": full_logits,
    "chunked_logits": chunked_logits,
    "xla": xla,
    "mosaic_tpu": mosaic_tpu,
    "mosaic_gpu": mosaic_gpu,
}
_DEFAULTS: Mapping[str, tuple[Impl, str]] = {
    "tpu": ("mosaic_tpu", "by its compiler's schedule; not timed on a device"),
    "gpu": ("xla", "mosaic_gpu has not been timed on a device; impl takes its name"),
    "cpu": ("xla", "no TPU or Hopper GPU here"),
}
"""The engine that `impl=None` takes on a kind of device where it can run, and why (docs/head.md: at length)."""


def token_logprobs(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "*N"],
    *,
    where: Bool[Array, "*N"] | None = None,
    weights: Float[Array, "*N"] | None = None,
    ignore_index: int | None = None,
    candidates: Integer[Array, "*N K"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    weight_copy: Float[Array, "V D"] | None = None,
    dtype: Any = None,
    impl: Impl | None = None,
    sharding: HeadSharding | None = None,
) -> TokenLogprobs:
    """Log-probability of each label, log-normaliser and entropy under `softmax(z)`: float32 [*N], in nats.

    `likeliest` beside them is boolean. The label's logit is one of the numbers that it is compared with, but in
    mosaic_tpu, where a label within rounding of the largest logit may be either.

    `z = cap(hidden @ weight.T) / temperature`, with `cap(y) = softcap * tanh(y / softcap)` where there is a softcap.
    It is differentiable in `hidden` and `weight` under any cotangent of the three (reverse mode, first order). A
    gradient that isn't asked for isn't computed, and gradients have the dtype of what they belong to.

    Args:
        hidden: bfloat16 or float32, as `weight`; they may differ.
        labels: rows of `weight`. A traced label can't be checked: where it counts and is out of range, its logprob is
            NaN, and so are the gradients under that one's cotangent.
        where: the rows that count. The others cost (almost) nothing, give 0, get no gradient and may have any label.
        weights: rows of weight 0 don't count, as for `token_loss`; the weights have no other effect.
        ignore_index: rows with this label don't count (torch's is -100); None: no label is special.
        candidates: ids of any words for each row, whose log-probabilities are `.candidates`, float32 [*N, K], as
            differentiable as the others; out of range, they are treated as labels are. Nothing of [*N, K, D] is made.
        temperature: positive; a number, or a scalar that may be traced. Differentiation takes it for a constant.
        softcap: positive, a Python number.
        weight_copy: what is multiplied in place of `weight`, laid out alike: a narrower copy, rounded as the caller
            likes. `weight` gets the copy's gradient, in its own dtype, as if nothing were rounded. None: `weight`.
        dtype: the dtype of the matrix products' operands, cast tile by tile as they are read; every sum is float32.
            None: the wider of the arguments' dtypes. float32 products have the device's highest precision.
        impl: None for the best that runs here (see `choose_impl`), which never makes full logits; or a name.
        sharding: how `hidden`, `weight` and all that is given for each token are laid out on a mesh, in and outside of
            `jit` alike; the work is divided accordingly, and results and gradients have the same layout. None: the
            layout in the arguments' types, if their mesh has Explicit axes, as JAX makes them; else one device.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    copy = weight if weight_copy is None else weight_copy
    live = checked_live(hidden, weight, copy, ignore_index, labels=labels, where=where, weights=weights)
    ids = () if candidates is None else (checked_candidates(candidates, live, np.shape(weight)[0]),)
    everything = (hidden, copy, labels, live, checked_temperature(temperature), weight, *ids)
    arrays = same_varying(tuple(map(jnp.asarray, everything)))
    dtypes = arrays[0].dtype, arrays[5].dtype
    options = Options(checked_softcap(softcap), product_dtype(dtype, *arrays[:2]), gradient_dtypes=dtypes)

    def run(sharding: HeadSharding | None, *arrays: Array) -> TokenLogprobs:
        rows = rows_of(arrays[2].shape, sharding)
        inputs = _flat_inputs(rows.flat, *arrays[:5])
        engine, ids = _engine(impl, inputs, options, rows.sharding), next(map(rows.flat, arrays[6:]), None)
        tokens = autodiff.token_logprobs(engine, options, inputs, arrays[5], ids)
        return jax.tree.map(rows.folded, _without_bad_labels(tokens, inputs, ids))

    return run_on_mesh(run, sharding, arrays, lambda tokens: tokens)


def token_loss(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "*N"],
    objective: Objective,
    *operands: Shaped[Array, "*N"],
    where: Bool[Array, "*N"] | None = None,
    weights: Float[Array, "*N"] | None = None,
    ignore_index: int | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    weight_copy: Float[Array, "V D"] | None = None,
    workspace: int | None = None,
    dtype: Any = None,
    impl: Impl | None = None,
    sharding: HeadSharding | None = None,
) -> tuple[Float[Array, ""], TokenLogprobs]:
    """`sum_i weights_i * objective(logprob_i, entropy_i, *operands_i)`, and the tokens' statistics without gradient.

    Cross-entropy is `lambda logprob, entropy: -logprob`. The loss is a float32 scalar, differentiable in `hidden`,
    `weight`, `weights`, floating operands, and floating values that `objective` closes over (reverse mode, first
    order). Asked for the value alone, it does none of the gradient's work. A label that counts and is out of range
    makes it NaN.

    Args beyond those of `token_logprobs`:
        objective: any differentiable function of scalars (it runs under `jax.vmap`, a token at a time). What differs
            from token to token reaches it as an operand, floating, integer or boolean. An objective with a required
            keyword argument `lse` (for z-loss) or `mean_logit` (the mean of z over the vocabulary, for label
            smoothing) gets it, too; `mean_logit` reads the weight once more, and can't be had with a softcap.
        weights: each token's share in the loss; rows of weight 0 don't count. None: 1 everywhere.
        workspace: bytes that the loss may take beside the gradients and a few tiles. What backward needs is kept for
            as many tokens as fit, a wave: 3 matrix products; where the smallest wave doesn't fit, logits are computed
            twice: 4. The float32 sum of a narrower weight's gradient over several waves is workspace, too. None, in
            xla: float32 products of 256 tokens (1024 on accelerators); in mosaic_tpu, which uses none where the weight
            is frozen or the objective uses the entropy: exponentials of 1024 tokens; both without room for such a sum;
            in mosaic_gpu: float16 logits of 1024 tokens. chunked_logits keeps in it the logits of one chunk, 64 tokens
            at least; full_logits ignores it.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    rows: dict[str, Any] = {"where": where, "weights": weights, "ignore_index": ignore_index}
    how: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "weight_copy": weight_copy, "dtype": dtype}
    how |= {"workspace": workspace, "impl": impl, "sharding": sharding}
    return _token_loss(hidden, weight, labels, objective, operands, **rows, **how)


def token_loss_and_gradients(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "*N"],
    objective: Objective,
    *operands: Shaped[Array, "*N"],
    into: Float[Array, "V D"] | None = None,
    **options: Any,
) -> tuple[tuple[Float[Array, ""], TokenLogprobs], tuple[Float[Array, "*N D"], Float[Array, "V D"]]]:
    """What `token_loss` returns, dh, and dW in float32 whatever the weight's dtype, with `into` added.

    To accumulate gradients, give each call the dW of the one before: nothing is rounded between them. On one device xla
    sums in the memory of `into`, if that is donated or made in the same program; the kernels' engines are made to, and
    no compiler's account of them was read. Call it inside `jit`. `options` are those of `token_loss`.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    if into is not None and (np.shape(into), jnp.result_type(into)) != (np.shape(weight), jnp.float32):
        raise ValueError(f"into must be float32 {list(np.shape(weight))}, as weight is, not {jax.typeof(into)}")
    copy = options.pop("weight_copy", None)

    def loss(hidden: Array, master: Array) -> tuple[Array, TokenLogprobs]:
        own = {**options, "weight_copy": weight if copy is None else copy}
        return _token_loss(hidden, master, labels, objective, operands, into=into, **own)

    # No number of the master is read: it has the dtype of the gradient.
    master = jnp.zeros_like(weight, dtype=jnp.float32)
    return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, master)


def _token_loss(
    hidden: Any,
    weight: Any,
    labels: Any,
    objective: Any,
    operands: Sequence[Any],
    *,
    where: Any = None,
    weights: Any = None,
    ignore_index: int | None = None,
    temperature: Any = 1.0,
    softcap: float | None = None,
    weight_copy: Any = None,
    workspace: int | None = None,
    dtype: Any = None,
    impl: Impl | None = None,
    sharding: HeadSharding | None = None,
    into: Any = None,
) -> tuple[Float[Array, ""], TokenLogprobs]:
    if workspace is not None and (not isinstance(workspace, int) or workspace < 0):
        raise ValueError(f"workspace must be None or a number of bytes, not {workspace!r}")
    given: Any = np.ones(np.shape(labels), np.float32) if weights is None else weights
    named = {f"operands[{i}]": operand for i, operand in enumerate(operands)}
    copy = weight if weight_copy is None else weight_copy
    live = checked_live(hidden, weight, copy, ignore_index, labels=labels, where=where, weights=given, **named)
    statistics = autodiff.named_statistics(objective)
    if "mean_logit" in statistics and softcap is not None:
        raise ValueError("objective: mean_logit can't be had with a softcap, under which it is no function of mean(W)")
    sums = () if into is None else (into,)
    everything = (hidden, copy, labels, live, checked_temperature(temperature), weight, given, *sums, *operands)
    arrays = same_varying(tuple(map(jnp.asarray, everything)))
    of_operands = [*(x.dtype for x in arrays[7 + len(sums) :]), *[jnp.float32] * ("mean_logit" in statistics)]
    closed = autodiff.close_objective(objective, statistics, of_operands, varying_axes(arrays[0]))
    product, dtypes = product_dtype(dtype, *arrays[:2]), (arrays[0].dtype, arrays[5].dtype)
    slopes = closed.uses_entropy
    options = Options(checked_softcap(softcap), product, workspace, entropy_slopes=slopes, gradient_dtypes=dtypes)

    def run(sharding: HeadSharding | None, *arrays: Array) -> tuple[Float[Array, ""], TokenLogprobs]:
        hidden, copy, labels, live, temperature, weight, weights, *others = arrays
        into = others.pop(0) if sums else None
        rows = rows_of(labels.shape, sharding)
        inputs = _flat_inputs(rows.flat, hidden, copy, labels, live, temperature)
        per_token, shared = list(map(rows.flat, others[: len(operands)])), tuple(others[len(operands) :])
        if "mean_logit" in statistics:
            per_token.append(_mean_logit(inputs, weight))
        own = jnp.where(_has_bad_label(inputs), jnp.nan, rows.flat(weights).astype(jnp.float32))
        terms = Terms(own, tuple(per_token), shared)
        engine = _engine(impl, inputs, options, rows.sharding)
        loss, tokens = autodiff.token_loss(engine, options, closed.function, inputs, weight, terms, into)
        tokens = jax.lax.stop_gradient(_without_bad_labels(tokens, inputs))
        return loss, jax.tree.map(rows.folded, tokens)

    return run_on_mesh(run, sharding, (*arrays, *closed.shared), lambda tokens: (jax.sharding.PartitionSpec(), tokens))


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """The implementation that `impl=None` means, and a short clause: why this one, and why not a faster one."""

    impl: str
    reason: str


def choose_impl(
    hidden: Float[Array, "*N D"] | jax.ShapeDtypeStruct,
    weight: Float[Array, "V D"] | jax.ShapeDtypeStruct,
    *,
    dtype: Any = None,
    softcap: float | None = None,
    sharding: HeadSharding | None = None,
) -> EngineChoice:
    """The implementation that these arguments get here without an `impl`, never one with full logits, and the reason.

    "Here" is the mesh of `sharding`, else the mesh that is set, else JAX's default device. Arrays may be shapes and
    dtypes alone.
    """
    count = math.prod(hidden.shape[:-1])
    states = (count, hidden.shape[-1]), hidden.dtype
    arrays = (states, (weight.shape, weight.dtype), ((count,), jnp.int32), ((count,), jnp.bool_), ((), jnp.float32))
    inputs = Inputs(*(jax.ShapeDtypeStruct(*x) for x in arrays))  # type: ignore[arg-type]
    of_rows = None if sharding is None else sharding.of_rows
    return _choose(inputs, Options(checked_softcap(softcap), product_dtype(dtype, hidden, weight)), of_rows)


def _choose(inputs: Inputs, options: Options, sharding: HeadSharding | None) -> EngineChoice:
    platform = target.platform(None if sharding is None else sharding.mesh)
    impl, reason = _DEFAULTS.get(platform, _DEFAULTS["cpu"])
    kernels = "mosaic_gpu" if platform == "gpu" else impl
    why_not = placed(kernels, sharding).obstacle(inputs, options)
    return EngineChoice(impl, reason) if why_not is None else EngineChoice("xla", f"{kernels} can't run: {why_not}")


def _engine(impl: str | None, inputs: Inputs, options: Options, sharding: HeadSharding | None) -> Engine:
    if impl not in (None, *_ENGINES):
        raise ValueError(f"impl must be None or one of {', '.join(_ENGINES)}, not {impl!r}")
    if sharding is not None:
        sharding.check(inputs.hidden, inputs.weight)
    if not inputs.labels.size:  # without tokens, full logits are empty
        return full_logits
    if impl is None:
        impl = _choose(inputs, options, sharding).impl
    engine = placed(impl, sharding)
    why_not = engine.obstacle(inputs, options)
    if why_not is not None:
        raise ValueError(f"impl: {impl} can't run here: {why_not}")
    return engine


def placed(name: str, sharding: HeadSharding | None) -> Engine:
    """The engine of that name, on every device of a mesh if there is one."""
    engine = _ENGINES[name]
    return engine if sharding is None or sharding.mesh.size == 1 else Sharded(sharding.in_use(), engine)


def _flat_inputs(
    flat: Callable[[Array], Array], hidden: Array, weight: Array, labels: Array, live: Array, temperature: Array
) -> Inputs:
    return Inputs(flat(hidden), weight, flat(labels), flat(live), temperature)


def _has_bad_label(inputs: Inputs) -> Bool[Array, "N"]:
    """Whether a row counts and has a label out of range."""
    return inputs.live & ((inputs.labels < 0) | (inputs.labels >= len(inputs.weight)))


def _without_bad_labels(
    tokens: TokenLogprobs, inputs: Inputs, ids: Integer[Array, "N K"] | None = None
) -> TokenLogprobs:
    bad = _has_bad_label(inputs)
    # A factor, so that gradients are NaN as well.
    tokens = tokens._replace(logprob=tokens.logprob * jnp.where(bad, jnp.nan, 1), likeliest=tokens.likeliest & ~bad)
    if ids is None or tokens.candidates is None:
        return tokens
    bad_NK = inputs.live[:, None] & ((ids < 0) | (ids >= len(inputs.weight)))
    return tokens._replace(candidates=tokens.candidates * jnp.where(bad_NK, jnp.nan, 1))


def _mean_logit(inputs: Inputs, weight: Float[Array, "V D"]) -> Float[Array, "N"]:
    """The mean of the logits over the vocabulary, which is a product with the mean row of the copy that is multiplied.

    `weight` gets the gradient.
    """
    mean_D, copy_D = (jnp.mean(x, axis=0, dtype=jnp.float32) for x in (weight, inputs.weight))
    mean_D += jax.lax.stop_gradient(copy_D - mean_D)
    hidden_ND = jnp.where(inputs.live[:, None], inputs.hidden, 0).astype(jnp.float32)
    return jnp.sum(hidden_ND * mean_D, axis=1) / inputs.temperature


def checked_live(hidden: Any, weight: Any, copy: Any, ignore_index: int | None, **per_token: Any) -> Any:
    """The rows that count, [*N] boolean, after checks of the arrays that are given.

    `per_token` has `labels`, `where` and `weights` among others, by their names; None where they aren't given.
    """
    check_model("", hidden, weight)
    check_copy(copy, weight)
    given = {name: value for name, value in per_token.items() if value is not None}
    check_tokens(np.shape(hidden)[:-1], "hidden", given)
    live: Any = given.get("where", np.ones(np.shape(hidden)[:-1], np.bool_))
    if "weights" in given:
        live = live & (given["weights"] != 0)
    if ignore_index is not None:
        live = live & (given["labels"] != ignore_index)
    check_labels(given["labels"], live, vocabulary=np.shape(weight)[0])
    return live
