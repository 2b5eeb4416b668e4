"""The layers of a decoder: attention or a gated delta net, each followed by a feed-forward network.

Letters: B batch, T time, D hidden size, L layers of a kind, H size of a head, N query heads, K key and value heads,
R pairs that are rotated; I and O the input and output size of a product.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from lm_head.precision import precision_of
from lm_head.target import platform as traced_platform
from mllm.model.architecture import Architecture
from mllm.model.attention import platform
from mllm.model.delta_net import (
    SHORT_SEQUENCE,
    DeltaState,
    Precisions,
    Rule,
    chunked,
    convolve,
    documents_of,
    kernels_can_run,
    recurrent,
)
from mllm.model.int8 import Int8Matrix
from mllm.model.layout import DELTA_INPUTS, DELTA_MEMORY, Layout, constrain, on_each_device
from mllm.model.lora import Lora, adapter

KEPT = "kept"
"""The name of arrays that a rematerialised layer can keep: results of products, and the stream after attention."""


@dataclass(frozen=True)
class Initial:
    """Makes the parameters of all layers of a kind, [L, ...]."""

    config: Architecture
    count: int
    param_dtype: DTypeLike
    rngs: nnx.Rngs
    lora: Lora | None

    def matrix(self, rows: int, columns: int) -> nnx.Param:
        normal = jax.nn.initializers.normal(self.config.initializer_range, self.param_dtype)
        return nnx.Param(normal(self.rngs.params(), (self.count, rows, columns)))

    def constant(self, value: int, size: int) -> nnx.Param:
        return nnx.Param(jnp.full((self.count, size), value, self.vector_dtype))

    def norm(self, size: int | None = None) -> nnx.Param:
        return self.constant(1 - self.config.traits.norms_add_one, size or self.config.hidden_size)

    @property
    def vector_dtype(self) -> DTypeLike:
        return self.param_dtype if self.lora is None else jnp.float32


class Layer(nnx.Module):
    """A layer of one kind: as created it has the parameters of all such layers, [L, ...]; in the scan only its own."""

    def __init__(
        self,
        config: Architecture,
        count: int,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
        lora: Lora | None = None,
    ) -> None:
        self.config, self.dtype = config, dtype
        initial = Initial(config, count, param_dtype, rngs, lora)
        hidden, mlp, norms = config.hidden_size, config.intermediate_size, config.traits.norms
        self.attention_norm = initial.norm() if norms != "after" else None
        self.make_mixer(initial)
        self.post_attention_norm = initial.norm() if norms != "before" else None
        self.mlp_norm = initial.norm() if norms == "before" else None
        self.pre_mlp_norm = initial.norm() if norms == "both" else None
        self.post_mlp_norm = initial.norm() if norms != "before" else None
        self.gate_weight = initial.matrix(mlp, hidden)
        self.up_weight = initial.matrix(mlp, hidden)
        self.down_weight = initial.matrix(hidden, mlp)

        self.lora_scale = 0.0 if lora is None else lora.scale
        if lora is not None:
            for name in (target for target in lora.targets if hasattr(self, f"{target}_weight")):
                layers, rows, columns = getattr(self, f"{name}_weight").shape
                a, b = adapter(rows, columns, lora.rank, layers)
                setattr(self, f"{name}_a", a)
                setattr(self, f"{name}_b", b)

    @abstractmethod
    def make_mixer(self, initial: Initial) -> None:
        """Make the parameters of the token mixer."""

    def product(
        self, name: str, x: Float[jax.Array, "B T *I"], dtype: DTypeLike | None = None, size: tuple[int, ...] = (-1,)
    ) -> Float[jax.Array, "B T *O"]:
        """The layer's product `name` (q, k, ...) of x, with its bias and adapter if it has them, as by `linear`.

        The result has the name `KEPT` for `jax.checkpoint`.
        """
        a = getattr(self, f"{name}_a", None)
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias", None)
        y = linear(x, weight, bias, dtype if a is None else jnp.float32, size)
        if a is not None:
            # Rounded once: the adapter's part is less than half the distance of two bfloat16 numbers at first.
            low = linear(linear(x, a), getattr(self, f"{name}_b"), size=size).astype(jnp.float32)
            y = (y + self.lora_scale * low).astype(dtype or x.dtype)
        return checkpoint_name(y, KEPT)

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


class AttentionLayer(Layer):
    """A layer with attention."""

    def make_mixer(self, initial: Initial) -> None:
        config, traits = self.config, self.config.traits
        hidden, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim

        def bias(size: int) -> nnx.Param | None:
            return initial.constant(0, size) if traits.qkv_bias else None

        self.q_weight, self.q_bias = initial.matrix(heads * (1 + traits.delta), hidden), bias(heads)
        self.k_weight, self.k_bias = initial.matrix(kv_heads, hidden), bias(kv_heads)
        self.v_weight, self.v_bias = initial.matrix(kv_heads, hidden), bias(kv_heads)
        all_heads = traits.head_norms == "all"
        self.q_norm = initial.norm(heads if all_heads else head_dim) if traits.head_norms else None
        self.k_norm = initial.norm(kv_heads if all_heads else head_dim) if traits.head_norms else None
        self.o_weight = initial.matrix(hidden, heads)

    def project(
        self, hidden: Float[jax.Array, "B T D"], rotation: Float[jax.Array, "2 B T 1 R"]
    ) -> tuple[
        Float[jax.Array, "B T N H"],
        Float[jax.Array, "B T K H"],
        Float[jax.Array, "B T K H"],
        Float[jax.Array, "B T N H"] | None,
    ]:
        """Queries, keys, values, and any gate. Queries and keys are rotated, in some families after a norm."""
        x = rms_norm(hidden, self.attention_norm, self.config, self.dtype)
        head_dim = self.config.head_dim
        heads = (-1, head_dim)

        def normalized(y: Float[jax.Array, "B T _ H"], norm: nnx.Param | None) -> Float[jax.Array, "B T _ H"]:
            wide = y if norm is None else y.reshape(*hidden.shape[:2], -1, norm.shape[-1])
            return rms_norm(wide, norm, self.config, self.dtype).reshape(y.shape)

        # Attention divides scores by sqrt(H), where Gemma may name another number.
        gain = (head_dim / (self.config.query_pre_attn_scalar or head_dim)) ** 0.5
        gate = None
        if self.config.traits.delta:  # each head's queries are followed by its gate
            queries, gate = jnp.split(self.product("q", x, size=(-1, 2 * head_dim)), 2, axis=-1)
        else:
            queries = self.product("q", x, size=heads)
        queries = rotate(normalized(queries, self.q_norm), gain * rotation)
        keys = rotate(normalized(self.product("k", x, size=heads), self.k_norm), rotation)
        return queries, keys, self.product("v", x, size=heads), gate

    def add_attention(
        self,
        hidden: Float[jax.Array, "B T D"],
        attended: Float[jax.Array, "B T N H"],
        gate: Float[jax.Array, "B T N H"] | None = None,
    ) -> Float[jax.Array, "B T D"]:
        """hidden + o(attended sigmoid(gate)), in the dtype of hidden: the residual stream after attention."""
        if gate is not None:
            attended = (attended * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(attended.dtype)
        added = self.product("o", attended, dtype=hidden.dtype)
        if self.post_attention_norm is None:
            return checkpoint_name(hidden + added, KEPT)  # in place of the product: nothing else needs the product
        return hidden + rms_norm(added, self.post_attention_norm, self.config, hidden.dtype)


HEADS: Any = ("batch", "time", "heads", None)
VALUES: Any = (*HEADS, None)
RULE_AXES: Any = Rule(queries=HEADS, keys=HEADS, values=VALUES, decay=HEADS, beta=HEADS, documents=HEADS[:2])
MEMORY_AXES = ("batch", "heads", None, None, None)
"""The logical axes of the delta rule's operands and of its memory."""


