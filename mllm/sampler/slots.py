"""The compiled programs of the rollout engine: rows of a batch are slots that sequences enter and leave.

Each device has its own slots, prompts and pages, and no program moves keys or values between devices. All shapes are
static. The host (`engine.py`, `pages.py`, `states.py`) chooses among few shapes, and passes indices of slots, pages and
states.

Letters: B slots, M rows that enter, S pages that a row writes to, C tokens (of a chunk, or in each row that enters), K
key and value heads, P pages of the pool, T places of a page, H size of a head, W width of a batch of prompts.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from mllm.config.rollout import RolloutConfig
from mllm.model.decoder import Decoder
from mllm.model.delta_net import DeltaState
from mllm.model.layout import CACHED_KEYS, Layout, Params, constrain, on_each_device
from mllm.parallel.mesh import sharding
from mllm.sampler import sampling
from mllm.sampler.decoding import (
    STATE_AXES,
    Cache,
    DecodingWeights,
    LayerCache,
    Pages,
    States,
    abstract_cache,
    apply_tokens,
    logits_of,
    merge,
)

CHUNK = 16
"""Decode steps in a chunk; sequences enter and leave between chunks."""


class Slots(NamedTuple):
    """The state of each slot. With parameters and cache it determines the slot's next token."""

    tokens: Int[Any, "B"]
    """The last token, which is not in the cache yet."""
    lengths: Int[Any, "B"]
    """The number of tokens in the cache."""
    counts: Int[Any, "B"]
    """The number of tokens of the completion."""
    limits: Int[Any, "B"]
    """The most tokens of the completion."""
    sequences: Int[Any, "B"]
    """The sequence's index in the training step."""
    live: Bool[Any, "B"]
    """False for an empty slot, which is computed all the same; its tokens are garbage."""


class Stream(NamedTuple):
    """The settings and the random stream that all slots share."""

    stop_ids: Int[Any, "S"]
    seed: Int[Any, ""]
    step: Int[Any, ""]
    greedy: Bool[Any, ""]
    """Whether the likeliest tokens are taken instead of random tokens."""


class Prefilled(NamedTuple):
    """The layers' keys, values and states of prompts, one prompt per row."""

    cache: Cache
    states: States

    @property
    def tokens(self) -> int:
        """The number of tokens with keys and values in all rows, padding included."""
        return math.prod(self.cache[0].keys.shape[::2]) if self.cache else 0


class Candidate(NamedTuple):
    """A sequence with a prefilled prompt that waits for a slot."""

    sequence: int
    batch: Prefilled
    """The prefilled batch with the sequence's prompt, on all devices."""
    source: int
    """The prompt's row in its device's part of the batch."""


@partial(jax.jit, static_argnames="graphdef")
def prefill(
    graphdef: nnx.GraphDef, params: Params, prompts: Int[jax.Array, "M W"], lengths: Int[jax.Array, "M"]
) -> Prefilled:
    """Keys, values and states of prompts; each prompt begins its row."""
    model = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    kept = model.apply_layers(prompts, positions, (positions < lengths[:, None]).astype(jnp.int32), keep=True)[1]
    states = tuple(DeltaState(*arrays) for arrays in zip(*kept.get("delta", ((), ())), strict=True))
    return Prefilled(tuple(LayerCache(*arrays) for arrays in zip(*kept["layers"], strict=True)), states)


@partial(jax.jit, static_argnames="layout", donate_argnums=0)
def insert(
    cache: LayerCache,
    prompts: LayerCache,
    sources: Int[jax.Array, "M"],
    places: Int[jax.Array, "M S"],
    *,
    layout: Layout | None,
) -> LayerCache:
    """The pool with each device's prompts `sources` copied into the pages `places`, from the first token on.

    Indices beyond the last page are skipped: they belong to empty rows, or to tokens that no window reaches.
    """

    def enter(
        old: Float[jax.Array, "P K T H"], new: Float[jax.Array, "N K W H"], sources: jax.Array, places: jax.Array
    ) -> Float[jax.Array, "P K T H"]:
        return written(old, new[sources], places, jnp.zeros_like(sources))

    local = on_each_device(layout, enter, (CACHED_KEYS, CACHED_KEYS, ("batch",), ("batch",)))
    return LayerCache(*(local(old, new, sources, places) for old, new in zip(cache, prompts, strict=True)))


