"""Logits whose statistics are known, each way of taking them, and the assertion that what comes out is accurate.

The head's oracle with the identity for a weight is one for logits: hidden states are then the logits. Tiles are small
here, so that 300 columns are several. The Pallas kernels run under the strict interpreter.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from lm_head_cases import Plain, assert_as_accurate_as_plain, plain_values_and_gradients, random_cotangents
from oracle import exact
from strict_tpu import strict_interpreter

from kernels.lm_head import TokenLogprobs
from kernels.logits import logits_logprobs
from kernels.logits import tpu as logits_tpu
from kernels.logits import xla as logits_xla

WAYS = ("tiles", "reduction", "kernels")
"""XLA's on a CPU, XLA's on accelerators, and the Pallas kernels."""

SMALL = (20, 300)
ACROSS = (120, 300)  # a TPU has the rows of these in its lanes

every_way = pytest.mark.parametrize("way", WAYS)
every_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that 300 columns are several tiles."""
    monkeypatch.setattr(logits_xla, "_COLUMNS", 128)
    monkeypatch.setattr(logits_tpu, "_TILE", {2: (16, 1024), 1: (128, 512)})
    monkeypatch.setattr(logits_tpu, "_AT_A_TIME", 1)
    monkeypatch.setattr(logits_tpu, "_IN_A_TURN", 2)


@contextlib.contextmanager
def taking(way: str, **strictness: Any) -> Iterator[str]:
    """The implementation's name; what is traced and run within goes that way."""
    if way == "kernels":
        with mock.patch.object(interpreter, "interpret_pallas_call", unpadded), strict_interpreter(**strictness):
            yield "mosaic_tpu"
    else:
        platform = {"tiles": "cpu", "reduction": "gpu"}[way]
        with mock.patch.object(logits_xla.target, "platform", return_value=platform):
            yield "xla"


def unpadded(*args: Any, out_avals: Any, **options: Any) -> list[jax.Array]:
    """JAX's interpreter pads an operand to whole blocks, and forgets that where a result takes its place."""
    results = interpret(*args, out_avals=out_avals, **options)
    return [x[tuple(map(slice, aval.shape))] for x, aval in zip(results, out_avals, strict=True)]


interpret = interpreter.interpret_pallas_call


def pulled_back(
    logits: jax.Array, labels: jax.Array, cotangents: TokenLogprobs, **options: Any
) -> tuple[TokenLogprobs, jax.Array]:
    """Values and gradient."""
    outputs, pull_back = jax.vjp(lambda logits: logits_logprobs(logits, labels, **options), logits)
    return outputs, pull_back(cotangents)[0]


@functools.cache
def jitted(function: Callable[..., Any], way: str) -> Callable[..., Any]:
    """To be traced within `taking`; once, since compiling takes most of the time."""
    return jax.jit(functools.partial(function, impl="mosaic_tpu" if way == "kernels" else "xla"))


def run(way: str, *args: Any, where: Any = None, temperature: float = 1.0) -> tuple[TokenLogprobs, jax.Array]:
    with taking(way):
        return jax.block_until_ready(jitted(pulled_back, way)(*args, where=where, temperature=temperature))


def problem(shape: tuple[int, int], scale: float = 3.0, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Logits, and labels of which the first is 0 and the last V-1."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=shape) * scale, rng.integers(0, shape[1], shape[0])
    labels[0], labels[-1] = 0, shape[1] - 1
    return jnp.asarray(logits, dtype), jnp.asarray(labels, jnp.int32)


def assert_accurate(
    got: tuple[TokenLogprobs, jax.Array],
    logits: jax.Array,
    labels: jax.Array,
    cotangents: TokenLogprobs,
    live: np.ndarray | None = None,
    temperature: float = 1.0,
) -> None:
    """Asserts the head's criterion: no less accurate than the plain program, plus a hair."""
    live = np.ones(len(labels), bool) if live is None else live
    safe = np.where(live, labels, 0)
    options = {"where": live, "temperature": temperature}
    truth = exact(logits, np.eye(logits.shape[1]), safe, lambda *_: cotangents, **options)
    identity = jnp.eye(logits.shape[1], dtype=logits.dtype)
    yardstick = plain_values_and_gradients(logits, identity, jnp.asarray(safe), cotangents, **options)
    nothing = np.zeros(1)  # for the gradient by the weight
    outputs, gradient = got
    found = Plain(*outputs, gradient, nothing)
    assert_as_accurate_as_plain(found, yardstick._replace(weight=nothing), truth._replace(weight=nothing))


def check(
    way: str,
    logits: jax.Array,
    labels: jax.Array,
    cotangents: TokenLogprobs | None = None,
    live: np.ndarray | None = None,
    temperature: float = 1.0,
) -> tuple[TokenLogprobs, jax.Array]:
    """Values and gradient, after they were found accurate."""
    cotangents = random_cotangents(len(labels)) if cotangents is None else cotangents
    got = run(way, logits, labels, cotangents, where=live, temperature=temperature)
    assert_accurate(got, logits, labels, cotangents, live, temperature)
    return got
