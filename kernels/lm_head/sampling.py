"""Tokens drawn in one pass over the vocabulary: Gumbel-max (Maddison et al. 2014, A* sampling, section 2).

The noise of a token is a function of its row's key and its id alone, that of `jax.random.gumbel(key, (V,))`: the same
keys give the same tokens whatever the tiles and devices, to rounding. top-k keeps a list in the same pass. top-p alone
bisects for the logits that it keeps, over logits [N, V], and sorts nothing.

Suffixes: N rows, R rows of a block; V vocabulary, T columns of a tile, K columns of a list.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from kernels.lm_head import contract, full_logits
from kernels.lm_head.arguments import checked_inputs
from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.layout import HeadSharding
from kernels.lm_head.softmax import Softmax
from kernels.lm_head.top_k import Lists, first_column, largest, of_all_shards, over_rows, search


def sample_tokens(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    key: Key[Array, "*N"] | Key[Array, ""],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    softcap: float | None = None,
    dtype: Any = None,
    sharding: HeadSharding | None = None,
) -> tuple[Int[Array, "*N"], Float[Array, "*N"]]:
    """A token for each row, int32, and its log-probability before top-k and top-p, float32: one matrix product.

    Args:
        key: threefry2x32 keys, one for each row, or one alone, to which the number of a row is folded in.
        temperature: as for `token_logprobs`, and so are softcap, dtype, sharding and the ValueError.
        top_k: only the k likeliest tokens are drawn. None: all.
        top_p: of these only the fewest likeliest that have this probability together. Logits [N, V] are made without a
            `top_k`. None: all. Tokens as likely as the last one kept are kept, with either.
    """
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be None or a number from 1 on, not {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be None or within (0, 1], not {top_p}")
    k = None if top_k is None or top_k >= np.shape(weight)[0] else top_k
    p = None if top_p is None or top_p == 1 else top_p

    def pass_(inputs: Inputs, options: Options, keys_N2: Array) -> Lists:
        if k is None and p is not None:
            softmax, lists = _from_logits(inputs, options, keys_N2, p)
        else:
            choose = _drawn if k is None else lambda lists: _likeliest(k, lists)
            noise = lambda id_T, row_R: gumbel(keys_N2[row_R], id_T)  # noqa: E731
            softmax, lists = search(inputs, options, k or 1, choose, noise)
        z_NK, id_NK, noisy_NK = of_all_shards(options, lists)
        if k is not None:
            likeliest_NK = lax.top_k(z_NK, k)[0]
            if p is not None:
                share_NK = jax.nn.softmax(likeliest_NK)
                before_NK = jnp.cumsum(share_NK, axis=1) - share_NK
                likeliest_NK = jnp.where(before_NK < p, likeliest_NK, jnp.inf)
            noisy_NK = jnp.where(z_NK >= likeliest_NK.min(axis=1, keepdims=True), noisy_NK, -jnp.inf)
        z_N1, id_N1, _ = _drawn((z_NK, id_NK, noisy_NK))
        return id_N1[:, 0], (z_N1[:, 0] - softmax.top) - softmax.log_sum_e

    keys = _row_keys(key, np.shape(hidden)[:-1])
    return over_rows(pass_, sharding, checked_inputs(hidden, weight, temperature=temperature), softcap, dtype, keys)


def kept_by_top_p(z_NV: Float[Array, "N V"], top_p: float, axis: str | None = None) -> Bool[Array, "N V"]:
    """Which logits top-p keeps: those above which there is less than `top_p` of the probability.

    It takes 30 sums over the logits; those that differ by less than 1e-7, as float32 probabilities do, may count as
    equal. `axis` is the mesh axis over which columns are spread, inside `shard_map`.
    """

    def mass(kept_NV: Array | bool) -> Float[Array, "N 1"]:
        sums_N1 = jnp.sum(jnp.where(kept_NV, jnp.exp(z_NV - top_N1), 0), axis=1, keepdims=True)
        return sums_N1 if axis is None else lax.psum(sums_N1, axis)

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low_N1, high_N1 = ends  # the least logit that is kept is above `low_N1`, and at most `high_N1`
        middle_N1 = low_N1 + (high_N1 - low_N1) / 2
        is_kept_N1 = mass(z_NV > middle_N1) < wanted_N1
        return jnp.where(is_kept_N1, low_N1, middle_N1), jnp.where(is_kept_N1, middle_N1, high_N1)

    top_N1 = z_NV.max(axis=1, keepdims=True)
    top_N1 = top_N1 if axis is None else lax.pmax(top_N1, axis)
    wanted_N1 = top_p * mass(True)
    columns = z_NV.shape[1] * (1 if axis is None else lax.psum(1, axis))
    # All tokens below this depth have less than 1 - top_p together. Near 1e9, logits are further apart than that.
    depth = 1 + math.log(columns / (1 - top_p))
    low_N1 = jnp.minimum(top_N1 - depth, jnp.nextafter(top_N1, -jnp.inf))
    return z_NV > lax.fori_loop(0, 30, halve, (low_N1, top_N1))[0]


def gumbel(keys_R2: UInt32[Array, "R 2"], id_T: Int[Array, "T"]) -> Float[Array, "R T"]:
    """The numbers at these ids of `jax.random.gumbel(key, (V,))`, V above all of them, for each row's key."""
    counts_RT = jnp.broadcast_to(id_T.astype(jnp.uint32), (len(keys_R2), len(id_T)))
    words = (jnp.broadcast_to(keys_R2[:, i : i + 1], counts_RT.shape) for i in range(2))
    high, low = threefry2x32_p.bind(*words, jnp.zeros_like(counts_RT), counts_RT)
    uniform = lax.bitcast_convert_type((high ^ low) >> 9 | jnp.uint32(0x3F800000), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def _drawn(lists: Lists) -> Lists:
    """The column with the largest sum of logit and noise."""
    return largest(1, lists, by=2)


def _likeliest(k: int, lists: Lists) -> Lists:
    """The k likeliest columns, but last the one that would be drawn of all that are as likely as the k-th."""
    found = largest(k, lists)
    z, ids, noisy = lists
    last = _drawn((z, ids, jnp.where(z == found[0][:, -1:], noisy, -jnp.inf)))
    return tuple(jnp.concatenate([x[:, :-1], y], axis=1) for x, y in zip(found, last, strict=True))


def _from_logits(inputs: Inputs, options: Options, keys_N2: Array, top_p: float) -> tuple[Softmax, Lists]:
    """The statistics, and the column that is drawn of those that top-p keeps."""
    softmax, y_NV = full_logits.forward(inputs, options)
    column_V = jnp.arange(len(inputs.weight), dtype=jnp.int32)
    within_V, id_V = column_V < contract.number_of_columns(inputs), first_column(options, inputs) + column_V
    z_NV = jnp.where(within_V, contract.logits_of(inputs, options, y_NV), -jnp.inf)
    kept_NV = kept_by_top_p(z_NV, top_p, options.vocabulary_axis)
    noisy_NV = jnp.where(kept_NV, z_NV + gumbel(keys_N2, id_V), -jnp.inf)
    return softmax, _drawn((z_NV, jnp.broadcast_to(id_V, z_NV.shape), noisy_NV))


def _row_keys(key: Any, lead: tuple[int, ...]) -> UInt32[Array, "*N 2"]:
    """The two words of each row's key."""
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or str(dtype) != "key<fry>":
        raise ValueError(f"key must be made by jax.random.key with impl='threefry2x32', and is {dtype or key!r}")
    if shape not in ((), lead):
        raise ValueError(f"key must be one, or have hidden's leading shape {list(lead)}, not {list(shape)}")
    if shape != lead:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(np.prod(lead, dtype=int))).reshape(lead)
    return jax.random.key_data(key)
