"""The table of all parameters, with their logical axes and tensor names, and the axes of activations.

All shardings are derived from these axes.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import DictKey, KeyPath
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float32, Int

from mllm.errors import UserError
from mllm.model.architecture import Architecture
from mllm.model.compute_copy import Rounding, compute_copy
from mllm.model.int8 import Int8Matrix, is_int8, quantize
from mllm.parallel.mesh import RULES, sharding

Params = Any
"""A tree of the decoder's parameters (`nnx.State`), or of one thing for each: shapes, shardings, gradients."""

Axes = tuple[str | None, ...]
"""The logical name of each dim of an array; a dim named None is never sharded."""

PARAMETERS: dict[str, tuple[tuple[str, ...], str]] = {
    "embed": (("vocab", "embed"), "model.embed_tokens.weight"),
    "layers.attention_norm": (("layers", "embed"), "model.layers.{}.input_layernorm.weight"),
    "layers.q_weight": (("layers", "heads", "embed"), "model.layers.{}.self_attn.q_proj.weight"),
    "layers.q_bias": (("layers", "heads"), "model.layers.{}.self_attn.q_proj.bias"),
    "layers.k_weight": (("layers", "kv_heads", "embed"), "model.layers.{}.self_attn.k_proj.weight"),
    "layers.k_bias": (("layers", "kv_heads"), "model.layers.{}.self_attn.k_proj.bias"),
    "layers.v_weight": (("layers", "kv_heads", "embed"), "model.layers.{}.self_attn.v_proj.weight"),
    "layers.v_bias": (("layers", "kv_heads"), "model.layers.{}.self_attn.v_proj.bias"),
    "layers.q_norm": (("layers", "head_dim"), "model.layers.{}.self_attn.q_norm.weight"),
    "layers.k_norm": (("layers", "head_dim"), "model.layers.{}.self_attn.k_norm.weight"),
    "layers.o_weight": (("layers", "embed", "heads"), "model.layers.{}.self_attn.o_proj.weight"),
    "layers.mlp_norm": (("layers", "embed"), "model.layers.{}.post_attention_layernorm.weight"),
    "layers.post_attention_norm": (("layers", "embed"), "model.layers.{}.post_attention_layernorm.weight"),
    "layers.pre_mlp_norm": (("layers", "embed"), "model.layers.{}.pre_feedforward_layernorm.weight"),
    "layers.post_mlp_norm": (("layers", "embed"), "model.layers.{}.post_feedforward_layernorm.weight"),
    "layers.gate_weight": (("layers", "mlp", "embed"), "model.layers.{}.mlp.gate_proj.weight"),
    "layers.up_weight": (("layers", "mlp", "embed"), "model.layers.{}.mlp.up_proj.weight"),
    "layers.down_weight": (("layers", "embed", "mlp"), "model.layers.{}.mlp.down_proj.weight"),
    "norm": (("embed",), "model.norm.weight"),
    "head": (("vocab", "embed"), "lm_head.weight"),
}
"""The logical axes of each parameter, and its tensor's name in Hugging Face's files; `{}` is the number of the layer.

A parameter's name is its path in `nnx.split(model)[1]`, joined with dots. `heads` and `kv_heads` are N*H and K*H long,
the H rows of a head together. Norms and biases, which weight decay leaves alone, have at most one axis beside `layers`.
The norm that Hugging Face names after attention is in Qwen and Llama the norm before the feed-forward network.
Adapters follow from their matrices: a is [rank, in], b is [out, rank], and the names of their tensors are PEFT's.
"""
for name in ("attention_norm", "mlp_norm", "gate_weight", "up_weight", "down_weight"):
    PARAMETERS[f"delta.{name}"] = PARAMETERS[f"layers.{name}"]
PARAMETERS |= {
    "delta.qkv_weight": (("layers", "heads", "embed"), "model.layers.{}.linear_attn.in_proj_qkv.weight"),
    "delta.z_weight": (("layers", "heads", "embed"), "model.layers.{}.linear_attn.in_proj_z.weight"),
    "delta.beta_weight": (("layers", "heads", "embed"), "model.layers.{}.linear_attn.in_proj_b.weight"),
    "delta.decay_weight": (("layers", "heads", "embed"), "model.layers.{}.linear_attn.in_proj_a.weight"),
    "delta.conv": (("layers", "heads", "taps"), "model.layers.{}.linear_attn.conv1d.weight"),
    "delta.decay_log": (("layers", "heads"), "model.layers.{}.linear_attn.A_log"),
    "delta.decay_bias": (("layers", "heads"), "model.layers.{}.linear_attn.dt_bias"),
    "delta.out_norm": (("layers", "head_dim"), "model.layers.{}.linear_attn.norm.weight"),
    "delta.out_weight": (("layers", "embed", "heads"), "model.layers.{}.linear_attn.out_proj.weight"),
}
STACKS = ("layers", "delta")
"""The first part of the names of layers' parameters: delta nets are in a stack of their own."""
MATRICES = {name.removesuffix("_weight"): name for name in PARAMETERS if name == "head" or name.endswith("_weight")}
"""The parameters that can have adapters, by the first part of their adapters' names."""
for matrix, name in MATRICES.items():
    (*layers, rows, columns), tensor = PARAMETERS[name]
    module = f"base_model.model.{tensor.removesuffix('weight')}"
    PARAMETERS |= {
        f"{matrix}_a": ((*layers, "rank", columns), f"{module}lora_A.weight"),
        f"{matrix}_b": ((*layers, rows, "rank"), f"{module}lora_B.weight"),
    }
