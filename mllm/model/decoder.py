"""Qwen, Llama, Gemma and kin in Flax NNX: token ids of whole sequences to hidden states; `decoding.py` takes one token.

The parameters of all layers are stacked along a first dim L and applied by one `jax.lax.scan`, so that a deep model
compiles as fast as a shallow one. Matrices keep Hugging Face's layout, [out, in]. Follows Qwen2.5 (arXiv:2412.15115,
section 2), Qwen3 (arXiv:2505.09388, section 2), Llama 3 (arXiv:2407.21783, section 3.2), Gemma 3 (arXiv:2503.19786,
section 2), OLMo 2 (arXiv:2501.00656, section 2), rotary positions (arXiv:2104.09864), RMSNorm (arXiv:1910.07467),
grouped queries (arXiv:2305.13245), SwiGLU and GeGLU (arXiv:2002.05202).

Letters: B batch, T time, D hidden size, V vocabulary, L layers, H size of a head, N query heads, K key and value heads,
R = H/2 rotated pairs; I and O the input and output size of a product.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from lm_head.precision import precision_of
from mllm.model.architecture import Architecture, LayerKind, RopeScaling
from mllm.model.attention import Attention, set_precision
from mllm.model.compute_copy import Rounding, compute_copy
from mllm.model.int8 import Int8Matrix
from mllm.model.layout import CACHED_KEYS, HIDDEN_STATES, KEYS, QUERIES, Layout, Params, constrain, gather_layer_float32
from mllm.model.lora import Lora, adapter, add_adapter


class Decoder(nnx.Module):
    """The decoder up to and including its last norm; `nnx.split` gives its parameters as one pytree."""

    def __init__(
        self,
        config: Architecture,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.bfloat16,
        dithered: bool = False,
        param_dtype: DTypeLike = jnp.float32,
        remat: Literal["none", "full"] = "none",
        attention: Attention | None = None,
        layout: Layout | None = None,
        lora: Lora | None = None,
    ) -> None:
        """Make random parameters: matrices normal with deviation `initializer_range`, biases 0, norms' factors 1.

        Activations and the products' operands have `dtype`; float32 matrices are `dithered` on their way there (see
        compute_copy.py) or rounded to nearest. Norms, rotary positions, softmax and the residual stream, which the
        layers add to, are float32. `remat` says what the backward pass computes again in each layer: nothing or
        everything. Without `attention` XLA computes it; without `layout` there is one device, or XLA decides. With
        `lora` the products that it names have adapters, float32, made as zeros, and vectors are float32, too.
        """
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.rounding = Rounding(self.dtype, dithered)
        self.remat = remat
        self.attention = attention
        self.layout = layout
        normal = jax.nn.initializers.normal(config.initializer_range, param_dtype)
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(normal(rngs.params(), vocabulary))
        self.layers = Layer(config, self.dtype, param_dtype, rngs, lora)
        norm = jnp.full(config.hidden_size, 1 - config.traits.gemma, param_dtype if lora is None else jnp.float32)
        self.norm = nnx.Param(norm)
        self.head = None if config.tie_word_embeddings else nnx.Param(normal(rngs.params(), vocabulary))
        self.lora = lora
        self.head_a: nnx.Param | None = None
        self.head_b: nnx.Param | None = None
        if lora is not None and "head" in lora.targets:
            self.head_a, self.head_b = map(nnx.data, adapter(*vocabulary, lora.rank))

    @classmethod
    def abstract(cls, config: Architecture, **options: Any) -> "Decoder":
        """The model with shapes and dtypes in place of parameters; nothing is computed. Options as for the model."""
        return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), **options))

    @property
    def head_weight(self) -> Float[jax.Array, "V D"]:
        """The vocabulary matrix, with logits = hidden @ head_weight.T: as stored, the embedding if that is tied.

        Only an adapter of the head makes another matrix of it, in float32.
        """
        weight = (self.embed if self.head is None else self.head).get_value()
        if self.lora is None or self.head_a is None or self.head_b is None:
            return weight
        return add_adapter(weight, self.head_a[...], self.head_b[...], self.lora.scale)

    def head_copy(self, weight: Float[jax.Array, "V D"]) -> Float[jax.Array, "V D"]:
        """The compute copy of `head_weight`, without a gradient."""
        name = "embed" if self.head is None and self.head_a is None else "head"
        return compute_copy(jax.lax.stop_gradient(weight), self.rounding, name)

    def __call__(
        self, tokens: Int[jax.Array, "B T"], positions: Int[jax.Array, "B T"], segments: Int[jax.Array, "B T"]
    ) -> Float[jax.Array, "B T D"]:
        """Hidden states after the last norm, in the compute dtype.

        A query attends to a key iff both have the same segment, not 0, the key is not later and, in a layer with a
        window, among the last so many. Positions count within each document; segments count a row's documents from 1,
        and 0 is padding, whose hidden states are finite and meaningless. A token id beyond the vocabulary gives NaN.
        """
        hidden, _ = self.apply_layers(tokens, positions, segments)
        return constrain(self.layout, self.last_norm(hidden), HIDDEN_STATES)

    def apply_layers(
        self,
        tokens: Int[jax.Array, "B T"],
        positions: Int[jax.Array, "B T"],
        segments: Int[jax.Array, "B T"],
        keep: bool = False,
    ) -> tuple[Float[jax.Array, "B T D"], Any]:
        """The residual stream after the last layer; with `keep` what the layers' attention reads of these tokens, too.

        These are keys and values, [L, B, K, T, H] each, in the compute dtype. The arguments are as for a call.
        """
        attend = self.attention or masked_attention
        kinds, time = self.config.kinds, positions.shape[1]
        rotations = jnp.stack([rotary(positions, kind, self.config.head_dim) for kind in kinds])
        windows = [min(kind.window or time, time) for kind in kinds]
        graphdef, layers = nnx.split(self.layers)
        layout = self.layout

        def step(
            hidden: jax.Array, params: Params, index: jax.Array, rotations: jax.Array, segments: jax.Array
        ) -> tuple[jax.Array, Any]:
            kind = jnp.asarray(self.config.kind_of_layer)[index] if len(kinds) > 1 else 0
            window = jnp.asarray(windows)[kind] if min(windows) < time else None
            layer = nnx.merge(graphdef, gather_layer_float32(params, self.rounding, layout, index))
            projected = layer.project(hidden, rotations[kind])
            queries, keys, values = map(partial(constrain, layout), projected, (QUERIES, KEYS, KEYS))
            attended = attend(queries, keys, values, segments=segments, window=window)
            hidden = constrain(layout, layer.add_attention(hidden, attended), HIDDEN_STATES)
            hidden = constrain(layout, layer.add_feed_forward(hidden), HIDDEN_STATES)
            kept = tuple(constrain(layout, x.swapaxes(1, 2), CACHED_KEYS) for x in (keys, values)) if keep else None
            return hidden, kept

        # Each device looks up its own columns of the embedding for all rows of its replica, and the devices exchange
        # these, which are far fewer numbers than the embedding has.
        hidden = self.look_up(constrain(layout, tokens, ("rows_of_replica", "time")))
        hidden = constrain(layout, hidden, ("rows_of_replica", "time", "embed"))
        step = step if self.remat == "none" else rematerialize(step, self.dtype)
        return jax.lax.scan(
            lambda hidden, layer: step(hidden, *layer, rotations, segments),
            constrain(layout, hidden, HIDDEN_STATES),
            (layers, jnp.arange(self.config.num_hidden_layers)),
        )

    def look_up(self, tokens: Int[jax.Array, "B T"]) -> Float[jax.Array, "B T D"]:
        """The tokens' rows of the embedding, rounded to the compute dtype, as the float32 residual stream begins.

        Gemma's factor is rounded as well, as it was in training; its product with them is exact.
        """
        embed = self.embed.get_value()
        if isinstance(embed, Int8Matrix):
            hidden = embed.rows(tokens)
        else:
            hidden = embed.at[tokens].get(mode="fill", fill_value=jnp.nan)
            hidden = compute_copy(hidden, self.rounding, "embed", rows=tokens[..., None]).astype(jnp.float32)
        factor = self.config.hidden_size**0.5 if self.config.traits.gemma else 1
        return hidden * jnp.asarray(factor, self.dtype).astype(jnp.float32)

    def last_norm(self, hidden: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T D"]:
        """Hidden states in the compute dtype: the norm of the residual stream after the last layer."""
        return rms_norm(hidden, self.norm, self.config, self.dtype)


class Layer(nnx.Module):
    """The decoder's layer: when created, with the parameters of all layers, [L, ...]; in the scan, with one layer's."""

    def __init__(
        self, config: Architecture, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs, lora: Lora | None = None
    ) -> None:
        self.config, self.dtype = config, dtype
        hidden, mlp = config.hidden_size, config.intermediate_size
        heads = config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim

        def matrix(rows: int, columns: int) -> nnx.Param:
            normal = jax.nn.initializers.normal(config.initializer_range, param_dtype)
            return nnx.Param(normal(rngs.params(), (config.num_hidden_layers, rows, columns)))

        def constant(value: int, size: int) -> nnx.Param:
            dtype = param_dtype if lora is None else jnp.float32
            return nnx.Param(jnp.full((config.num_hidden_layers, size), value, dtype))

        traits = config.traits

        def bias(size: int) -> nnx.Param | None:
            return constant(0, size) if traits.qkv_bias else None

        def norm(wanted: bool, size: int = hidden) -> nnx.Param | None:
            return constant(1 - traits.gemma, size) if wanted else None

        self.attention_norm = norm(traits.norms != "after")
        self.q_weight, self.q_bias = matrix(heads, hidden), bias(heads)
        self.k_weight, self.k_bias = matrix(kv_heads, hidden), bias(kv_heads)
        self.v_weight, self.v_bias = matrix(kv_heads, hidden), bias(kv_heads)
        every = traits.head_norms == "all"
        self.q_norm = norm(traits.head_norms is not None, heads if every else config.head_dim)
        self.k_norm = norm(traits.head_norms is not None, kv_heads if every else config.head_dim)
        self.o_weight = matrix(hidden, heads)
        self.post_attention_norm = norm(traits.norms != "before")
        self.mlp_norm, self.pre_mlp_norm = norm(traits.norms == "before"), norm(traits.norms == "both")
        self.post_mlp_norm = norm(traits.norms != "before")
        self.gate_weight = matrix(mlp, hidden)
        self.up_weight = matrix(mlp, hidden)
        self.down_weight = matrix(hidden, mlp)

        self.lora_scale = 0.0 if lora is None else lora.scale
        if lora is not None:
            for name in (target for target in lora.targets if target != "head"):
                layers, rows, columns = getattr(self, f"{name}_weight").shape
                a, b = adapter(rows, columns, lora.rank, layers)
                setattr(self, f"{name}_a", a)
                setattr(self, f"{name}_b", b)

    def product(
        self, name: str, x: Float[jax.Array, "B T I"], dtype: DTypeLike | None = None
    ) -> Float[jax.Array, "B T O"]:
        """The layer's product `name` (q, k, ...) of x, with its bias and adapter if it has them, as `linear` is."""
        a = getattr(self, f"{name}_a", None)
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias", None)
        y = linear(x, weight, bias, dtype if a is None else jnp.float32)
        if a is None:
            return y
        # Rounded once: what the adapter adds is less than half the distance of two bfloat16 numbers at first.
        low = linear(linear(x, a), getattr(self, f"{name}_b")).astype(jnp.float32)
        return (y + self.lora_scale * low).astype(dtype or x.dtype)

    def project(
        self, hidden: Float[jax.Array, "B T D"], rotation: Float[jax.Array, "2 B T 1 R"]
    ) -> tuple[Float[jax.Array, "B T N H"], Float[jax.Array, "B T K H"], Float[jax.Array, "B T K H"]]:
        """Queries and keys, both with rotary positions and in some families normalized before, and values."""
        x = rms_norm(hidden, self.attention_norm, self.config, self.dtype)
        head_dim = self.config.head_dim
        heads = (*hidden.shape[:2], -1, head_dim)

        def normalized(name: str, norm: nnx.Param | None) -> Float[jax.Array, "B T _ H"]:
            y = self.product(name, x)
            y = y if norm is None else y.reshape(*hidden.shape[:2], -1, norm.shape[-1])
            return rms_norm(y, norm, self.config, self.dtype).reshape(heads)

        # Attention divides scores by sqrt(H), where Gemma may name another number.
        gain = (head_dim / (self.config.query_pre_attn_scalar or head_dim)) ** 0.5
        queries = rotate(normalized("q", self.q_norm), gain * rotation)
        return queries, rotate(normalized("k", self.k_norm), rotation), self.product("v", x).reshape(heads)

    def add_attention(
        self, hidden: Float[jax.Array, "B T D"], attended: Float[jax.Array, "B T N H"]
    ) -> Float[jax.Array, "B T D"]:
        """hidden + o(attended), in the dtype of hidden: the residual stream after attention."""
        added = self.product("o", attended.reshape(*hidden.shape[:2], -1), dtype=hidden.dtype)
        return hidden + rms_norm(added, self.post_attention_norm, self.config, hidden.dtype)

    def add_feed_forward(self, hidden: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T D"]:
        """hidden + down(silu(gate(x)) * up(x)) with x = norm(hidden), in the dtype of hidden; Gemma's has GELU."""
        norm = self.pre_mlp_norm if self.mlp_norm is None else self.mlp_norm
        x = rms_norm(hidden, norm, self.config, self.dtype)
        gate = self.product("gate", x)
        # GELU is rounded once: it has an x^3.
        gelu = self.config.traits.gemma
        gate = jax.nn.gelu(gate.astype(jnp.float32)).astype(gate.dtype) if gelu else jax.nn.silu(gate)
        added = self.product("down", gate * self.product("up", x), dtype=hidden.dtype)
        return hidden + rms_norm(added, self.post_mlp_norm, self.config, hidden.dtype)


def linear(
    x: Float[jax.Array, "B T I"], weight: nnx.Param, bias: nnx.Param | None = None, dtype: DTypeLike | None = None
) -> Float[jax.Array, "B T O"]:
    """x @ weight.T + bias, rounded once: operands in the dtype of x, the result in `dtype`, else in that of x."""
    matrix = weight.get_value()
    if isinstance(matrix, Int8Matrix):
        y = matrix.product(x)
        return (y if bias is None else y + bias[...]).astype(dtype or x.dtype)
    if bias is None:
        return product(dtype, x, matrix.astype(jnp.float32))
    return (product(jnp.float32, x, matrix.astype(jnp.float32)) + bias[...]).astype(dtype or x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    dtype: DTypeLike | None, x: Float[jax.Array, "B T I"], weight: Float32[jax.Array, "O I"]
) -> Float[jax.Array, "B T O"]:
    """x @ weight.T in `dtype`, without one in that of x, which all operands have; the weight's gradient is float32."""
    return run_product(dtype, x, weight)[0]


def run_product(
    dtype: DTypeLike | None, x: Float[jax.Array, "B T I"], weight: Float32[jax.Array, "O I"]
) -> tuple[Float[jax.Array, "B T O"], tuple[jax.Array, jax.Array]]:
    narrow = weight.astype(x.dtype)
    y = jnp.einsum("bti,oi->bto", x, narrow, precision=precision_of(x.dtype), preferred_element_type=dtype)
    return y, (x, narrow)


def differentiate_product(
    dtype: DTypeLike | None, operands: tuple[jax.Array, jax.Array], dy: Float[jax.Array, "B T O"]
) -> tuple[Float[jax.Array, "B T I"], Float32[jax.Array, "O I"]]:
    x, weight = operands
    dy = dy.astype(x.dtype)  # JAX's own rule would multiply a float32 cotangent in float32
    einsum = partial(jnp.einsum, precision=precision_of(x.dtype))
    return einsum("bto,oi->bti", dy, weight), einsum("bto,bti->oi", dy, x, preferred_element_type=jnp.float32)


product.defvjp(run_product, differentiate_product)


def rms_norm(
    x: Float[jax.Array, "B T *D"], weight: nnx.Param | None, config: Architecture, dtype: DTypeLike
) -> Float[jax.Array, "B T *D"]:
    """x / sqrt(mean(x^2) + eps) * weight, in Gemma * (1 + weight): computed in float32 and rounded once, to `dtype`.

    Without a weight, where the family has no such norm, it is x.
    """
    if weight is None:
        return x.astype(dtype)
    wide, factor = x.astype(jnp.float32), weight[...].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.rms_norm_eps)
    return (wide * scale * (1 + factor if config.traits.gemma else factor)).astype(dtype)


