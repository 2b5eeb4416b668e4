"""How many of a run's weights have moved as products see them: the metric `params/moved`.

A sample of the trained matrices' weights is kept as it was at the start, not rounded: every n-th of every n-th row, for
one n that depends on the parameters' sizes alone, so that no mesh changes it. Of a small model it is all of them.
"""

import math
from base64 import b64decode, b64encode
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int

from mllm.model.compute_copy import Rounding, compute_copy
from mllm.model.int8 import is_int8
from mllm.model.layout import Params, count
from mllm.run.checkpoint import by_name

SAMPLED = 2**15


def sample(params: Params) -> str:
    """The sampled weights of a tree of parameters, float32 in base64; all processes must call this."""
    return b64encode(np.concatenate([weights.ravel() for weights in sampled(params)[0].values()]).tobytes()).decode()


def moved_share(first: str, params: Params, rounding: Rounding) -> float:
    """The share of sampled weights whose compute copies differ from those of the `first`, which `sample` has given."""
    then = np.frombuffer(b64decode(first), np.float32)
    return int(count_changed(then, *sampled(params), rounding)) / then.size


def sampled(params: Params) -> tuple[dict[str, Float32[np.ndarray, "L R C"]], int]:
    """The sampled weights of each matrix, and the distance of their rows and columns: odd, as no size of a head is."""
    leaves = by_name(params, is_int8).items()
    matrices = {name: leaf for name, leaf in leaves if leaf.ndim - name.startswith("layers.") == 2}
    stride = math.ceil(math.sqrt(max(1, count(matrices) / SAMPLED))) // 2 * 2 + 1
    whole = NamedSharding(jax.tree.leaves(matrices)[0].sharding.mesh, PartitionSpec())
    return jax.tree.map(np.asarray, take(matrices, stride, whole)), stride


@partial(jax.jit, static_argnames=("stride", "sharding"))
def take(matrices: dict[str, Any], stride: int, sharding: Any) -> dict[str, Float32[Array, "L R C"]]:
    def at(leaf: Any) -> Float32[Array, "L R C"]:
        # By indices: XLA would exchange whole shards for a slice.
        rows, columns = (np.arange(0, size, stride) for size in leaf.shape[-2:])
        values, scales = (leaf.values, leaf.scales[..., rows, None]) if is_int8(leaf) else (leaf, 1)
        return (scales * values[..., rows[:, None], columns].astype(jnp.float32)).reshape(-1, len(rows), len(columns))

    return jax.lax.with_sharding_constraint(jax.tree.map(at, matrices, is_leaf=is_int8), sharding)


@partial(jax.jit, static_argnames=("stride", "rounding"))
def count_changed(then: Float32[Array, "N"], now: dict[str, Any], stride: int, rounding: Rounding) -> Int[Array, ""]:
    moved = jnp.int32(0)
    for name, weights in now.items():
        first, then = then[: weights.size].reshape(weights.shape), then[weights.size :]
        rows, columns = (stride * jnp.arange(size) for size in weights.shape[1:])
        one, other = (compute_copy(x, rounding, name, 0, rows[:, None], columns) for x in (first, weights))
        moved += jnp.sum(one != other)
    return moved