QUANTIZED = {"embed", *MATRICES.values()}
LOGICAL_AXES = {name: axes for name, (axes, _) in PARAMETERS.items()}
TENSORS = {name: tensor for name, (_, tensor) in PARAMETERS.items()}

HIDDEN_STATES = ("batch", "time", "hidden")
QUERIES = ("batch", "time", "heads", "head_dim")
KEYS = ("batch", "time", "kv_heads", "head_dim")
CACHED_KEYS = ("batch", "kv_heads", "places", "head_dim")
DELTA_INPUTS = ("batch", "taps", "heads")
DELTA_MEMORY = ("batch", "heads", "head_dim", "head_dim")
"""The axes of activations. Values have the same axes as keys; the last two are a `DeltaState`'s."""


def parameter_name(path: KeyPath) -> str:
    """The parameter's name for a leaf, from its path in a tree of parameters or in an optimizer state."""
    return ".".join(str(key.key) for key in path if isinstance(key, DictKey))


def map_parameters(function: Callable[[Any, str], Any], params: Params, prefix: str = "") -> Params:
    """Map `function(parameter, name)` over the parameters, `Int8Matrix` included; `prefix` begins their names.

    With `prefix` "layers." or "delta." the tree is one layer's, without the axis of layers.
    """

    def apply(path: KeyPath, leaf: Any) -> Any:
        return function(leaf, prefix + parameter_name(path))

    return jax.tree_util.tree_map_with_path(apply, params, is_leaf=is_int8)


def count(params: Params) -> int:
    """The number of parameters; an `Int8Matrix` counts without its scales."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params, is_leaf=is_int8))


def split_layers(params: Params) -> tuple[Params, dict[str, Params]]:
    """The parameters outside of the layers, and the parameters of each stack of layers."""
    outer = {name: value for name, value in params.items() if name not in STACKS}
    return nnx.State(outer), {name: params[name] for name in STACKS if name in params}


def axes_of(parameter: Any, name: str) -> tuple[str, ...]:
    """The logical axes of a parameter as it is stored, or of one layer's."""
    return LOGICAL_AXES[name][-parameter.ndim :]


def gathered_axes(parameter: Any, name: str) -> Axes:
    """The logical axes of a parameter while products read it: the dim that fsdp shards is whole."""
    return tuple(None if axis == "embed" else axis for axis in axes_of(parameter, name))


@dataclass(frozen=True)
class Layout:
    """The layout of one model's arrays: by the mesh's `RULES`, except for logical axes that stay unsharded."""

    mesh: Mesh
    unsharded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, mesh: Mesh, config: Architecture) -> "Layout":
        """The layout of a model; UserError if the mesh does not divide one of the model's sizes.

        Only key and value heads, which are few, may be replicated. Nothing is padded.
        """
        sizes = asdict(config)
        delta = ("linear_num_key_heads",) if config.traits.delta else ()
        names_by_axis: dict[Any, tuple[str, ...]] = {
            RULES["heads"]: ("num_attention_heads", "intermediate_size", "vocab_size", *delta),
            RULES["embed"]: ("hidden_size",),
        }
        for axis, names in names_by_axis.items():
            shards, common = mesh.shape[axis], math.gcd(*(sizes[name] for name in names))
            for name in (name for name in names if sizes[name] % shards):
                nearest = max(divisor for divisor in range(1, shards) if common % divisor == 0)
                problem = f"{shards} does not divide the model's {name} of {sizes[name]}"
                raise UserError(f"mesh.{axis}: {problem}; the nearest that works is {nearest}")
        uneven = config.num_key_value_heads % mesh.shape[RULES["kv_heads"]]
        return cls(mesh, frozenset({"kv_heads"} if uneven else ()))

    @property
    def row_shards(self) -> int:
        """The number of shards that hold different rows of a batch; it divides the number of rows."""
        return math.prod(self.mesh.shape[axis] for axis in RULES["batch"] or ())

    def sharding(self, axes: Axes) -> NamedSharding:
        """The sharding of an array with these logical axes."""
        return sharding(self.mesh, tuple(None if axis in self.unsharded else axis for axis in axes))

    def constrain(self, array: Any, axes: Axes) -> Any:
        """The array, or `Int8Matrix`, with that sharding; inside jit."""
        if is_int8(array):
            return Int8Matrix(self.constrain(array.values, axes), self.constrain(array.scales, axes[:-1]))
        return array if self.mesh.size == 1 else jax.lax.with_sharding_constraint(array, self.sharding(axes))

    def abstract(self, shape: tuple[int, ...], dtype: DTypeLike, axes: Axes) -> jax.ShapeDtypeStruct:
        """The shape and dtype of an array, with its sharding."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(axes))

    def abstract_int8(self, shape: tuple[int, ...], axes: Axes) -> Int8Matrix:
        """The shapes and shardings of an `Int8Matrix`."""
        return Int8Matrix(self.abstract(shape, jnp.int8, axes), self.abstract(shape[:-1], jnp.float32, axes[:-1]))

    def abstract_parameters(self, params: Params, int8: bool = False) -> Params:
        """The shape and dtype of each parameter, with its sharding as it is stored; layers' matrices in `int8`."""

        def stored(x: Any, name: str) -> Any:
            axes = axes_of(x, name)
            whole = not (int8 and name in QUANTIZED and "." in name)
            return self.abstract(x.shape, x.dtype, axes) if whole else self.abstract_int8(x.shape, axes)

        return map_parameters(stored, params)

    def abstract_gathered(self, params: Params, dtype: DTypeLike, prefix: str = "", int8: bool = False) -> Params:
        """The shape, dtype and sharding of each parameter as `gather` gives it, or `gather_int8`."""

        def gathered(x: Any, name: str) -> Any:
            axes = gathered_axes(x, name)
            if is_int8(x) or (int8 and name in QUANTIZED):
                return self.abstract_int8(x.shape, axes)
            return self.abstract(x.shape, jnp.float32 if x.ndim == 1 else dtype, axes)

        return map_parameters(gathered, params, prefix)


