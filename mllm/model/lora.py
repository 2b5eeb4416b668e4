"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): their initial values, and merging into matrices.

A matrix [out, in] has the adapter a [rank, in] and b [out, rank]; parameters named `..._a` and `..._b` are adapters.
"""

import math
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, Float32

from lm_head.precision import precision_of
from mllm.model.int8 import Int8Matrix, is_int8
from mllm.model.layout import Params, parameter_name, split_layers


@dataclass(frozen=True)
class Lora:
    """The products with adapters, in the order of `LoraConfig`'s names, and the adapters' rank and scale."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False

    @property
    def scale(self) -> float:
        """The factor of b a."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def adapter(rows: int, columns: int, rank: int, *layers: int) -> tuple[nnx.Param, nnx.Param]:
    """The adapter (a, b) of a matrix [rows, columns], zeros in float32; stacked over `layers`."""
    return nnx.Param(jnp.zeros((*layers, rank, columns))), nnx.Param(jnp.zeros((*layers, rows, rank)))


def add_adapter(
    weight: Float[Array, "*L O I"] | Int8Matrix, a: Float[Array, "*L r I"], b: Float[Array, "*L O r"], scale: float
) -> Float32[Array, "*L O I"]:
    """The matrix, or the matrix of each layer, with its adapter: weight + scale * b @ a, in float32."""
    product = jnp.matmul(b, a, precision=precision_of(jnp.float32), preferred_element_type=jnp.float32)
    wide = weight.dequantized if isinstance(weight, Int8Matrix) else weight.astype(jnp.float32)
    return wide + scale * product


def is_adapter(name: str) -> bool:
    return name.endswith(("_a", "_b"))


def split_adapters(params: Params) -> tuple[Params, Params]:
    """The adapters among a model's parameters, and the other parameters, which are frozen."""
    adapters, frozen = nnx.split_state(params, lambda path, _: is_adapter(str(path[-1])), ...)
    return adapters, frozen


def initial_adapters(abstract: Params, seed: int) -> Params:
    """Adapters with the shapes and shardings of `abstract`: b is zero, so they don't change the model at first.

    a is uniform within 1/sqrt(in), as in PEFT; its random numbers depend on the seed and its name only.
    """

    def draw(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> Array:
        name = parameter_name(path)
        if name.endswith("_b"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(name.encode()))
        limit = leaf.shape[-1] ** -0.5
        return jax.random.uniform(key, leaf.shape, leaf.dtype, -limit, limit)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda: jax.tree_util.tree_map_with_path(draw, abstract), out_shardings=shardings)()


def merge_adapters(params: Params, lora: Lora | None) -> Params:
    """One layer's parameters, or the parameters outside of the layers, with adapters added to matrices in float32.

    The head's adapter makes a separate matrix `head`, also if the head is tied to the embedding.
    """
    if lora is None:
        return params
    merged: dict[str, Any] = {name: value for name, value in params.items() if not is_adapter(str(name))}
    for name in (name for name in params if str(name).endswith("_a")):
        product = str(name).removesuffix("_a")
        matrix = "head" if product == "head" else f"{product}_weight"
        weight = merged.get(matrix, merged.get("embed"))
        a, b = params[name], params[f"{product}_b"]
        add = partial(add_adapter, scale=lora.scale)
        merged[matrix] = jax.tree.map(add, weight, a, b, is_leaf=is_int8)
    return nnx.State(merged)


def merge_all_adapters(params: Params, lora: Lora | None) -> Params:
    """All parameters of a model with each adapter merged into its matrix, in float32; not for `Int8Matrix`."""
    outer, stacks = split_layers(params)
    merged = nnx.State(
        {**merge_adapters(outer, lora), **{name: dict(merge_adapters(part, lora)) for name, part in stacks.items()}}
    )
    return jax.tree.map(lambda x: x.dequantized if is_int8(x) else x, merged, is_leaf=is_int8)
