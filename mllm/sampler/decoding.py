"""A decode step: new tokens of every row through the decoder, with a cache of keys and values.

Parameters and cache are one array per layer, because XLA for GPUs would copy slices of stacked arrays at every token.
The cache is a pool of pages, each with consecutive tokens of one row, so memory follows the rows' own lengths (Kwon et
al. 2023, arXiv:2309.06180). On Hopper GPUs a kernel reads the pages of each row (paged_attention.py). Elsewhere
attention takes the whole pool as a batch of pages. A page's queries are its row's queries, and the pages' softmaxes are
merged by row (Dao et al. 2023, Flash-Decoding). So every key is read once, in place, by plain batched products, and
shapes depend only on the number of pages. Recent tokens that are not in a page yet are in the tail, where all rows
write at the same place. A layer with a delta net has one state per row instead of keys and values.

Letters: B rows, Q new tokens of each, P pages, M pages that a row may have, T places of a page, C places of the tail, X
shards of rows and pages; D hidden size, H size of a head, N query heads, K key and value heads, G = N/K queries that
share a key.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int, Shaped

from lm_head.contract import dot
from lm_head.precision import precision_of
from mllm.model.compute_copy import Rounding
from mllm.model.decoder import Decoder, rotary
from mllm.model.delta_net import DeltaState
from mllm.model.int8 import Int8Matrix
from mllm.model.layout import (
    CACHED_KEYS,
    DELTA_INPUTS,
    DELTA_MEMORY,
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
from mllm.sampler.paged_attention import RowView, can_run


class LayerCache(NamedTuple):
    """A layer's keys and values, in the compute dtype: of each page, or of each row's tail."""

    keys: Float[Any, "B K P H"]
    values: Float[Any, "B K P H"]


Cache = tuple[LayerCache, ...]
"""The cache of all layers with attention."""
States = tuple[DeltaState, ...]
"""Each row's state in all layers with a delta net."""
MANY_ROWS = 64
"""Rows of a shard from which on a TPU gathers faster than it compares, by the compiler's listing for v6e."""
STATE_AXES = DeltaState(DELTA_INPUTS, DELTA_MEMORY)


class Pages(NamedTuple):
    """The contents of the pages of one kind of layers."""

    rows: Int[Any, " P"]
    """The row, in the page's shard, of the page's tokens; -1 for a page that no query reads."""
    starts: Int[Any, " P"]
    """The position of the page's first token in the row's sequence."""
    of_row: Int[Any, "B M"]
    """Each row's pages that its next token sees; unused entries are the number of pages."""


class DecodingWeights(NamedTuple):
    """The parameters as a decode step reads them: in the compute dtype, gathered over fsdp."""

    outer: Params
    """The parameters outside the layers."""
    layers: dict[str, tuple[Params, ...]]
    """The parameters of each layer, by stack."""


def abstract_cache(model: Decoder, counts: Sequence[int], places: int) -> Cache:
    """The shapes, dtypes and, with a layout, shardings of a cache; `counts` are the pages of each kind of layers."""
    config, layout = model.config, model.layout
    sharding = None if layout is None else layout.sharding(CACHED_KEYS)
    cache = []
    for count in counts:
        shape = (count, config.num_key_value_heads, places, config.head_dim)
        keys = jax.ShapeDtypeStruct(shape, model.dtype, sharding=sharding)
        cache.append(LayerCache(keys, keys))
    return tuple(cache[kind] for kind in config.kind_of_layer)


def decoding_graphdef(model: Decoder) -> nnx.GraphDef:
    """The graph of modules for decoding weights: the model's, without an adapter of the head.

    The layers' adapters are not merged into their matrices: rounding would lose most of a small adapter.
    """
    if model.lora is None or "head" not in model.lora.targets:
        return nnx.split(model)[0]
    config = replace(model.config, tie_word_embeddings=False)  # merged, the head is a matrix of its own
    lora = replace(model.lora, targets=tuple(name for name in model.lora.targets if name != "head"))
    options = {name: getattr(model, name) for name in ("dtype", "remat", "attention", "own_kernels", "layout")}
    return nnx.split(Decoder.abstract(config, dithered=model.rounding.dithered, lora=lora, **options))[0]


def decoding_weights(graphdef: nnx.GraphDef, params: Params, int8: bool = False) -> DecodingWeights:
    """The decoding weights of a model, made one layer at a time to save memory.

    `int8`: matrices except adapters become `Int8Matrix`.
    """
    model = nnx.merge(graphdef, params)
    outer, stacks = split_layers(params)
    options = model.rounding, model.layout, int8
    shared = shared_parameters(model, outer, int8)
    copied = nnx.State({name: value for name, value in outer.items() if name not in shared})
    outer = nnx.State({**shared, **merge_and_gather(copied, None, *options, model.lora)})
    counts = {name: len(model.config.layers_of(name)) for name in stacks}
    layers = {
        name: tuple(merge_and_gather(stacks[name], index, *options, stack=name) for index in range(count))
        for name, count in counts.items()
    }
    return DecodingWeights(outer, layers)