class DeltaLayer(Layer):
    """A layer with a gated delta net."""

    def make_mixer(self, initial: Initial) -> None:
        hidden, net = self.config.hidden_size, self.config.delta_net
        channels = 2 * net.keys + net.values
        self.qkv_weight = initial.matrix(channels, hidden)
        self.z_weight = initial.matrix(net.values, hidden)
        self.beta_weight = initial.matrix(net.value_heads, hidden)
        self.decay_weight = initial.matrix(net.value_heads, hidden)
        self.conv = initial.matrix(channels, net.taps)
        rate = jax.random.uniform(initial.rngs.params(), (initial.count, net.value_heads), minval=0.01, maxval=16)
        self.decay_log = nnx.Param(jnp.log(rate).astype(initial.vector_dtype))
        self.decay_bias = initial.constant(1, net.value_heads)
        self.out_norm = initial.constant(1, net.value_dim)
        self.out_weight = initial.matrix(hidden, net.values)

    def add_delta(
        self,
        hidden: Float[jax.Array, "B T D"],
        segments: Int[jax.Array, "B T"],
        before: DeltaState,
        layout: Layout | None = None,
        own_kernels: bool = True,
    ) -> tuple[Float[jax.Array, "B T D"], DeltaState]:
        """The residual stream after the delta net, in the dtype of hidden, and the state after each row's last token.

        The first document of a row continues from the state `before`. Tokens of segment 0 are padding: they don't
        change the state, and their outputs are meaningless.
        """
        net, shape = self.config.delta_net, hidden.shape[:2]
        x = rms_norm(hidden, self.attention_norm, self.config, self.dtype)
        mixed, inputs = convolve(self.product("qkv", x), self.conv[...], segments, before.inputs)
        mixed = jax.nn.silu(mixed).astype(self.dtype)
        queries, keys, values = jnp.split(mixed, [net.keys, 2 * net.keys], axis=-1)
        real = (segments != 0)[..., None]
        beta = jnp.where(real, jax.nn.sigmoid(self.product("beta", x, jnp.float32)), 0)
        rate = jnp.exp(self.decay_log[...].astype(jnp.float32))
        decay = jnp.where(real, -rate * jax.nn.softplus(self.product("decay", x, jnp.float32)), 0)

        def by_heads(y: Float[jax.Array, "B T _"], *size: int) -> Float[jax.Array, "B T _ *_"]:
            return y.reshape(*shape, net.key_heads, *size)

        group_size = net.value_heads // net.key_heads
        rule = Rule(
            queries=by_heads(queries, net.key_dim),
            keys=by_heads(keys, net.key_dim),
            values=by_heads(values, group_size, net.value_dim),
            decay=by_heads(decay, group_size),
            beta=by_heads(beta, group_size),
            documents=documents_of(segments),
        )
        rule = Rule(*(constrain(layout, x, axes) for x, axes in zip(rule, RULE_AXES, strict=True)))
        mesh = None if layout is None else layout.mesh
        devices = "cpu" if mesh is None else platform(mesh)
        precisions = Precisions.of(self.dtype, devices)
        run: Callable[..., tuple[jax.Array, jax.Array]] = recurrent
        if shape[1] > SHORT_SEQUENCE and own_kernels and kernels_can_run(net, self.dtype, mesh):
            from mllm.model import delta_kernel  # Pallas takes 0.3 s to import

            local = partial(delta_kernel.chunked, precisions=precisions, interpret=devices != "gpu")
            run = on_each_device(layout, local, (RULE_AXES, MEMORY_AXES), (VALUES, MEMORY_AXES))
        elif shape[1] > SHORT_SEQUENCE:
            run = partial(chunked, precisions=precisions)
        memory = before.memory.reshape(shape[0], net.key_heads, -1, net.key_dim, net.value_dim)
        outputs, memory = run(rule, memory)
        memory = constrain(layout, memory.reshape(before.memory.shape), DELTA_MEMORY)
        state = DeltaState(constrain(layout, inputs, DELTA_INPUTS), memory)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(outputs), axis=-1, keepdims=True) + self.config.rms_norm_eps)
        gate = jax.nn.silu(self.product("z", x).astype(jnp.float32)).reshape(outputs.shape)
        gated = (outputs * scale * self.out_norm[...].astype(jnp.float32) * gate).astype(self.dtype)
        added = self.product("out", gated.reshape(*shape, -1), dtype=hidden.dtype)
        return hidden + added, state


