"""One token of every row through the decoder, with a cache of keys and values: a decode step.

Parameters and cache are one array a layer, because XLA for GPUs copies what a loop slices out of stacked arrays, at
every token. The rows' tokens end at one place of the cache, so that a step writes one slice; where a row begins, the
mask says. A layer with a window keeps no more places than that: place p is that of all tokens p, p + P, p + 2 P, ... of
which it holds the newest. The dims of the cache are in the order in which XLA for TPUs keeps them.

Letters: B rows, D hidden size, P places of the cache, H size of a head, N query heads, K key and value heads, G = N/K
queries that share a key.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from kernels.lm_head.contract import dot
from kernels.precision import precision_of
from mllm.model.compute_copy import Rounding
from mllm.model.decoder import Decoder, rotary
from mllm.model.int8 import Int8Matrix
from mllm.model.layout import (
    CACHED_KEYS,
    HIDDEN_STATES,
    KEYS,
    QUERIES,
    Layout,
    Params,
    constrain,
    gather,
    gather_int8,
    map_parameters,
    split_layers,
)
from mllm.model.lora import Lora, merge_adapters


class LayerCache(NamedTuple):
    """What one layer's attention reads of the tokens so far, in the compute dtype."""

    keys: Float[Any, "B K P H"]
    values: Float[Any, "B K P H"]


Cache = tuple[LayerCache, ...]
"""The cache of all layers."""


class DecodingWeights(NamedTuple):
    """The parameters as a decode step reads them: in the compute dtype, gathered over fsdp."""

    outer: Params
    """Those of no layer."""
    layers: tuple[Params, ...]


def abstract_cache(model: Decoder, rows: int, places: int) -> Cache:
    """The shapes, dtypes and, with a layout, shardings of a cache."""
    config, layout = model.config, model.layout
    sharding = None if layout is None else layout.sharding(CACHED_KEYS)
    cache = []
    for kind in config.kinds:
        shape = (rows, config.num_key_value_heads, min(places, kind.window or places), config.head_dim)
        keys = jax.ShapeDtypeStruct(shape, model.dtype, sharding=sharding)
        cache.append(LayerCache(keys, keys))
    return tuple(cache[kind] for kind in config.kind_of_layer)


def decoding_graphdef(model: Decoder) -> nnx.GraphDef:
    """The graph of a model's modules that decoding weights are merged into: as the model, but without a head's adapter.

    The layers' adapters stay apart from their matrices: merged and rounded, most of what they add would be lost.
    """
    if model.lora is None or "head" not in model.lora.targets:
        return nnx.split(model)[0]
    config = replace(model.config, tie_word_embeddings=False)  # merged, the head is a matrix of its own
    lora = replace(model.lora, targets=tuple(name for name in model.lora.targets if name != "head"))
    options = {name: getattr(model, name) for name in ("dtype", "remat", "attention", "layout")}
    return nnx.split(Decoder.abstract(config, dithered=model.rounding.dithered, lora=lora, **options))[0]


def decoding_weights(graphdef: nnx.GraphDef, params: Params, int8: bool = False) -> DecodingWeights:
    """The decoding weights of a model; one layer at a time, so that little more than the result is held.

    `int8`: matrices, but no adapters, are `Int8Matrix`.
    """
    model = nnx.merge(graphdef, params)
    outer, layers = split_layers(params)
    options = model.rounding, model.layout, int8
    indices = range(model.config.num_hidden_layers)
    shared = shared_parameters(model, outer, int8)
    copied = nnx.State({name: value for name, value in outer.items() if name not in shared})
    outer = nnx.State({**shared, **merge_and_gather(copied, None, *options, model.lora)})
    return DecodingWeights(outer, tuple(merge_and_gather(layers, i, *options) for i in indices))


def abstract_decoding_weights(model: Decoder, params: Params, int8: bool = False) -> tuple[DecodingWeights, Params]:
    """The shapes, dtypes and shardings of the decoding weights, from those of the parameters; and `shared_parameters`.

    These are among the decoding weights, but take no further memory.
    """
    assert model.layout is not None
    outer, layers = split_layers(params)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layers)
    shared = shared_parameters(model, outer, int8)
    outer = jax.eval_shape(lambda x: merge_adapters(x, model.lora), outer)
    gathered = model.layout.abstract_gathered(one, model.dtype, "layers.", int8)
    outer = model.layout.abstract_gathered(outer, model.dtype, int8=int8)
    return DecodingWeights(outer, (gathered,) * model.config.num_hidden_layers), shared


