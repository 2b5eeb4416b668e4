"""The device mesh, and the one table, `RULES`, that maps logical names of dims to mesh axes.

dp replicates the parameters. fsdp shards them along the hidden size and gathers them at use. tp shards heads, the
feed-forward layer and the vocabulary.
"""

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mllm.config.model import MeshConfig
from mllm.errors import UserError

AXES = ("dp", "fsdp", "tp")
GPU_SHARE = 0.9
"""The share of a GPU's memory that JAX may use."""

RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": ("dp", "fsdp"),
    "rows_of_replica": "dp",
    "time": None,
    "places": None,
    "hidden": None,
    "layers": None,
    "embed": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "mlp": "tp",
    "rank": None,
    "taps": None,
}
"""`embed` is a parameter's hidden size, `hidden` an activation's; `rows_of_replica` are a batch's rows where each
device along fsdp has all rows of its replica."""


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh (dp, fsdp, tp) over the first devices; the configuration gives their numbers.

    UserError is raised where there are too few devices, or processes would be idle.
    """
    axes = config.model_dump()
    needed, devices = int(np.prod(list(axes.values()))), jax.devices()
    if needed > len(devices):
        raise UserError(
            f"mesh: dp * fsdp * tp = {needed}, more than the number of devices, {len(devices)}: lower one of them"
        )
    if needed < len(devices) and jax.process_count() > 1:
        unused = f"the {jax.process_count()} processes have {len(devices)} devices and must use all"
        raise UserError(f"mesh: dp * fsdp * tp = {needed}, but {unused}: raise one of them")
    grid = np.array(devices[:needed]).reshape([axes[axis] for axis in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """The sharding of an array with the logical names `axes` of its dims; None is never sharded."""
    return NamedSharding(mesh, PartitionSpec(*(axis and RULES[axis] for axis in axes)))


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """A tree of arrays [B, ...], a row for each sequence, with its rows spread over the devices.

    Each process passes NumPy arrays with the rows of its own devices, or JAX arrays with all rows.
    """
    rows = sharding(mesh, ("batch",))

    def shard(array: Any) -> jax.Array:
        if isinstance(array, jax.Array):
            return jax.device_put(array, rows)
        return jax.make_array_from_process_local_data(rows, np.asarray(array))

    return jax.tree.map(shard, batch)


def claim_gpu_memory() -> None:
    """Let JAX use `GPU_SHARE` of each GPU's memory, in place of three quarters. CUDA and NCCL need some of the rest.

    Call this before JAX's first use of a device. A share that the environment names stays.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name; JAX refuses both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_SHARE))


def device_memory(mesh: Mesh) -> int:
    """Bytes that programs may have on each device of this process; CPU devices share the host's memory."""
    device = mesh.local_devices[0]  # other processes' devices don't say
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return device.memory_stats()["bytes_limit"]


def bytes_on_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays or of their shapes, by their shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