def linear(
    x: Float[jax.Array, "B T *I"],
    weight: nnx.Param,
    bias: nnx.Param | None = None,
    dtype: DTypeLike | None = None,
    size: tuple[int, ...] = (-1,),
) -> Float[jax.Array, "B T *O"]:
    """x @ weight.T + bias, rounded once: operands in the dtype of x, the result in `dtype`, or by default in x's.

    The weight is a matrix. `size` is the shape of a token's result, such as (-1, H).
    """
    matrix, shape = weight.get_value(), x.shape[:2]
    # XLA for TPUs copies an array to split the last dim. For one token the copy is smaller than the matrix.
    flat = traced_platform() != "tpu" or shape[1] == 1 or isinstance(matrix, Int8Matrix)
    if flat and (x.ndim > 3 or size != (-1,)):
        return linear(x.reshape(*shape, -1), weight, bias, dtype).reshape(*shape, *size)
    offset = None if bias is None else bias[...].reshape(size)
    if isinstance(matrix, Int8Matrix):
        y = matrix.product(x)
        return (y if offset is None else y + offset).astype(dtype or x.dtype)
    matrix = matrix.astype(jnp.float32).reshape(*size, *x.shape[2:])
    if offset is None:
        return product(dtype, x, matrix)
    return (product(jnp.float32, x, matrix) + offset).astype(dtype or x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    dtype: DTypeLike | None, x: Float[jax.Array, "B T *I"], weight: Float32[jax.Array, "*_"]
) -> Float[jax.Array, "B T *O"]:
    """The product of x and a weight [*O, *I] over *I, in `dtype`, or by default in the operands' dtype.

    The weight's gradient is float32.
    """
    return run_product(dtype, x, weight)[0]