def abstract_decoding_weights(model: Decoder, params: Params, int8: bool = False) -> tuple[DecodingWeights, Params]:
    """The shapes, dtypes and shardings of the decoding weights, from abstract parameters; and `shared_parameters`.

    The shared parameters are among the decoding weights, but take no further memory.
    """
    assert model.layout is not None
    outer, stacks = split_layers(params)
    shared = shared_parameters(model, outer, int8)
    outer = jax.eval_shape(lambda x: merge_adapters(x, model.lora), outer)
    outer = model.layout.abstract_gathered(outer, model.dtype, int8=int8)
    layers = {}
    for name, stack in stacks.items():
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stack)
        gathered = model.layout.abstract_gathered(layer, model.dtype, f"{name}.", int8)
        layers[name] = (gathered,) * len(model.config.layers_of(name))
    return DecodingWeights(outer, layers), shared


def shared_parameters(model: Decoder, outer: Params, int8: bool) -> dict[str, Any]:
    """The parameters outside the layers that decoding reads as they are stored, without a copy.

    A LoRA run saves gigabytes: it holds embedding and head in the compute dtype.
    """
    layout = model.layout
    if layout is None or model.head_a is not None:
        return {}
    gathered = layout.abstract_gathered(outer, model.dtype)

    def is_gathered(name: str) -> bool:
        (stored,), (read,) = jax.tree.leaves(outer[name]), jax.tree.leaves(gathered[name])
        unchanged = stored.dtype == read.dtype and stored.sharding.is_equivalent_to(read.sharding, len(read.shape))
        return unchanged and not (int8 and stored.ndim > 1)

    return {name: outer[name] for name in outer if is_gathered(name)}


@partial(jax.jit, static_argnames=("rounding", "layout", "int8", "lora", "stack"))
def merge_and_gather(
    params: Params,
    index: Int[Any, ""] | None,
    rounding: Rounding,
    layout: Layout | None,
    int8: bool,
    lora: Lora | None = None,
    stack: str = "layers",
) -> Params:
    """The decoding weights of the layer `index`, or without an index of the parameters outside the layers."""
    if index is not None:
        params = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), params)
    layer, prefix = (0, "") if index is None else (index, f"{stack}.")
    merged = merge_adapters(params, lora)
    read = gather_int8 if int8 else gather
    return map_parameters(lambda x, name: read(rounding, layout, name, x, layer), merged, prefix)


def apply_tokens(
    graphdef: nnx.GraphDef,
    weights: DecodingWeights,
    cache: Cache,
    pages: Sequence[Pages],
    tail: Cache,
    tokens: Int[jax.Array, "B Q"],
    lengths: Int[jax.Array, "B"],
    done: Int[jax.Array, ""] | int,
    states: States = (),
    real: Bool[jax.Array, "B Q"] | None = None,
) -> tuple[Float[jax.Array, "B Q D"], Cache, States]:
    """The hidden states of `tokens` after the last norm, the tail with `tokens` added, and the new states.

    `lengths` is the number of each row's tokens in pages, `done` the number of tokens in the tail. Only tokens that are
    `real`, a prefix of each row, change the states; None: all tokens.
    """
    model = merge(graphdef, weights)
    layout, config = model.layout, model.config
    offsets = done + jnp.arange(tokens.shape[1])
    positions = lengths[:, None] + offsets
    rotations = [rotary(positions, kind, config.rotary_dim) for kind in config.kinds]
    shards = 1 if layout is None else layout.row_shards
    places, size = tail[0].keys.shape[2], cache[0].keys.shape[2]  # pages have one size

    def view_of(window: int | None, contents: Pages) -> View | RowView:
        if tokens.shape[1] == 1 and can_run(model, contents.of_row.shape[1] * size):
            return RowView.of(window, contents.of_row, contents.starts, lengths, done, shards)
        return View.of(window, contents, lengths, offsets, places, cache[0], shards)

    views = [view_of(kind.window, contents) for kind, contents in zip(config.kinds, pages, strict=True)]
    hidden = constrain(layout, model.look_up(tokens), HIDDEN_STATES)
    segments = jnp.ones_like(tokens) if real is None else real.astype(jnp.int32)
    filled, changed = [], []
    for stack, index in config.stack_of_layer:
        layer = nnx.split(getattr(merge(graphdef, weights, stack, index), stack))
        if stack == "delta":
            options = {"layout": layout, "own_kernels": model.own_kernels}
            hidden, state = apply_delta_layer(*layer, hidden, segments, states[index], **options)
            changed.append(state)
        else:
            kind = config.kind_of_layer[index]
            layer_cache = views[kind], cache[index], tail[index]
            hidden, written = apply_layer(*layer, hidden, rotations[kind], *layer_cache, done, layout=layout)
            filled.append(written)
    return model.last_norm(hidden), tuple(filled), tuple(changed)


