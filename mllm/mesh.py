"""The device mesh, and the one table that says how everything is laid out on it.

A dimension of a parameter or of a batch has a logical name; `RULES` maps that name to mesh axes, and nothing else in
the project speaks of mesh axes. dp replicates the parameters, fsdp shards them along the hidden size and gathers them
at use, tp shards heads, the feed-forward layer and the vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mllm.config import MeshConfig
from mllm.errors import UserError

RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": ("dp", "fsdp"),
    "time": None,
    "layers": None,
    "embed": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "mlp": "tp",
}


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh (dp, fsdp, tp) over the first dp * fsdp * tp devices.

    Raises:
        UserError: there are fewer devices, or they belong to several processes.
    """
    if jax.process_count() > 1:
        raise UserError(f"mesh: {jax.process_count()} processes; this version trains with the devices of one")
    shape = (config.dp, config.fsdp, config.tp)
    needed, devices = int(np.prod(shape)), jax.devices()
    if needed > len(devices):
        raise UserError(f"mesh: dp * fsdp * tp = {needed}, but there are {len(devices)} devices: lower one of them")
    grid = np.array(devices[:needed]).reshape(shape)
    return Mesh(grid, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)


def sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """The layout of an array whose dimensions have the logical names `axes`; None is never sharded."""
    return NamedSharding(mesh, PartitionSpec(*(axis and RULES[axis] for axis in axes)))


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """Lay a batch's arrays, [B, T] each, out over the devices."""
    return jax.device_put(batch, sharding(mesh, ("batch", "time")))


def check_divides(mesh: Mesh, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
    """Raise UserError where a dimension of the parameter `name` can't be divided over its mesh axes."""
    for size, axis in zip(shape, axes, strict=True):
        mesh_axis = axis and RULES[axis]
        if isinstance(mesh_axis, str) and size % mesh.shape[mesh_axis]:
            raise UserError(
                f"mesh.{mesh_axis}: {mesh.shape[mesh_axis]} does not divide {name}'s dimension {axis} of {size}"
            )