@partial(jax.jit, static_argnames="layout")
def resize(cache: LayerCache, sources: Int[jax.Array, " P"], *, layout: Layout | None) -> LayerCache:
    """The pool reduced or reordered to the pages `sources` of each device."""
    local = on_each_device(layout, lambda old, sources: old[sources], (CACHED_KEYS, ("batch",)))
    return LayerCache(*(local(old, sources) for old in cache))


def written(
    pool: Float[jax.Array, "P K T H"],
    new: Float[jax.Array, "M K C H"],
    places: Int[jax.Array, "M S"],
    offsets: Int[jax.Array, "M"],
) -> Float[jax.Array, "P K T H"]:
    """The pool with each row's tokens in its pages `places`, from `offsets` on; indices beyond the pool are skipped.

    A GPU writes single tokens. Elsewhere whole pages are written: a scatter of single tokens is a loop on TPUs.
    """
    size, (rows, count) = pool.shape[2], places.shape

    def by_token(pool: Float[jax.Array, "P K T H"]) -> Float[jax.Array, "P K T H"]:
        index = offsets[:, None] + jnp.arange(new.shape[2])
        pages = jnp.take_along_axis(places, index // size, axis=1, mode="fill", fill_value=pool.shape[0])
        return pool.at[pages, :, index % size].set(new.swapaxes(1, 2), mode="drop")

    def by_page(pool: Float[jax.Array, "P K T H"]) -> Float[jax.Array, "P K T H"]:
        index = jnp.arange(count * size) - offsets[:, None]
        moved = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1)[:, None, :, None], axis=2)
        moved = moved.reshape(rows, -1, count, size, new.shape[3]).swapaxes(1, 2)
        fresh = ((index >= 0) & (index < new.shape[2])).reshape(rows, count, 1, size, 1)
        return pool.at[places].set(jnp.where(fresh, moved, pool.at[places].get(mode="clip")), mode="drop")

    return jax.lax.platform_dependent(pool, cuda=by_token, default=by_page)


@partial(jax.jit, static_argnames=("graphdef", "options"), donate_argnames=("tail", "states"))
def decode(
    graphdef: nnx.GraphDef,
    weights: DecodingWeights,
    tail: Cache,
    states: States,
    cache: Cache,
    pages: tuple[Pages, ...],
    slots: Slots,
    stream: Stream,
    stop_after: Int[jax.Array, ""],
    *,
    options: RolloutConfig,
) -> tuple[sampling.Draw, Int[jax.Array, ""], Cache, States]:
    """Decode a chunk of tokens in each slot.

    Returns the drawn tokens [B, C], the number of steps, the tail, and the states. The loop stops early if all or
    `stop_after` sequences have ended. Drawn tokens after a stop token, or after the last step, are garbage.

    For each kind of layers, `pages` has the contents of the cache before the chunk. The lengths in `slots` are of the
    cache before the chunk. A slot's states don't change after a stop token. The memory of `tail` and `states` is
    donated.
    """
    model = merge(graphdef, weights)
    keys = sampling.sequence_keys(stream.seed, stream.step, slots.sequences)
    alive = slots.live.sum()

    def unfinished(carry: tuple) -> Bool[jax.Array, ""]:
        _, done, _, _, _, live = carry
        remaining = live.sum()
        return (done < CHUNK) & (remaining > 0) & (alive - remaining < stop_after)

    def decode_step(carry: tuple) -> tuple:
        chunk, done, tail, states, tokens, live = carry
        rows = tokens[:, None], slots.lengths, done, states, live[:, None]
        hidden, tail, states = apply_tokens(graphdef, weights, cache, pages, tail, *rows)
        positions = slots.counts + done
        logits = logits_of(model, hidden[:, 0])
        drawn = sampling.draw(logits, keys, positions, stream.greedy, options)
        stopped = (drawn.tokens[:, None] == stream.stop_ids).any(-1) | (positions + 1 >= slots.limits)
        chunk = jax.tree.map(lambda array, new: array.at[:, done].set(new), chunk, drawn)
        return chunk, done + 1, tail, states, drawn.tokens, live & ~stopped

    shape = (slots.tokens.shape[0], CHUNK)
    zeros = jnp.zeros(shape, jnp.float32)
    kept = zeros if options.truncates else None
    none = sampling.Draw(jnp.zeros(shape, jnp.int32), zeros, kept, zeros), jnp.int32(0)
    begin = *none, tail, states, slots.tokens, slots.live
    chunk, done, tail, states, *_ = jax.lax.while_loop(unfinished, decode_step, begin)
    # Every process reads the tokens of all rows.
    return *jax.tree.map(partial(constrain, model.layout, axes=()), (chunk, done)), tail, states