# Layers of one kind are traced and lowered once; XLA inlines the calls.
@partial(jax.jit, static_argnames=("graphdef", "layout"))
def apply_layer(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    hidden: Float[jax.Array, "B Q D"],
    rotation: Float[jax.Array, "2 B Q 1 R"],
    view: "View | RowView",
    cache: LayerCache,
    tail: LayerCache,
    done: Int[Any, ""],
    *,
    layout: Layout | None,
) -> tuple[Float[jax.Array, "B Q D"], LayerCache]:
    """The layer's output for new tokens, and its tail with their keys and values."""
    layer = nnx.merge(graphdef, params)
    *projected, gate = layer.project(hidden, rotation)
    queries, keys, values = map(partial(constrain, layout), projected, (QUERIES, KEYS, KEYS))
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=done, axis=2)
    updated = (write(kept, new.swapaxes(1, 2)) for kept, new in zip(tail, (keys, values), strict=True))
    written = LayerCache(*(constrain(layout, x, CACHED_KEYS) for x in updated))
    hidden = layer.add_attention(hidden, view.attend(queries, cache, written, layout), gate)
    return constrain(layout, layer.add_feed_forward(hidden), HIDDEN_STATES), written


@partial(jax.jit, static_argnames=("graphdef", "layout", "own_kernels"))
def apply_delta_layer(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    hidden: Float[jax.Array, "B Q D"],
    segments: Int[jax.Array, "B Q"],
    state: DeltaState,
    *,
    layout: Layout | None,
    own_kernels: bool,
) -> tuple[Float[jax.Array, "B Q D"], DeltaState]:
    """A delta-net layer's output for new tokens, and its state after the tokens with a segment."""
    layer = nnx.merge(graphdef, params)
    hidden, state = layer.add_delta(hidden, segments, state, layout, own_kernels)
    return constrain(layout, layer.add_feed_forward(hidden), HIDDEN_STATES), state


def logits_of(model: Decoder, hidden: Float[jax.Array, "B D"]) -> Float[jax.Array, "B V"]:
    """The float32 logits of hidden states, with the vocabulary matrix of decoding weights."""
    matrix = (model.embed if model.head is None else model.head).get_value()
    return matrix.product(hidden) if isinstance(matrix, Int8Matrix) else dot(hidden, matrix, (1, 1), hidden.dtype)


def merge(graphdef: nnx.GraphDef, weights: DecodingWeights, stack: str = "layers", index: int = 0) -> Decoder:
    """The model with the parameters of layer `index` of `stack`, and of the first layer of every other stack."""
    chosen = {name: layers[index if name == stack else 0] for name, layers in weights.layers.items()}
    return nnx.merge(graphdef, nnx.State({**weights.outer, **chosen}))


