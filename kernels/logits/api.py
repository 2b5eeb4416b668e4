"""Statistics and gradient of logits that exist already: checks of the arguments, and the rule of differentiation.

The passes are in xla.py and, as Pallas kernels for TPUs, in tpu.py. It has neither a softcap nor sharding: on a mesh,
call it inside `jax.shard_map` on rows that have all their columns.
"""

import functools
from types import ModuleType
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from kernels.lm_head import target
from kernels.lm_head.arguments import check_floating, check_labels, check_tokens, checked_temperature
from kernels.lm_head.softmax import Slopes, Softmax, TokenLogprobs, finish
from kernels.lm_head.target import same_varying
from kernels.logits import tpu as logits_tpu
from kernels.logits import xla as logits_xla
from kernels.logits.xla import Given

Impl = Literal["xla", "mosaic_tpu"]

_PASSES = {"xla": logits_xla, "mosaic_tpu": logits_tpu}


def logits_logprobs(
    logits: Float[Array, "*N V"],
    labels: Integer[Array, "*N"],
    *,
    where: Bool[Array, "*N"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    impl: Impl | None = None,
) -> TokenLogprobs:
    """Log-probability of each label, log-normaliser and entropy under `softmax(logits / temperature)`: float32, nats.

    It is differentiable in `logits` as `token_logprobs` is in hidden states. The gradient is written over the logits if
    they are donated or made in the same program. A logit of -inf excludes its column: p = 0, no share in the entropy,
    no gradient; a label there has logprob -inf.

    Args:
        logits: bfloat16 or float32.
        labels: columns of `logits`, as for `token_logprobs`.
        where: the rows that count. The others give 0, get no gradient and may hold anything.
        temperature: as for `token_logprobs`.
        impl: "xla"; "mosaic_tpu", for TPUs; None for the faster that runs here.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    check_floating("logits", logits)
    if np.ndim(logits) == 0 or np.shape(logits)[-1] == 0:
        raise ValueError(f"logits must be [..., vocabulary], not {list(np.shape(logits))}")
    lead = np.shape(logits)[:-1]
    live = np.ones(lead, np.bool_) if where is None else where
    check_tokens(lead, "logits", {"labels": labels, "where": live})
    check_labels(labels, live, vocabulary=np.shape(logits)[-1])
    scale = 1 / checked_temperature(temperature)
    given = Given(jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(live), scale)
    return _logprobs(_passes(impl, given.logits), same_varying(given))


def _passes(impl: str | None, logits: Float[Array, "*N V"]) -> ModuleType:
    if impl not in (None, *_PASSES):
        raise ValueError(f"impl must be None or one of {', '.join(_PASSES)}, not {impl!r}")
    why_not = logits_tpu.obstacle(logits)
    if impl == "mosaic_tpu" and why_not is not None:
        raise ValueError(f"impl: {impl} can't run here: {why_not}")
    if impl is None:
        by_kernels = target.platform() == "tpu" and why_not is None and logits_tpu.has_rows_in_order(logits)
        impl = "mosaic_tpu" if by_kernels else "xla"
    return _PASSES[impl]


# --- the rule of differentiation ----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(passes: ModuleType, given: Given) -> TokenLogprobs:
    return _forward(passes, given)[0]


def _forward(passes: ModuleType, given: Given) -> tuple[TokenLogprobs, tuple[Given, Softmax]]:
    softmax = finish(passes.sums(given))
    softmax = Softmax(*(jnp.where(given.live, x, 0) for x in softmax))
    return softmax.outputs(given.live), (given, softmax)


def _backward(passes: ModuleType, saved: tuple[Given, Softmax], cotangents: TokenLogprobs) -> tuple[Given]:
    given, softmax = saved
    gradient = passes.gradient(given, softmax, Slopes(*cotangents[:3]))
    return (Given(gradient, None, None, None),)  # type: ignore[arg-type]  # None: no cotangent


_logprobs.defvjp(_forward, _backward)