def run_product(
    dtype: DTypeLike | None, x: Float[jax.Array, "B T *I"], weight: Float32[jax.Array, "*_"]
) -> tuple[Float[jax.Array, "B T *O"], tuple[jax.Array, jax.Array]]:
    narrow = weight.astype(x.dtype)
    dims = [*range(2, x.ndim)], [*range(weight.ndim - (x.ndim - 2), weight.ndim)]
    y = jnp.tensordot(x, narrow, dims, precision=precision_of(x.dtype), preferred_element_type=dtype)
    return y, (x, narrow)


def differentiate_product(
    dtype: DTypeLike | None, operands: tuple[jax.Array, jax.Array], dy: Float[jax.Array, "B T *O"]
) -> tuple[Float[jax.Array, "B T *I"], Float32[jax.Array, "*_"]]:
    x, weight = operands
    dy = dy.astype(x.dtype)  # JAX's own rule would multiply a float32 cotangent in float32
    tensordot = partial(jnp.tensordot, precision=precision_of(x.dtype))
    dx = tensordot(dy, weight, ([*range(2, dy.ndim)], [*range(dy.ndim - 2)]))
    return dx, tensordot(dy, x, ((0, 1), (0, 1)), preferred_element_type=jnp.float32)


product.defvjp(run_product, differentiate_product)


def rms_norm(
    x: Float[jax.Array, "B T *D"], weight: nnx.Param | None, config: Architecture, dtype: DTypeLike
) -> Float[jax.Array, "B T *D"]:
    """x / sqrt(mean(x^2) + eps) * weight, in some families * (1 + weight), in float32 and rounded once, to `dtype`.

    Without a weight, where the family has no such norm, it is x.
    """
    if weight is None:
        return x.astype(dtype)
    wide, factor = x.astype(jnp.float32), weight[...].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.rms_norm_eps)
    return (wide * scale * (1 + factor if config.traits.norms_add_one else factor)).astype(dtype)


def rotate(x: Float[jax.Array, "B T N H"], rotation: Float[jax.Array, "2 B T 1 R"]) -> Float[jax.Array, "B T N H"]:
    """Rotate the pairs (i, i + R) of the first 2R dims, as Hugging Face's checkpoints have them.

    The paper pairs neighbors.
    """
    return (rotate_by_product if traced_platform() == "tpu" else rotate_halves)(x, rotation)


def rotate_halves(
    x: Float[jax.Array, "B T N H"], rotation: Float[jax.Array, "2 B T 1 R"]
) -> Float[jax.Array, "B T N H"]:
    cosine, sine = rotation
    pairs = cosine.shape[-1]
    wide, tail = x[..., : 2 * pairs].astype(jnp.float32), x[..., 2 * pairs :]
    first, second = jnp.split(wide, 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), tail], axis=-1) if tail.shape[-1] else rotated.astype(x.dtype)


@jax.custom_vjp
def rotate_by_product(
    x: Float[jax.Array, "B T N H"], rotation: Float[jax.Array, "2 B T 1 R"]
) -> Float[jax.Array, "B T N H"]:
    """The result of `rotate_halves`, with a product that exchanges the halves. Only x has a gradient.

    XLA for TPUs would pad halves to 128 numbers. Each sum of the product has at most one number that isn't 0, so the
    product is exact.
    """
    cosine, sine = rotation
    pairs, head_dim = cosine.shape[-1], x.shape[-1]
    place = jnp.arange(head_dim)
    exchange = (place[:, None] == place + jnp.where(place < pairs, pairs, -pairs)).astype(x.dtype)
    partners = jnp.tensordot(x, exchange, 1, precision=precision_of(x.dtype), preferred_element_type=jnp.float32)
    tail = [(0, 0)] * (cosine.ndim - 1) + [(0, head_dim - 2 * pairs)]
    cosines = jnp.pad(jnp.concatenate([cosine, cosine], axis=-1), tail, constant_values=1)
    sines = jnp.pad(jnp.concatenate([-sine, sine], axis=-1), tail)
    return (x.astype(jnp.float32) * cosines + partners * sines).astype(x.dtype)


def rotate_back(
    rotation: Float[jax.Array, "2 B T 1 R"], dy: Float[jax.Array, "B T N H"]
) -> tuple[Float[jax.Array, "B T N H"], None]:
    """The gradient: the rotation by the negative angle."""
    cosine, sine = rotation
    return rotate_by_product(dy, jnp.stack([cosine, -sine])), None


rotate_by_product.defvjp(lambda x, rotation: (rotate_by_product(x, rotation), rotation), rotate_back)