@partial(jax.jit, static_argnames="graphdef", donate_argnames=("cache", "states"))
def extend(
    graphdef: nnx.GraphDef,
    weights: DecodingWeights,
    cache: Cache,
    states: States,
    pages: tuple[Pages, ...],
    places: tuple[Int[jax.Array, "M S"], ...],
    slots: Int[jax.Array, "M"],
    tokens: Int[jax.Array, "M W"],
    lengths: Int[jax.Array, "M"],
    counts: Int[jax.Array, "M"],
) -> tuple[Cache, States]:
    """The cache with these tokens after each row's first `lengths` tokens, which are in `pages`; `places` as in
    `add_tail`.

    The states of the rows' slots advance by the first `counts` tokens; an index beyond the last slot has no state.
    """
    model = merge(graphdef, weights)
    layout, kinds = model.layout, model.config.kind_of_layer
    tail = empty_cache(model, [tokens.shape[0]] * len(model.config.kinds), tokens.shape[1])
    row_states = tuple(take_rows(layout, layer, slots) for layer in states)
    real = jnp.arange(tokens.shape[1]) < counts[:, None]
    _, tail, row_states = apply_tokens(graphdef, weights, cache, pages, tail, tokens, lengths, 0, row_states, real)
    states = tuple(put_rows(layout, old, new, slots) for old, new in zip(states, row_states, strict=True))
    return add_tail(cache, tail, places, lengths, kinds=kinds, layout=layout), states


def take_rows(layout: Layout | None, states: DeltaState, rows: Int[jax.Array, " M"]) -> DeltaState:
    """The given rows of each device's states; an index beyond the last row gives an arbitrary row. Inside jit."""
    axes = [(names, ("batch",)) for names in STATE_AXES]
    take = partial(on_each_device, layout, lambda old, rows: old.at[rows].get(mode="clip"))
    return DeltaState(*(take(arguments)(old, rows) for old, arguments in zip(states, axes, strict=True)))


def put_rows(layout: Layout | None, states: DeltaState, new: DeltaState, rows: Int[jax.Array, " M"]) -> DeltaState:
    """Each device's states with `new` states in the given rows; indices beyond the last row are skipped. Inside jit."""
    axes = [(names, names, ("batch",)) for names in STATE_AXES]
    put = partial(on_each_device, layout, lambda old, new, rows: old.at[rows].set(new, mode="drop"))
    return DeltaState(*(put(arguments)(*arrays, rows) for *arrays, arguments in zip(states, new, axes, strict=True)))


def empty_cache(model: Decoder, counts: Sequence[int], places: int) -> Cache:
    """A cache of zeros, with the arguments of `abstract_cache`."""
    return zeros(abstract_cache(model, counts, places))()


@cache
def zeros(shapes: Any) -> Callable[[], Any]:
    """A program that makes zeros, sharded like other programs' results: else the next program would compile twice."""
    made = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.jit(made, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))


@partial(jax.jit, static_argnames=("kinds", "layout"), donate_argnames="cache")
def add_tail(
    cache: Cache,
    tail: Cache,
    places: tuple[Int[jax.Array, "B S"], ...],
    lengths: Int[jax.Array, "B"],
    *,
    kinds: tuple[int, ...],
    layout: Layout | None,
) -> Cache:
    """The cache with the rows' tails after their first `lengths` tokens, in the pages `places` of each kind."""
    write = on_each_device(layout, written, (CACHED_KEYS, CACHED_KEYS, ("batch",), ("batch",)))
    size = cache[0].keys.shape[2]
    return tuple(
        LayerCache(*(write(old, new, places[kind], lengths % size) for old, new in zip(pool, layer_tail, strict=True)))
        for kind, pool, layer_tail in zip(kinds, cache, tail, strict=True)
    )


def on_devices(layout: Layout | None, tree: Any) -> Any:
    """Reshape arrays [X, B, ...] to [X B, ...] and put them on the devices of their shards."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]).astype(bool if x.dtype == bool else np.int32), tree)
    if layout is None:
        return flat
    distribute = partial(jax.make_array_from_process_local_data, sharding(layout.mesh, ("batch",)))
    return jax.tree.map(lambda x: distribute(x, x.shape), flat)  # the shape says that each process passes all rows
