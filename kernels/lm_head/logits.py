"""Statistics of given logits: log-probability, log-normaliser and entropy, with one array of gradients.

A policy gradient takes one pass over the logits, and a second pass that writes their derivatives. logits_tpu.py has the
two passes as Pallas kernels.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import softmax as head
from . import target
from .arguments import as_array, as_int32, check_floating, check_labels, checked_temperature
from .contract import GivenLogits
from .shapes import Array, Bool, Float, Integer
from .softmax import Columns, Running, Slopes, Softmax, TokenLogprobs


def logits_logprobs(
    logits: Float[Array, "*N V"],
    labels: Integer[Array, "*N"],
    *,
    where: Bool[Array, "*N"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    vocabulary_axis: str | tuple[str, ...] | None = None,
    impl: Literal["xla", "mosaic_tpu"] | None = None,
    block: int = 256,
) -> TokenLogprobs:
    """The statistics of `softmax(logits / temperature)`, as `token_logprobs` has them: float32 [*N], in nats.

    It is differentiable in `logits` under any cotangent of the three (reverse mode, first order); the gradient has
    their dtype. A logit of -inf excludes its column: no probability, no share in the entropy, no gradient.

    Args:
        logits: bfloat16 or float32.
        labels: columns of the whole vocabulary; a traced label out of range has the logprob NaN.
        where: the rows that count. Other rows give 0, get no gradient and may hold anything.
        temperature: positive; a number, or a scalar that may be traced.
        vocabulary_axis: inside `jax.shard_map`, the mesh axis (or axes) that shards the columns evenly.
        impl: "xla"; "mosaic_tpu", for TPUs; None: the kernels if they run and need no copy of the logits, else XLA.
        block: rows that a kernel holds at a time, a multiple of 16.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    check_floating("logits", logits)
    if np.ndim(logits) == 0 or np.shape(logits)[-1] == 0:
        raise ValueError(f"logits must be [..., vocabulary], not {list(np.shape(logits))}")
    if impl not in (None, "xla", "mosaic_tpu"):
        raise ValueError(f"impl must be None, xla or mosaic_tpu, not {impl!r}")
    if block < 16 or block % 16:
        raise ValueError(f"block must be a multiple of 16, not {block}")
    lead, columns = np.shape(logits)[:-1], np.shape(logits)[-1]
    labels, live = as_array(labels), np.ones(lead, np.bool_) if where is None else as_array(where)
    for name, array in (("labels", labels), ("where", live)):
        if np.shape(array) != lead:
            raise ValueError(f"{name} must have logits' leading shape {list(lead)}, not {list(np.shape(array))}")
    axes = (vocabulary_axis,) if isinstance(vocabulary_axis, str) else vocabulary_axis
    vocabulary, first = columns, jnp.int32(0)
    if axes is not None:
        vocabulary, first = columns * lax.axis_size(axes), columns * lax.axis_index(axes)
    check_labels(labels, live, vocabulary)
    flat = [jnp.asarray(x).reshape(-1, *x.shape[len(lead) :]) for x in (as_array(logits), as_int32(labels), live)]
    bad = flat[2] & ((flat[1] < 0) | (flat[1] >= vocabulary))
    scale = 1 / checked_temperature("temperature", temperature)
    y_NV, label_N, live_N, scale = target.same_varying((flat[0], flat[1] - first, flat[2], scale))
    if impl is None or not y_NV.size:
        impl = "mosaic_tpu" if target.platform() == "tpu" and columns % 128 == 0 and y_NV.size else "xla"
    tokens = _logprobs(impl, axes, block, GivenLogits(y_NV, label_N, live_N, scale))
    tokens = tokens._replace(logprob=tokens.logprob * jnp.where(bad, jnp.nan, 1), likeliest=tokens.likeliest & ~bad)
    return jax.tree.map(lambda x: x.reshape(lead), tokens)


def sums(given: GivenLogits) -> Running:
    """The softmax's sums over this device's columns, in plain XLA."""
    y_NV = _above_mask(given.logits)
    nothing = head.empty_running(0 * given.live.astype(jnp.float32) + 0 * y_NV[:, 0])
    return head.include_tile(nothing, y_NV, _columns(given), given.scale)


def gradient(given: GivenLogits, softmax: Softmax, slopes: Slopes) -> Float[Array, "N V"]:
    """The derivatives by logits of a scalar with derivatives `slopes` by the statistics; elementwise, in plain XLA."""
    dz_NV = head.logit_slopes(_above_mask(given.logits), softmax, slopes, _columns(given), given.scale)
    return jnp.where(given.live[:, None], given.scale * dz_NV, 0).astype(given.logits.dtype)


def _above_mask(logits: Float[Array, "N V"]) -> Float[Array, "N V"]:
    return jnp.maximum(logits.astype(jnp.float32), head.MASKED)


def _columns(given: GivenLogits) -> Columns:
    column_V = jnp.arange(given.logits.shape[1])
    return Columns(jnp.ones_like(column_V, bool), column_V == given.labels[:, None])


def _passes(impl: str, block: int) -> tuple[Any, Any]:
    if impl == "xla":
        return sums, gradient
    from . import logits_tpu  # Pallas takes a while to import

    return functools.partial(logits_tpu.sums, block=block), functools.partial(logits_tpu.gradient, block=block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _logprobs(impl: str, axes: tuple[str, ...] | None, block: int, given: GivenLogits) -> TokenLogprobs:
    return _forward(impl, axes, block, given)[0]


def _forward(impl: str, axes: tuple[str, ...] | None, block: int, given: GivenLogits) -> tuple[TokenLogprobs, Any]:
    softmax = head.finish_live(_passes(impl, block)[0](given), given.live, given.scale, axes)
    return softmax.outputs(given.live, given.scale), (given, softmax)


def _backward(
    impl: str, _: Any, block: int, saved: tuple[GivenLogits, Softmax], cotangents: TokenLogprobs
) -> tuple[GivenLogits]:
    (given, softmax), slopes = saved, Slopes(*(jnp.where(saved[0].live, x, 0) for x in cotangents[:3]))
    gradients = _passes(impl, block)[1](given, softmax, slopes)
    return (GivenLogits(gradients, None, None, None),)  # type: ignore[arg-type]  # None: no cotangent


_logprobs.defvjp(_forward, _backward)
