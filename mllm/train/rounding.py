"""Updates of bfloat16 parameters: computed in float32, and rounded up or down at random, so that their mean is exact.

A learning rate of 1e-6 moves a weight by much less than half the distance of two bfloat16 numbers: rounded to nearest
it would never move. The optimizer's moments, which would stall where b2 is near 1, are rounded in the same way.
docs/log.md has the figures.

Stochastic rounding: Gupta et al. 2015, Deep learning with limited numerical precision, section 3.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, keystr
from jaxtyping import Array, BFloat16, Float32, Key

from mllm.model.layout import Params


def updated(
    optimizer: optax.GradientTransformation,
    gradients: Params,
    params: Params,
    opt_state: optax.OptState,
    key: Key[Array, ""],
) -> tuple[Params, optax.OptState]:
    """Parameters and optimizer's state after an update, in the dtypes that they had; `key` is the update's own."""
    wide = jax.tree.map(widen, (gradients, opt_state, params))
    updates, state = optimizer.update(*wide)
    new = optax.apply_updates(wide[2], updates), state

    def narrow(path: KeyPath, value: Any, old: Any) -> Any:
        if value.dtype == old.dtype:
            return value
        return round_at_random(value, jax.random.fold_in(key, zlib.crc32(keystr(path).encode())))

    return jax.tree_util.tree_map_with_path(narrow, new, (params, opt_state))


def widen(leaf: Any) -> Any:
    """Numbers in float32; counts as they are."""
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def round_at_random(values: Float32[Array, "*S"], key: Key[Array, ""]) -> BFloat16[Array, "*S"]:
    """Each number's neighbour below or above in bfloat16, the nearer one more likely; what bfloat16 can hold stays."""
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    cut = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    # A carry would make other numbers of infinity and NaN.
    return jnp.where(jnp.isfinite(values), cut, values).astype(jnp.bfloat16)


def update_key(seed: int, step: Any) -> Key[Array, ""]:
    """The random key of an update; no token is sampled with it."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(b"rounding"))
    return jax.random.fold_in(key, step)
