"""The head with the logits of a chunk of tokens at a time, made again for the gradients: the baseline in little memory.

It is what JAX trainers do by `jax.checkpoint` in a scan over tokens, in its strongest form: full logits' program for as
many tokens as the fused head's default keeps the logits of, or as fit the workspace. dW is summed in float32; rows that
don't count cost as much as the others.

Suffixes: R rows of a chunk, D features, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import contract, full_logits, target
from .contract import Gradients, Inputs, Options, Terms
from .live_rows import round_up
from .shapes import Array
from .softmax import Slopes, Softmax

_CPU_ROWS, _ROWS, _LEAST_ROWS = 256, 1024, 64


def most_rows(platform: str) -> int:
    """The rows of a chunk without a workspace, at most."""
    return _CPU_ROWS if platform == "cpu" else _ROWS


def obstacle(inputs: Inputs, options: Options) -> None:
    """Nothing keeps it from running."""


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, None]:
    """The statistics: 1 matrix product."""

    def chunk(rows: dict[str, Array]) -> Softmax:
        return full_logits.forward(inputs._replace(**rows), options.values_alone)[0]

    return _joined(inputs, lax.map(chunk, _chunks(inputs, options))), None


def gradients(
    inputs: Inputs,
    softmax: Softmax,
    saved: None,
    slopes: Slopes,
    options: Options,
) -> Gradients:
    """The gradients: 3 matrix products, 2 for one gradient alone."""
    dh_dtype, dw_dtype = contract.gradient_dtypes(inputs, options)
    # The statistics that are made again with the logits are not used: without an axis nothing is exchanged for them.
    again = dataclasses.replace(options, vocabulary_axis=None, gradient_dtypes=(dh_dtype, jnp.dtype(jnp.float32)))

    def chunk(dw_VD: Array | None, chunk: Any) -> tuple[Array | None, Array | None]:
        rows, softmax_R, slopes_R = chunk
        own = inputs._replace(**rows)
        _, y_RV = full_logits.forward(own, again)
        dh_RD, more_VD = full_logits.gradients(own, softmax_R, y_RV, slopes_R, again)
        return jax.tree.map(jnp.add, dw_VD, more_VD), dh_RD

    dw_VD = contract.zeros(inputs, *inputs.weight.shape) if options.wants_weight else None
    dw_VD, dh_CRD = lax.scan(chunk, dw_VD, (_chunks(inputs, options), *_chunks(inputs, options, (softmax, slopes))))
    return _joined(inputs, dh_CRD), None if dw_VD is None else dw_VD.astype(dw_dtype)


def loss_and_gradients(inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
    softmax, _ = forward(inputs, options)
    slopes = contract.loss_slopes(inputs.live, softmax, terms)
    return softmax, gradients(inputs, softmax, None, slopes, options)


def _chunks(inputs: Inputs, options: Options, arrays: Any = None) -> Any:
    """A tree of arrays [N, ...], by default those of the inputs, as chunks [C, R, ...] of one size."""
    most, count = most_rows(target.platform()), len(inputs.labels)
    if options.workspace is not None:
        most = max(_LEAST_ROWS, options.workspace // (4 * len(inputs.weight)) // 8 * 8)
    rows = round_up(-(-count // -(-count // most)), min(8, count))

    def chunks(x: Array) -> Array:
        return jnp.pad(x, ((0, -count % rows), *[(0, 0)] * (x.ndim - 1))).reshape(-1, rows, *x.shape[1:])

    own = {"hidden": inputs.hidden, "labels": inputs.labels, "live": inputs.live}
    return jax.tree.map(chunks, own if arrays is None else arrays)


def _joined(inputs: Inputs, chunks: Any) -> Any:
    """A tree of arrays [N, ...] of chunks [C, R, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: len(inputs.labels)], chunks)