class View(NamedTuple):
    """The parts of the pages and of the tail that each row's new tokens attend to."""

    rows: Int[jax.Array, "X P"]
    """The page's row in its shard; the number of rows for a page that no query reads."""
    of_row: Int[jax.Array, "X B M"]
    """Each row's pages; unused entries are the number of pages."""
    pages: Bool[jax.Array, "X P #Q T"]
    tail: Bool[jax.Array, "Q C"]

    @classmethod
    def of(
        cls,
        window: int | None,
        pages: Pages,
        lengths: Int[jax.Array, "B"],
        offsets: Int[jax.Array, " Q"],
        places: int,
        cache: LayerCache,
        shards: int,
    ) -> "View":
        """The view of tokens at `offsets` of the tail, after `lengths` tokens of their row in pages."""
        rows, starts = (x.reshape(shards, -1) for x in (pages.rows, pages.starts))
        length = jnp.take_along_axis(lengths.reshape(shards, -1), jnp.maximum(rows, 0), axis=1)
        token = (starts[..., None] + jnp.arange(cache.keys.shape[2]))[:, :, None]
        seen = (rows[..., None, None] >= 0) & (token < length[..., None, None])
        recent = jnp.arange(places) <= offsets[:, None]
        if window is not None:
            seen &= token > (length[..., None] + offsets)[..., None] - window
            recent &= jnp.arange(places) > offsets[:, None] - window
        of_row = pages.of_row.reshape(shards, -1, pages.of_row.shape[1])
        return cls(jnp.where(rows < 0, lengths.shape[0] // shards, rows), of_row, seen, recent)

    def attend(
        self, queries: Float[jax.Array, "B Q N H"], cache: LayerCache, tail: LayerCache, _: Layout | None = None
    ) -> Float[jax.Array, "B Q N H"]:
        """softmax(q k^T / sqrt(H)) v over what is visible; scores, softmax and sums are float32."""
        shards, kv_heads, count = self.rows.shape[0], tail.keys.shape[1], queries.shape[1]
        by_shard = lambda x: x.reshape(shards, -1, *x.shape[1:])  # noqa: E731
        grouped = by_shard(queries.reshape(-1, count, kv_heads, queries.shape[2] // kv_heads, queries.shape[3]))
        grouped = grouped.transpose(0, 1, 3, 4, 2, 5)  # X B K G Q H
        (keys, values), (new_keys, new_values) = (map(by_shard, arrays) for arrays in (cache, tail))
        options: Any = {"precision": precision_of(queries.dtype), "preferred_element_type": jnp.float32}
        einsum = partial(jnp.einsum, **options)
        scale = queries.shape[3] ** -0.5
        # The keys come first, or XLA for GPUs would keep a transposed copy of them all.
        dims = (((4,), (5,)), ((0, 1, 2), (0, 1, 2)))
        of_pages = jnp.moveaxis(jax.lax.dot_general(keys, self.take(grouped), dims, **options), 3, -1) * scale
        of_pages = jnp.where(self.pages[:, :, None, None], of_pages, -jnp.inf)
        of_tail = jnp.where(self.tail, einsum("xbkgqh,xbkch->xbkgqc", grouped, new_keys) * scale, -jnp.inf)
        rows = of_tail.shape[1]
        largest = jnp.maximum(self.merged("max", of_pages.max(-1), rows), of_tail.max(-1))
        of_pages = jnp.exp(of_pages - self.take(largest)[..., None])
        of_tail = jnp.exp(of_tail - largest[..., None])
        mass = self.merged("sum", of_pages.sum(-1), rows) + of_tail.sum(-1)
        read = self.merged("sum", einsum("xpkgqt,xpkth->xpkgqh", of_pages.astype(values.dtype), values), rows)
        read += einsum("xbkgqc,xbkch->xbkgqh", of_tail.astype(values.dtype), new_values)
        attended = (read / mass[..., None]).astype(queries.dtype)
        return attended.transpose(0, 1, 4, 2, 3, 5).reshape(queries.shape)

    def take(self, of_rows: Shaped[jax.Array, "X B *R"]) -> Shaped[jax.Array, "X P *R"]:
        """The row of `of_rows` that each page belongs to."""
        return jax.vmap(lambda x, rows: x.at[rows].get(mode="clip"))(of_rows, self.rows)

    def merged(
        self, name: Literal["max", "sum"], of_pages: Float[jax.Array, "X P *R"], rows: int
    ) -> Float[jax.Array, "X B *R"]:
        """The largest of each row's pages, -inf without one, or their sum.

        A GPU gathers each row's pages: scattered, they would be added in any order. A CPU scatters them. A TPU
        gathers pages one by one. For maxima a TPU compares few rows with all pages, and gathers the pages of many rows.
        For sums a TPU multiplies pages by zeros and ones.
        """
        belongs = self.rows[:, None] == jnp.arange(rows)[:, None]  # X B P

        def dense(x: jax.Array) -> jax.Array:
            if name == "max":
                return jnp.where(belongs.reshape(*belongs.shape, *[1] * (x.ndim - 2)), x[:, None], -jnp.inf).max(2)
            return jnp.einsum("xbp,xp...->xb...", belongs.astype(x.dtype), x, precision="highest")

        def gathered(x: jax.Array) -> jax.Array:
            none = -jnp.inf if name == "max" else 0
            taken = jax.vmap(lambda x, pages: x.at[pages].get(mode="fill", fill_value=none))(x, self.of_row)
            return taken.max(2) if name == "max" else taken.sum(2)

        segment = {"max": jax.ops.segment_max, "sum": jax.ops.segment_sum}[name]
        scattered = jax.vmap(partial(segment, num_segments=rows))
        tpu = gathered if name == "max" and rows > MANY_ROWS else dense
        return jax.lax.platform_dependent(of_pages, cpu=lambda x: scattered(x, self.rows), cuda=gathered, default=tpu)
