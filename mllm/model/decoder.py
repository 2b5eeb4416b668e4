"""Qwen, Llama, Gemma and kin in Flax NNX: token ids of whole sequences to hidden states; `decoding.py` takes one token.

The parameters of all layers of a kind are stacked along a first dim L and applied by one `jax.lax.scan`. A deep model
thus compiles as fast as a shallow model. Matrices keep Hugging Face's layout, [out, in]. Models: section 2 of Qwen2.5
(arXiv:2412.15115), Qwen3 (arXiv:2505.09388), Gemma 3 (arXiv:2503.19786) and OLMo 2 (arXiv:2501.00656), and section 3.2
of Llama 3 (arXiv:2407.21783). Parts: rotary positions (arXiv:2104.09864), RMSNorm (arXiv:1910.07467), grouped queries
(arXiv:2305.13245), SwiGLU and GeGLU (arXiv:2002.05202). The delta nets that Qwen3.5 has in place of most attention are
in delta_net.py.

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
from jaxtyping import Float, Int

from mllm.model.architecture import Architecture, LayerKind, RopeScaling
from mllm.model.attention import Attention, set_precision
from mllm.model.compute_copy import Rounding, compute_copy
from mllm.model.delta_net import empty_state
from mllm.model.int8 import Int8Matrix
from mllm.model.layer import KEPT, AttentionLayer, DeltaLayer, rms_norm
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
        remat: Literal["products", "full"] = "products",
        attention: Attention | None = None,
        own_kernels: bool = True,
        layout: Layout | None = None,
        lora: Lora | None = None,
    ) -> None:
        """Make random parameters: matrices normal with deviation `initializer_range`, biases 0, norms' factors 1.

        Activations and the products' operands have `dtype`; float32 matrices are `dithered` on their way to it (see
        compute_copy.py) or rounded to nearest. Norms, rotary positions, softmax and the residual stream are
        float32. The backward pass recomputes each layer; with `remat` `products` it keeps the results of the layer's
        matrix products. Without `attention` XLA computes attention. `own_kernels` allows kernels for decode steps
        and delta nets. Without `layout` there is one device, or XLA chooses shardings. `lora` names the products with
        adapters. Adapters are float32 zeros at first; vectors are then float32.
        """
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.rounding = Rounding(self.dtype, dithered)
        self.remat = remat
        self.attention = attention
        self.own_kernels = own_kernels
        self.layout = layout
        normal = jax.nn.initializers.normal(config.initializer_range, param_dtype)
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(normal(rngs.params(), vocabulary))
        arguments: Any = (self.dtype, param_dtype, rngs, lora)
        self.layers = AttentionLayer(config, len(config.layers_of("layers")), *arguments)
        deltas = len(config.layers_of("delta"))
        self.delta = DeltaLayer(config, deltas, *arguments) if deltas else None
        norm = jnp.full(
            config.hidden_size, 1 - config.traits.norms_add_one, param_dtype if lora is None else jnp.float32
        )
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
        """The vocabulary matrix, with logits = hidden @ head_weight.T: as stored, or the embedding if it is tied.

        With an adapter of the head it is the merged matrix, in float32.
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

        A query attends to a key of the same nonzero segment that is not later, and inside the layer's window, if any.
        Positions count within each document. Segments count a row's documents from 1; segment 0 is padding with finite,
        meaningless hidden states. A token id beyond the vocabulary gives NaN.
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
        """The residual stream after the last layer; with `keep` also the layers' keys, values and states.

        `layers` has keys and values, [L, B, K, T, H] each, in the compute dtype. `delta` has the `DeltaState` after
        each row's last token, [L, B, ...]. The arguments are as for a call.
        """
        attend = self.attention or masked_attention
        config, layout, time = self.config, self.layout, positions.shape[1]
        kinds, stacks = config.kinds, {"layers": self.layers, "delta": self.delta}
        order = config.stack_of_layer[: config.period]
        counts = {name: sum(stack == name for stack, _ in order) for name, _ in order}
        rotations = jnp.stack([rotary(positions, kind, config.rotary_dim) for kind in kinds])
        windows = [min(kind.window or time, time) for kind in kinds]
        split: dict[str, Any] = {name: nnx.split(stacks[name]) for name in counts}

        def step(
            hidden: jax.Array,
            params: Params,
            period: jax.Array,
            rotations: jax.Array,
            segments: jax.Array,
            name: str,
            place: int,
        ) -> tuple[jax.Array, Any]:
            index, count = period, counts[name]
            if count > 1:  # sliced inside, since the backward pass would keep copies otherwise
                index, params = count * period + place, jax.tree.map(lambda x: x[place], params)
            kind = jnp.asarray(config.kind_of_layer)[index] if len(kinds) > 1 else 0
            window = jnp.asarray(windows)[kind] if min(windows) < time else None
            layer = nnx.merge(split[name][0], gather_layer_float32(params, self.rounding, layout, index, name))
            kept: Any
            if isinstance(layer, DeltaLayer):
                state = empty_state(len(hidden), config.delta_net, self.dtype)
                hidden, kept = layer.add_delta(hidden, segments, state, layout, self.own_kernels)
            else:
                *projected, gate = layer.project(hidden, rotations[kind])
                queries, keys, values = map(partial(constrain, layout), projected, (QUERIES, KEYS, KEYS))
                attended = attend(queries, keys, values, segments=segments, window=window)
                hidden = layer.add_attention(hidden, attended, gate)
                kept = tuple(constrain(layout, x.swapaxes(1, 2), CACHED_KEYS) for x in (keys, values)) if keep else None
            hidden = constrain(layout, layer.add_feed_forward(constrain(layout, hidden, HIDDEN_STATES)), HIDDEN_STATES)
            return hidden, kept if keep else None

        # Each device looks up its own columns of the embedding for all rows of its replica. The devices exchange the
        # results, which are far smaller than the embedding.
        hidden = self.look_up(constrain(layout, tokens, ("rows_of_replica", "time")))
        hidden = constrain(layout, hidden, ("rows_of_replica", "time", "embed"))
        steps: dict[Any, Callable] = {key: partial(step, name=key[0], place=key[1]) for key in order}
        steps = {key: rematerialize(function, self.remat, self.dtype) for key, function in steps.items()}

        def run_period(hidden: jax.Array, params_and_number: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
            params, number = params_and_number
            kept: dict[str, list] = {name: [] for name in counts}
            for name, place in order:
                hidden, entry = steps[name, place](hidden, params[name], number, rotations, segments)
                kept[name].append(entry)
            return hidden, {name: jax.tree.map(join, *parts) for name, parts in kept.items()}

        def join(*parts: jax.Array) -> jax.Array:
            return jnp.stack(parts) if len(parts) > 1 else parts[0]

        def by_period(name: str) -> Params:
            count, params = counts[name], split[name][1]
            return params if count == 1 else jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), params)

        numbers = jnp.arange(config.num_hidden_layers // config.period)
        layers = ({name: by_period(name) for name in counts}, numbers)
        hidden, kept = jax.lax.scan(run_period, constrain(layout, hidden, HIDDEN_STATES), layers)
        for name in (name for name, count in counts.items() if count > 1):
            kept[name] = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept[name])
        return hidden, kept

    def look_up(self, tokens: Int[jax.Array, "B T"]) -> Float[jax.Array, "B T D"]:
        """The tokens' rows of the embedding, rounded to the compute dtype, as the float32 residual stream begins.

        Gemma's factor is rounded as well, as it was in training; its product with the rows is exact.
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


def rotary(positions: Int[jax.Array, "B T"], kind: LayerKind, dims: int) -> Float[jax.Array, "2 B T 1 R"]:
    """The cosines and sines of position * theta^(-2i/2R), float32 (arXiv:2104.09864, section 3.2.2).

    `dims` is 2R, the number of a head's dims that are rotated. Where nothing is rotated, cosines are 1 and sines 0.
    Llama 3.1 divides frequencies by a factor if their wavelengths fit less than `low_freq_factor` times into the
    context of its first training. From there to `high_freq_factor` times the division fades out linearly
    (arXiv:2407.21783, section 3.4.2, and the published reference code).
    """
    exponents = -jnp.arange(0, dims, 2, dtype=jnp.float32) / dims
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
        index = jnp.arange(segments.shape[1])
        mask &= index[:, None] - index < window
    with set_precision(queries.dtype):
        return jax.nn.dot_product_attention(queries, keys, values, mask=mask)


def rematerialize(step: Callable[..., Any], remat: Literal["products", "full"], dtype: DTypeLike) -> Callable[..., Any]:
    """The step of a scan, computed again in the backward pass.

    With `products` the pass keeps the step's input and the results of its matrix products, or instead of attention's
    last product the stream after attention. With `full` it keeps the step's input alone, in `dtype`.
    """
    if remat == "products":
        policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        return jax.checkpoint(step, policy=policy, prevent_cse=False)  # the scan keeps the two passes apart

    def forward(hidden: jax.Array, *operands: Any) -> tuple[Any, tuple]:
        return step(hidden, *operands), (hidden.astype(dtype), *operands)

    def backward(kept: tuple, cotangents: Any) -> tuple:
        hidden, params, *operands = kept
        _, pullback = jax.vjp(lambda *x: step(*x, *operands), hidden.astype(cotangents[0].dtype), params)
        return *pullback(cotangents), *(None for _ in operands)

    recomputed = jax.custom_vjp(step)
    recomputed.defvjp(forward, backward)
    return recomputed
