"""How one model is laid out on a mesh: the table of logical axes, bound to the model's sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Shaped

from mllm.errors import UserError
from mllm.model.architecture import Qwen2Config
from mllm.parallel.mesh import RULES, sharding


@dataclass(frozen=True)
class Layout:
    """The layout of one model's parameters and activations: by `RULES`, except for logical axes that stay unsharded."""

    mesh: Mesh
    unsharded: frozenset[str] = frozenset()
    """Logical axes that every device holds as a whole."""

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
        """Parts that the rows of a batch are divided into; their number must be divisible by it."""
        return math.prod(self.mesh.shape[axis] for axis in RULES["batch"] or ())

    def sharding(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """The sharding of an array whose dims have the logical names `axes`."""
        return sharding(self.mesh, tuple(None if axis in self.unsharded else axis for axis in axes))

    def constrain(self, array: Shaped[Array, "..."], axes: tuple[str | None, ...]) -> Shaped[Array, "..."]:
        """The array with that sharding; inside jit."""
        return array if self.mesh.size == 1 else jax.lax.with_sharding_constraint(array, self.sharding(axes))


def gathered_axes(axes: tuple[str, ...]) -> tuple[str | None, ...]:
    """The logical axes of a parameter while products read it: the dim that fsdp shards is whole."""
    return tuple(None if axis == "embed" else axis for axis in axes)


def check_divides(mesh: Mesh, axis: Any, sizes: Mapping[str, int]) -> None:
    """Raise UserError where the mesh's `axis` does not divide one of the model's sizes."""
    shards = mesh.shape[axis]
    for name, size in sizes.items():
        if size % shards:
            common = math.gcd(*sizes.values())
            nearest = max(divisor for divisor in range(1, shards) if common % divisor == 0)
            problem = f"{shards} does not divide the model's {name} of {size}"
            raise UserError(f"mesh.{axis}: {problem}; the nearest that works is {nearest}")
