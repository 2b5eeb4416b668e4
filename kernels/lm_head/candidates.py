"""Log-probabilities of several ids a row: products of hidden states and gathered rows of W, in blocks of bounded size.

A block is of pairs of a row that counts and one of its ids, so far as this device has the id's row of W; the ids are
`labels` [N, K] of the inputs. Products are float32 sums of operands in the products' dtype. An engine's pass gives the
normaliser.

Suffixes: N rows, K ids a row, P pairs of a block, M all pairs rounded up to whole blocks, D features.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from kernels.lm_head import contract
from kernels.lm_head.contract import Gradients, Inputs, Options
from kernels.lm_head.live_rows import LiveRows, live_rows, round_up, write

_ELEMENTS = 2**21  # of the rows that a block gathers from W: 8 MiB in float32, and as much from hidden states


def logits(inputs: Inputs, options: Options) -> Float[Array, "N K"]:
    """The logits of the ids, 0 at rows that don't count and where an id is out of range."""
    if not inputs.labels.size:
        return jnp.zeros(inputs.labels.shape)
    here_NK, pairs, block = _pairs(inputs)

    def body(i: Array, z_M: Array) -> Array:
        pair_P, _ = pairs.block(i, block)
        return write(z_M, contract.logits_of(inputs, options, _products(inputs, options, pair_P)[0]), i * block)

    z_M = pairs.over_blocks(block, body, contract.zeros(inputs, len(pairs.row)))
    z_NK = jnp.where(here_NK, z_M[pairs.place].reshape(here_NK.shape), 0)
    return z_NK if options.vocabulary_axis is None else lax.psum(z_NK, options.vocabulary_axis)


def gradients(inputs: Inputs, options: Options, slopes_NK: Float[Array, "N K"]) -> Gradients:
    """The wanted gradients of a scalar with these derivatives by the logits; dh is the part of this vocabulary shard.

    Sums are float32: where the weight is narrower, of its shape, too.
    """
    _, pairs, block = _pairs(inputs)
    slopes = slopes_NK.reshape(-1)

    def body(i: Array, carry: Any) -> Any:
        dh_ND, dw_VD = carry
        pair_P, live_P = pairs.block(i, block)
        y_P, row_P, id_P, h_PD, w_PD = _products(inputs, options, pair_P)
        _, pull = jax.vjp(lambda y_P: contract.logits_of(inputs, options, y_P), y_P)
        dy_P1 = pull(jnp.where(live_P, slopes[pair_P], 0))[0][:, None]
        return (
            None if dh_ND is None else dh_ND.at[row_P].add(dy_P1 * w_PD),
            None if dw_VD is None else dw_VD.at[id_P].add(dy_P1 * h_PD),
        )

    wanted = zip((inputs.hidden, inputs.weight), (options.wants_hidden, options.wants_weight), strict=True)
    sums = [contract.zeros(inputs, *x.shape) if wants else None for x, wants in wanted]
    dh_ND, dw_VD = pairs.over_blocks(block, body, tuple(sums))
    dh_dtype, dw_dtype = contract.gradient_dtypes(inputs, options)
    return None if dh_ND is None else dh_ND.astype(dh_dtype), None if dw_VD is None else dw_VD.astype(dw_dtype)


def _pairs(inputs: Inputs) -> tuple[Bool[Array, "N K"], LiveRows, int]:
    """Which pairs are in a block, their order, and how many are in each block."""
    ids_NK, columns = inputs.labels, contract.number_of_columns(inputs)
    here_NK = inputs.live[:, None] & (ids_NK >= 0) & (ids_NK < columns)
    block = min(max(8, _ELEMENTS // inputs.weight.shape[1]), round_up(ids_NK.size, 8))
    return here_NK, live_rows(here_NK.reshape(-1), block), block


def _products(inputs: Inputs, options: Options, pair_P: Array) -> tuple[Array, Array, Array, Array, Array]:
    """The products of pairs, their rows, ids, and operands in float32."""
    row_P, id_P = pair_P // inputs.labels.shape[1], inputs.labels.reshape(-1)[pair_P]
    h_PD, w_PD = (
        x[i].astype(options.dtype).astype(jnp.float32) for x, i in ((inputs.hidden, row_P), (inputs.weight, id_P))
    )
    return jnp.sum(h_PD * w_PD, axis=1), row_P, id_P, h_PD, w_PD
