"""Qwen2.5 in Flax NNX: token ids to hidden states, whole sequences or step by step through a KV cache.

Left out on purpose: the head. Logits over the vocabulary are the business of `kernels.lm_head`, which takes
the hidden states and `Qwen2.head_weight`. Also left out: dropout, sliding windows and scaled rotations,
which no Qwen2.5 checkpoint from 0.5B to 72B uses as published.

The parameters of all layers are stacked on a leading axis L and the layers are applied by one
`jax.lax.scan`, so that a deep model compiles as fast as a shallow one. Matrices keep Hugging Face's layout,
[out, in]: nothing is transposed between a checkpoint and this model.

Follows: Qwen2.5 (arXiv:2412.15115, section 2) · rotary positions (arXiv:2104.09864) · RMSNorm
(arXiv:1910.07467) · grouped queries (arXiv:2305.13245) · SwiGLU (arXiv:2002.05202).

Letters: B batch, T time, D hidden, V vocabulary, L layers, H dim of a head, N query heads, K key and value
heads, R = H/2 rotated pairs, S slots of the cache; I and O what goes into a product and what comes out.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import DictKey, KeyPath
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

from mllm.model.architecture import PRESETS, Qwen2Config
from mllm.model.attention import Attention
from mllm.model.layout import Layout, gathered_axes

__all__ = ["LOGICAL_AXES", "PRESETS", "KVCache", "Params", "Qwen2", "Qwen2Config", "in_use", "parameter_name"]

Params = Any
"""A tree of the decoder's parameters (`nnx.State`), or of what belongs to each: shapes, shardings, gradients."""

LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "embed": ("vocab", "embed"),
    "layers.attention_norm": ("layers", "embed"),
    "layers.q_weight": ("layers", "heads", "embed"),
    "layers.q_bias": ("layers", "heads"),
    "layers.k_weight": ("layers", "kv_heads", "embed"),
    "layers.k_bias": ("layers", "kv_heads"),
    "layers.v_weight": ("layers", "kv_heads", "embed"),
    "layers.v_bias": ("layers", "kv_heads"),
    "layers.o_weight": ("layers", "embed", "heads"),
    "layers.mlp_norm": ("layers", "embed"),
    "layers.gate_weight": ("layers", "mlp", "embed"),
    "layers.up_weight": ("layers", "mlp", "embed"),
    "layers.down_weight": ("layers", "embed", "mlp"),
    "norm": ("embed",),
    "head": ("vocab", "embed"),
}
"""What each dim of a parameter is, by the parameter's name: its path in `nnx.split(model)[1]` with dots.

`heads` and `kv_heads` are N*H and K*H long, the H rows of a head together. `head` exists only where the
embedding is not tied. Norms and biases, which weight decay leaves alone, are those with at most one axis
beside `layers`.
"""


ROWS = ("batch", "time", "hidden")
"""What each dim of hidden states is; below, of queries, of keys and values, and of the cache."""
HEADS = ("batch", "time", "heads", "head_dim")
KV_HEADS = ("batch", "time", "kv_heads", "head_dim")
CACHE = ("layers", "batch", "slots", "kv_heads", "head_dim")


def parameter_name(path: KeyPath) -> str:
    """The name of a leaf, from its path in a tree of parameters or one like it, such as adamw's moments."""
    return ".".join(str(key.key) for key in path if isinstance(key, DictKey))


class KVCache(NamedTuple):
    """Keys and values of the tokens so far; the next go to the slots from `index` on, in every row."""

    keys: Float[Any, "L B S K H"]
    values: Float[Any, "L B S K H"]
    segments: Int[Any, "B S"]
    """0: an empty slot, or padding; nothing attends to it."""
    index: Int[Any, ""]  # type: ignore[assignment]  # tuple.index, which nobody calls

    @classmethod
    def empty(
        cls, config: Qwen2Config, batch: int, slots: int, dtype: DTypeLike, layout: Layout | None = None
    ) -> "KVCache":
        """Room for `batch` rows of `slots` tokens, padding included; `dtype` is the model's compute dtype."""
        shape = (config.num_hidden_layers, batch, slots, config.num_key_value_heads, config.head_dim)
        return cls(
            keys=lie(layout, jnp.zeros(shape, dtype), CACHE),
            values=lie(layout, jnp.zeros(shape, dtype), CACHE),
            segments=jnp.zeros((batch, slots), jnp.int32),
            index=jnp.zeros((), jnp.int32),
        )