def on_each_device(
    layout: Layout | None, function: Callable[..., Any], axes: tuple[Any, ...], results: Any = None
) -> Callable[..., Any]:
    """The function mapped over devices, inside jit; rows never move between devices.

    `axes` are the logical axes of each argument. `results` are the axes of the result; None: the first argument's axes.
    The axes of a tree of arrays are a tree of `Axes`.
    """
    if layout is None or layout.mesh.size == 1:
        return function

    def is_axes(tree: Any) -> bool:
        return all(isinstance(name, str | None) for name in tree)

    trees = axes, axes[0] if results is None else results
    specs, results = jax.tree.map(lambda names: layout.sharding(names).spec, trees, is_leaf=is_axes)
    return jax.shard_map(function, mesh=layout.mesh, in_specs=specs, out_specs=results, check_vma=False)


def constrain(layout: Layout | None, array: Any, axes: Axes) -> Any:
    """The array with the layout's sharding; as it is where there is no layout."""
    return array if layout is None else layout.constrain(array, axes)


def gather(rounding: Rounding, layout: Layout | None, name: str, parameter: Any, layer: Int[ArrayLike, ""] = 0) -> Any:
    """The compute copy of a parameter, gathered over fsdp after rounding; vectors are float32.

    An `Int8Matrix` is gathered as it is.
    """
    copy = parameter
    if not is_int8(parameter):
        copy = parameter.astype(jnp.float32) if parameter.ndim == 1 else compute_copy(parameter, rounding, name, layer)
    return constrain(layout, copy, gathered_axes(parameter, name))


def gather_int8(
    rounding: Rounding, layout: Layout | None, name: str, parameter: Any, layer: Int[ArrayLike, ""] = 0
) -> Any:
    """The parameters with an `Int8Matrix` in place of each matrix that is no adapter, gathered in int8."""
    narrow = name in QUANTIZED and not is_int8(parameter)
    return gather(rounding, layout, name, quantize(parameter) if narrow else parameter, layer)


def gather_layer_float32(
    params: Params, rounding: Rounding, layout: Layout | None, layer: Int[Array, ""], stack: str
) -> Params:
    """The results of `gather` for a layer of the stack, with the same values in float32.

    So their gradients, which devices sum over fsdp, are float32 and not rounded to the compute dtype. An `Int8Matrix`
    is unchanged, and has no gradient.
    """

    def read(x: Any, name: str) -> Any:
        context = rounding, layout, name
        return gather(*context, x, layer) if is_int8(x) else gather_float32(*context, x.astype(jnp.float32), layer)

    return map_parameters(read, params, f"{stack}.")


def round_and_gather(*arguments: Any) -> Float32[Array, "..."]:
    return gather(*arguments).astype(jnp.float32)


gather_float32 = jax.custom_vjp(round_and_gather, nondiff_argnums=(0, 1, 2))
# The gradient goes from the product straight to the parameter's own sharding; JAX's own rule would round it first.
gather_float32.defvjp(
    lambda *arguments: (round_and_gather(*arguments), None),
    lambda rounding, layout, name, _, gradient: (constrain(layout, gradient, axes_of(gradient, name)), None),
)