def shared_parameters(model: Decoder, outer: Params, int8: bool) -> dict[str, Any]:
    """The parameters of no layer that decoding reads as they are stored, so that they are not copied.

    Embedding and head are gigabytes where a LoRA run holds them in the compute dtype.
    """
    layout = model.layout
    if layout is None or model.head_a is not None:
        return {}
    gathered = layout.abstract_gathered(outer, model.dtype)

    def is_gathered(name: str) -> bool:
        (stored,), (read,) = jax.tree.leaves(outer[name]), jax.tree.leaves(gathered[name])
        same = stored.dtype == read.dtype and stored.sharding.is_equivalent_to(read.sharding, len(read.shape))
        return same and not (int8 and stored.ndim > 1)

    return {name: outer[name] for name in outer if is_gathered(name)}


@partial(jax.jit, static_argnames=("rounding", "layout", "int8", "lora"))
def merge_and_gather(
    params: Params,
    index: Int[Any, ""] | None,
    rounding: Rounding,
    layout: Layout | None,
    int8: bool,
    lora: Lora | None = None,
) -> Params:
    """One layer's parameters of those of all, or without an `index` those of no layer, as decode steps read them."""
    if index is not None:
        params = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), params)
    layer, prefix = (0, "") if index is None else (index, "layers.")
    merged = merge_adapters(params, lora)
    read = gather_int8 if int8 else gather
    return map_parameters(lambda x, name: read(rounding, layout, name, x, layer), merged, prefix)


def decode_token(
    graphdef: nnx.GraphDef,
    weights: DecodingWeights,
    cache: Cache,
    tokens: Int[jax.Array, "B"],
    lengths: Int[jax.Array, "B"],
    end: Int[jax.Array, ""],
) -> tuple[Float[jax.Array, "B D"], Cache]:
    """Hidden states after the last norm, from which the tokens after `tokens` are drawn, and the cache with `tokens`.

    `lengths` says how many tokens of each row are in the cache already, at the places before `end`. The new one
    goes to place `end`, which must exist in layers without a window; that isn't checked.
    """
    model = merge(graphdef, weights, 0)
    layout, config = model.layout, model.config
    rotations = [rotary(lengths[:, None], kind, config.head_dim) for kind in config.kinds]

    def visible(places: int) -> Bool[jax.Array, "B P"]:
        tokens = end - (end - jnp.arange(places)) % places  # the newest of each place, by where the row's tokens end
        return tokens >= (end - lengths)[:, None]

    hidden = constrain(layout, model.look_up(tokens[:, None]), HIDDEN_STATES)
    filled = []
    for index, layer_cache in enumerate(cache):
        layer, places = merge(graphdef, weights, index).layers, layer_cache.keys.shape[2]
        projected = layer.project(hidden, rotations[config.kind_of_layer[index]])
        queries, keys, values = map(partial(constrain, layout), projected, (QUERIES, KEYS, KEYS))
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=end % places, axis=2)
        both = (write(old, new.swapaxes(1, 2)) for old, new in zip(layer_cache, (keys, values), strict=True))
        written = LayerCache(*(constrain(layout, x, CACHED_KEYS) for x in both))
        hidden = layer.add_attention(hidden, attend(queries, written, visible(places)))
        hidden = constrain(layout, layer.add_feed_forward(hidden), HIDDEN_STATES)
        filled.append(written)
    return model.last_norm(hidden)[:, 0], tuple(filled)


def logits_of(model: Decoder, hidden: Float[jax.Array, "B D"]) -> Float[jax.Array, "B V"]:
    """The float32 logits of hidden states, with the vocabulary matrix of decoding weights."""
    matrix = (model.embed if model.head is None else model.head).get_value()
    return matrix.product(hidden) if isinstance(matrix, Int8Matrix) else dot(hidden, matrix, (1, 1), hidden.dtype)


def merge(graphdef: nnx.GraphDef, weights: DecodingWeights, index: int) -> Decoder:
    """The model with the parameters of one layer in place of those of all."""
    return nnx.merge(graphdef, nnx.State({**weights.outer, "layers": weights.layers[index]}))


def attend(
    queries: Float[jax.Array, "B 1 N H"], cache: LayerCache, visible: Bool[jax.Array, "B P"]
) -> Float[jax.Array, "B 1 N H"]:
    """softmax(q k^T / sqrt(H)) v over the visible places; scores and softmax are float32."""
    rows, kv_heads, _, head_dim = cache.keys.shape
    grouped = queries.reshape(rows, kv_heads, -1, head_dim)
    einsum = partial(jnp.einsum, precision=precision_of(queries.dtype))
    scores = einsum("bkgh,bkph->bkgp", grouped, cache.keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, -jnp.inf)
    shares = jax.nn.softmax(scores, axis=-1).astype(cache.values.dtype)
    return einsum("bkgp,bkph->bkgh", shares, cache.values).reshape(queries.shape)
