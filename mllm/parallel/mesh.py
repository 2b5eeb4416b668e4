"""The device mesh, and the one table that says how everything is laid out on it.

A dimension of a parameter, an activation or a batch has a logical name; `RULES` maps that name to mesh axes, and
nothing else in the project speaks of mesh axes; `Layout` binds the table to a model. dp replicates the parameters, fsdp
shards them along the hidden size and gathers them at use, tp shards heads, the feed-forward layer and the vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from mllm.config.schema import MeshConfig
from mllm.errors import UserError
from mllm.model.architecture import Qwen2Config

RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": ("dp", "fsdp"),
    "rows_of_replica": "dp",
    "time": None,
    "slots": None,
    "hidden": None,
    "layers": None,
    "embed": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "mlp": "tp",
}
"""`embed` is the hidden size of a parameter, `hidden` that of an activation; `rows_of_replica` are a batch's rows where
the devices along fsdp each have all of their replica's."""


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh (dp, fsdp, tp) over the first dp * fsdp * tp devices.

    Raises:
        UserError: there are fewer devices, or those of several processes would not all be used.
    """
    shape = (config.dp, config.fsdp, config.tp)
    needed, devices = int(np.prod(shape)), jax.devices()
    if needed > len(devices):
        axes = dict(zip(("dp", "fsdp", "tp"), shape, strict=True))
        fits = {axis: len(devices) * size // needed for axis, size in axes.items()}
        ways = " or ".join(f"mesh.{axis}={size}" for axis, size in fits.items() if size and axes[axis] > 1)
        raise UserError(
            f"mesh: dp * fsdp * tp = {needed}, but there are {len(devices)} devices: "
            + (f"set {ways}" if ways else "lower more than one of them")
        )
    if needed < len(devices) and jax.process_count() > 1:
        raise UserError(
            f"mesh: dp * fsdp * tp = {needed}, but the {jax.process_count()} processes have {len(devices)} devices "
            "and must use all: raise one of them"
        )
    grid = np.array(devices[:needed]).reshape(shape)
    return Mesh(grid, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)


def sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """The layout of an array whose dimensions have the logical names `axes`; None is never sharded."""
    return NamedSharding(mesh, PartitionSpec(*(axis and RULES[axis] for axis in axes)))


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """Lay arrays with a row for each sequence, [B, ...], out over the devices.

    Of numpy's arrays each process passes the rows that its devices hold; JAX's already have all of them.
    """
    rows = sharding(mesh, ("batch",))

    def place(array: Any) -> jax.Array:
        if isinstance(array, jax.Array):
            return jax.device_put(array, rows)
        return jax.make_array_from_process_local_data(rows, np.asarray(array))

    return jax.tree.map(place, batch)


@dataclass(frozen=True)
class Layout:
    """How one model lies on a mesh: by the table, but for dimensions that stay whole on every device."""

    mesh: Mesh
    whole: frozenset[str] = frozenset()

    @classmethod
    def of(cls, mesh: Mesh, config: Qwen2Config) -> "Layout":
        """The layout of a model of these sizes.

        Where tp does not divide the heads of keys and values, which are few, every device has all of them. Nothing is
        padded: the vocabulary, too, must be divisible.

        Raises:
            UserError: the mesh does not divide another of the model's sizes.
        """
        heads = {"num_attention_heads": config.num_attention_heads}
        sizes = {"intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size}
        check_divides(mesh, RULES["heads"], heads | sizes)
        check_divides(mesh, RULES["embed"], {"hidden_size": config.hidden_size})
        uneven = config.num_key_value_heads % mesh.shape[RULES["kv_heads"]]
        return cls(mesh, frozenset({"kv_heads"} if uneven else ()))

    @property
    def row_shards(self) -> int:
        """The rows of a batch must be divisible by this."""
        return math.prod(self.mesh.shape[axis] for axis in RULES["batch"] or ())

    def sharding(self, axes: tuple[str | None, ...]) -> NamedSharding:
        return sharding(self.mesh, tuple(None if axis in self.whole else axis for axis in axes))

    def constrain(self, array: Shaped[Array, "..."], axes: tuple[str | None, ...]) -> Shaped[Array, "..."]:
        """The array, laid out so; inside jit."""
        return array if self.mesh.size == 1 else jax.lax.with_sharding_constraint(array, self.sharding(axes))


def gathered(axes: tuple[str, ...]) -> tuple[str | None, ...]:
    """The axes of a parameter in use: whole along what fsdp shards."""
    return tuple(None if axis == "embed" else axis for axis in axes)


def check_divides(mesh: Mesh, axis: Any, sizes: Mapping[str, int]) -> None:
    """Raise UserError where the mesh's `axis` does not divide one of the model's sizes."""
    asked = mesh.shape[axis]
    for name, size in sizes.items():
        if size % asked:
            common = math.gcd(*sizes.values())
            nearest = max(divisor for divisor in range(1, asked) if common % divisor == 0)
            problem = f"{asked} does not divide the model's {name} of {size}"
            raise UserError(f"mesh.{axis}: {problem}; the nearest that works is {nearest}")