class Qwen2(nnx.Module):
    """The decoder up to and including its last norm.

    `graphdef, params = nnx.split(model)` gives the parameters as one pytree, which
    `nnx.merge(graphdef, params)(tokens, positions, segments)` applies under any JAX transformation.
    """

    def __init__(
        self,
        config: Qwen2Config,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        remat: Literal["none", "dots", "full"] = "none",
        attention: Attention | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Random parameters: matrices normal with deviation `initializer_range`, biases 0, norms 1.

        Args:
            dtype: of activations and of the products' operands. Norms, rotations and softmax are always
                float32.
            param_dtype: of the parameters; they are cast to `dtype` where they are used, a layer at a time.
            remat: what the backward pass computes again in each layer: nothing, all but the products with
                parameters, or everything.
            attention: what whole sequences are given to; None: XLA's. See `mllm.model.attention.choose`.
            layout: how activations lie, and that parameters are gathered where they are used; None: as XLA likes.
        """
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.remat = remat
        self.attention = attention
        self.layout = layout
        normal = jax.nn.initializers.normal(config.initializer_range, param_dtype)
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(normal(rngs.params(), vocabulary))
        self.layers = Layer(config, param_dtype, rngs)
        self.norm = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        self.head = None if config.tie_word_embeddings else nnx.Param(normal(rngs.params(), vocabulary))

    @classmethod
    def abstract(cls, config: Qwen2Config, **options: Any) -> "Qwen2":
        """The model with shapes and dtypes for parameters: nothing is computed. Options as for the model."""
        return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), **options))

    @property
    def head_weight(self) -> Float[jax.Array, "V D"]:
        """The vocabulary matrix as stored: logits = hidden @ head_weight.T. The embedding when tied."""
        return (self.embed if self.head is None else self.head).get_value()

    def __call__(
        self,
        tokens: Int[jax.Array, "B T"],
        positions: Int[jax.Array, "B T"],
        segments: Int[jax.Array, "B T"],
        cache: KVCache | None = None,
    ) -> tuple[Float[jax.Array, "B T D"], KVCache | None]:
        """Hidden states after the last norm, in the compute dtype, and the cache with these tokens added.

        A query attends to a key iff both have the same segment, not 0, and the key's slot is not later. What
        comes out for segment 0 is finite and means nothing. A token id beyond the vocabulary gives NaN.

        Args:
            positions: rotary positions, each within its own document.
            segments: which document of the row a token belongs to, from 1; 0 is padding.
            cache: the tokens before these. It must have T slots left, which can't be checked here: `index`
                is not known when compiling.
        """
        slot = jnp.zeros((), jnp.int32) if cache is None else cache.index
        seen = segments if cache is None else write(cache.segments, segments, (0, slot))
        if cache is None and self.attention is not None:
            attend = partial(self.attention, segments=segments)
        else:
            attend = partial(jax.nn.dot_product_attention, mask=attention_mask(segments, seen, slot))
        rotation = rotary(positions, self.config.head_dim, self.config.rope_theta)
        graphdef, layers = nnx.split(self.layers)

        layout = self.layout

        # The cache is carried whole rather than scanned over: a layer then writes its T new slots in place,
        # where scanned outputs would copy all S of them at every token.
        def step(carry: tuple, scanned: tuple) -> tuple[tuple, None]:
            hidden, stored = carry
            params, number = scanned
            layer = nnx.merge(graphdef, in_use(params, self.dtype, layout, "layers."))
            projected = layer.project(hidden, rotation)
            queries, keys, values = (
                lie(layout, x, axes) for x, axes in zip(projected, (HEADS, KV_HEADS, KV_HEADS), strict=True)
            )
            if stored is not None:
                start = (number, 0, slot, 0, 0)
                stored = write(stored[0], keys[None], start), write(stored[1], values[None], start)
                keys, values = (jax.lax.dynamic_index_in_dim(all_, number, keepdims=False) for all_ in stored)
            attended = attend(queries, keys, values)
            hidden = lie(layout, hidden + linear(attended.reshape(*hidden.shape[:2], -1), layer.o_weight), ROWS)
            hidden = lie(layout, hidden + layer.feed_forward(hidden), ROWS)
            return (hidden, stored), None

        hidden = self.look_up(tokens, whole=cache is not None)
        stored = None if cache is None else (cache.keys, cache.values)
        numbers = jnp.arange(self.config.num_hidden_layers)
        (hidden, stored), _ = jax.lax.scan(rematerialised(step, self.remat), (hidden, stored), (layers, numbers))
        if stored is not None:
            cache = KVCache(*stored, segments=seen, index=slot + tokens.shape[1])
        return lie(layout, rms_norm(hidden, self.norm, self.config.rms_norm_eps), ROWS), cache

    def look_up(self, tokens: Int[jax.Array, "B T"], whole: bool) -> Float[jax.Array, "B T D"]:
        """The tokens' rows of the embedding, in the compute dtype.

        Unless the embedding is `whole` along fsdp, as for decoding, each device looks up its own columns for all rows
        of its replica, and these are exchanged: they are far fewer than the embedding's, which gathering would move.
        """
        if not whole:
            tokens = lie(self.layout, tokens, ("rows_of_replica", "time"))
        hidden = self.embed[...].at[tokens].get(mode="fill", fill_value=jnp.nan).astype(self.dtype)
        if not whole:
            hidden = lie(self.layout, hidden, ("rows_of_replica", "time", "embed"))
        return lie(self.layout, hidden, ROWS)


class Layer(nnx.Module):
    """As created, the parameters of all layers, [L, ...]; inside the scan, those of the one applied."""

    def __init__(self, config: Qwen2Config, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        hidden, mlp = config.hidden_size, config.intermediate_size
        heads = config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim

        def matrix(rows: int, columns: int) -> nnx.Param:
            normal = jax.nn.initializers.normal(config.initializer_range, param_dtype)
            return nnx.Param(normal(rngs.params(), (config.num_hidden_layers, rows, columns)))

        def constant(value: int, size: int) -> nnx.Param:
            return nnx.Param(jnp.full((config.num_hidden_layers, size), value, param_dtype))

        self.attention_norm = constant(1, hidden)
        self.q_weight, self.q_bias = matrix(heads, hidden), constant(0, heads)
        self.k_weight, self.k_bias = matrix(kv_heads, hidden), constant(0, kv_heads)
        self.v_weight, self.v_bias = matrix(kv_heads, hidden), constant(0, kv_heads)
        self.o_weight = matrix(hidden, heads)
        self.mlp_norm = constant(1, hidden)
        self.gate_weight = matrix(mlp, hidden)
        self.up_weight = matrix(mlp, hidden)
        self.down_weight = matrix(hidden, mlp)

    def project(
        self, hidden: Float[jax.Array, "B T D"], rotation: Float[jax.Array, "2 B T 1 R"]
    ) -> tuple[Float[jax.Array, "B T N H"], Float[jax.Array, "B T K H"], Float[jax.Array, "B T K H"]]:
        """Queries and keys, both rotated, and values."""
        x = rms_norm(hidden, self.attention_norm, self.config.rms_norm_eps)
        heads = (*hidden.shape[:2], -1, self.config.head_dim)
        queries = linear(x, self.q_weight, self.q_bias).reshape(heads)
        keys = linear(x, self.k_weight, self.k_bias).reshape(heads)
        values = linear(x, self.v_weight, self.v_bias).reshape(heads)
        return rotate(queries, rotation), rotate(keys, rotation), values

    def feed_forward(self, hidden: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T D"]:
        x = rms_norm(hidden, self.mlp_norm, self.config.rms_norm_eps)
        return linear(jax.nn.silu(linear(x, self.gate_weight)) * linear(x, self.up_weight), self.down_weight)


def lie(layout: Layout | None, array: Shaped[jax.Array, "..."], axes: tuple[str, ...]) -> Shaped[jax.Array, "..."]:
    return array if layout is None else layout.constrain(array, axes)


def in_use(params: Any, dtype: DTypeLike, layout: Layout | None, parent: str = "") -> Any:
    """Parameters as products read them: in the compute dtype, and gathered over fsdp.

    Args:
        params: the whole tree, or those of one layer with `parent` "layers.": then without the axis of layers.
    """

    def place(path: KeyPath, leaf: jax.Array) -> jax.Array:
        axes = LOGICAL_AXES[parent + parameter_name(path)]
        narrowed = leaf.astype(dtype)
        return narrowed if layout is None else layout.constrain(narrowed, gathered_axes(axes[-leaf.ndim :]))

    return jax.tree_util.tree_map_with_path(place, params)


def linear(x: Float[jax.Array, "B T I"], weight: nnx.Param, bias: nnx.Param | None = None) -> Float[jax.Array, "B T O"]:
    """x @ weight.T + bias in the dtype of x."""
    y = jnp.einsum("bti,oi->bto", x, weight[...].astype(x.dtype))
    return y if bias is None else y + bias[...].astype(x.dtype)


def rms_norm(x: Float[jax.Array, "B T D"], weight: nnx.Param, eps: float) -> Float[jax.Array, "B T D"]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight[...].astype(x.dtype)


def rotary(positions: Int[jax.Array, "B T"], head_dim: int, theta: float) -> Float[jax.Array, "2 B T 1 R"]:
    """Cosine and sine of position * theta^(-2i/H), float32 (arXiv:2104.09864, section 3.2.2)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(x: Float[jax.Array, "B T N H"], rotation: Float[jax.Array, "2 B T 1 R"]) -> Float[jax.Array, "B T N H"]:
    """Turn the pairs (i, i + H/2), as Hugging Face's checkpoints have them; the paper pairs neighbours."""
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


def attention_mask(
    segments: Int[jax.Array, "B T"], seen: Int[jax.Array, "B S"], first_slot: Int[jax.Array, ""]
) -> Bool[jax.Array, "B 1 T S"]:
    """Who attends to whom; the queries stand in the slots from `first_slot` on."""
    same = (segments[:, :, None] == seen[:, None, :]) & (seen != 0)[:, None, :]
    slots = first_slot + jnp.arange(segments.shape[1])
    return (same & (jnp.arange(seen.shape[1]) <= slots[:, None]))[:, None]


def write(array: jax.Array, update: jax.Array, start: tuple) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, update.astype(array.dtype), start)


def rematerialised(step: Any, remat: str) -> Any:
    match remat:
        case "none":
            return step
        case "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        case "full":
            policy = jax.checkpoint_policies.nothing_saveable
    # Inside a scan there is nothing that common subexpressions could be merged with.
    return jax.checkpoint(step, policy=policy, prevent_cse=False)
