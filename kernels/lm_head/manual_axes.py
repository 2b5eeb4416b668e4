"""The mesh axes over which a value differs from device to device inside `jax.shard_map`, by its type.

Arguments of a custom derivative must agree, cotangents with their primals, a loop's first carry with its last.
"""

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp


def varying_axes(*arrays: Any) -> Set[str]:
    """The axes over which one of the arrays varies."""
    return frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary(x: Any, axes: Set[str]) -> jax.Array:
    """`x` as a value that may differ over `axes` too. Transposed, this is a sum over the axes that were added."""
    added = tuple(axes - varying_axes(x))
    return jax.lax.pcast(x, added, to="varying") if added else jnp.asarray(x)


def same_varying(arrays: Any) -> Any:
    """A tree of arrays, each of which may vary over every axis that one of them varies over (see `vary`)."""
    axes = varying_axes(*jax.tree.leaves(arrays))
    return jax.tree.map(lambda x: vary(x, axes), arrays)