def rotary(positions: Int[jax.Array, "B T"], kind: LayerKind, head_dim: int) -> Float[jax.Array, "2 B T 1 R"]:
    """The cosines and sines of position * theta^(-2i/H), float32 (arXiv:2104.09864, section 3.2.2).

    Where nothing is rotated they are 1 and 0. Llama 3.1 divides low frequencies by a factor: those of wavelengths that
    fit less than `low_freq_factor` times into the context that it was first trained with; in between the division sets
    in linearly (arXiv:2407.21783, section 3.4.2, and its published reference code).
    """
    exponents = -jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = jnp.zeros_like(exponents) if kind.rope_theta is None else kind.rope_theta**exponents
    if isinstance(scaling := kind.rope_scaling, RopeScaling):
        fits = scaling.original_max_position_embeddings * frequencies / (2 * jnp.pi)
        kept = (fits - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = jnp.clip(kept, 0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    elif scaling is not None:
        frequencies = frequencies / scaling
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(x: Float[jax.Array, "B T N H"], rotation: Float[jax.Array, "2 B T 1 R"]) -> Float[jax.Array, "B T N H"]:
    """Rotate the pairs (i, i + H/2), as Hugging Face's checkpoints have them; the paper pairs neighbors."""
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


def masked_attention(
    queries: Float[jax.Array, "B T N H"],
    keys: Float[jax.Array, "B T K H"],
    values: Float[jax.Array, "B T K H"],
    segments: Int[jax.Array, "B T"],
    window: Int[jax.Array, ""] | None = None,
) -> Float[jax.Array, "B T N H"]:
    """XLA's attention: `Decoder.__call__` says which keys a query attends to, and `window` how many at most."""
    same = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
    mask = jnp.tril(same)[:, None]
    if window is not None:
        place = jnp.arange(segments.shape[1])
        mask &= place[:, None] - place < window
    with set_precision(queries.dtype):
        return jax.nn.dot_product_attention(queries, keys, values, mask=mask)


def rematerialize(step: Callable[..., Any], dtype: DTypeLike) -> Callable[..., Any]:
    """The step of a scan, computed again in the backward pass, which keeps its residual stream in `dtype`."""

    def forward(hidden: jax.Array, *others: Any) -> tuple[Any, tuple]:
        return step(hidden, *others), (hidden.astype(dtype), *others)

    def backward(kept: tuple, cotangents: Any) -> tuple:
        hidden, params, *others = kept
        _, pullback = jax.vjp(lambda *x: step(*x, *others), hidden.astype(cotangents[0].dtype), params)
        return *pullback(cotangents), *(None for _ in others)

    recomputed = jax.custom_vjp(step)
    recomputed.defvjp(forward, backward)
    return recomputed
