"""The compiled programs of the rollout engine: rows of a batch are slots, which sequences enter and leave.

Each device has its own slots, its own prompts and its own pages, and no program moves keys or values between devices.
All shapes are static; the host (`engine.py`, `pages.py`) chooses among few of them and says by numbers what happens to
each slot and page.

Letters: B slots, M rows that enter, S pages that a row writes to, C tokens (of a chunk, or in each row that enters), K
key and value heads, P pages of the pool, T places of a page, H size of a head, W width of a batch of prompts.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from mllm.config.rollout import RolloutConfig
from mllm.model.decoder import Decoder
from mllm.model.layout import CACHED_KEYS, Layout, Params, constrain
from mllm.sampler import sampling
from mllm.sampler.decoding import (
    Cache,
    DecodingWeights,
    LayerCache,
    Pages,
    abstract_cache,
    apply_tokens,
    logits_of,
    merge,
)

CHUNK = 16
"""Decode steps between two moments at which sequences may enter and leave."""


class Slots(NamedTuple):
    """What determines the next token of each slot, beside the parameters and the cache."""

    tokens: Int[Any, "B"]
    """The last token, which is not in the cache yet."""
    lengths: Int[Any, "B"]
    """How many tokens are in the cache."""
    counts: Int[Any, "B"]
    """How many tokens the completion has."""
    limits: Int[Any, "B"]
    """How many it may have."""
    sequences: Int[Any, "B"]
    """The sequence's number in the step."""
    live: Bool[Any, "B"]
    """False for a slot without a sequence: it is computed all the same, and its tokens mean nothing."""


class Stream(NamedTuple):
    """What all slots share."""

    stop_ids: Int[Any, "S"]
    seed: Int[Any, ""]
    step: Int[Any, ""]
    greedy: Bool[Any, ""]
    """Whether the likeliest tokens are taken instead of drawn ones."""


@partial(jax.jit, static_argnames="graphdef")
def prefill(
    graphdef: nnx.GraphDef, params: Params, prompts: Int[jax.Array, "M W"], lengths: Int[jax.Array, "M"]
) -> Cache:
    """The keys and values of prompts, each of which begins its row."""
    model = nnx.merge(graphdef, params)
    places = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    kept = model.apply_layers(prompts, places, (places < lengths[:, None]).astype(jnp.int32), keep=True)[1]
    keys, values = kept["layers"]
    return tuple(LayerCache(*one) for one in zip(keys, values, strict=True))


@partial(jax.jit, static_argnames="layout", donate_argnums=0)
def insert(
    cache: LayerCache,
    prompts: LayerCache,
    sources: Int[jax.Array, "M"],
    places: Int[jax.Array, "M S"],
    *,
    layout: Layout | None,
) -> LayerCache:
    """The pool with each of these prompts of its device, from the first token on, at its pages `places`.

    Pages beyond the last are left out: they belong to empty rows, or to tokens that no window reaches.
    """

    def enter(
        old: Float[jax.Array, "P K T H"], new: Float[jax.Array, "N K W H"], sources: jax.Array, places: jax.Array
    ) -> Float[jax.Array, "P K T H"]:
        return written(old, new[sources], places, jnp.zeros_like(sources))

    local = on_each_device(layout, enter, (CACHED_KEYS, CACHED_KEYS, ("batch",), ("batch",)))
    return LayerCache(*(local(old, new, sources, places) for old, new in zip(cache, prompts, strict=True)))


@partial(jax.jit, static_argnames="layout")
def resize(cache: LayerCache, sources: Int[jax.Array, " P"], *, layout: Layout | None) -> LayerCache:
    """The pool of these pages of each device."""
    local = on_each_device(layout, lambda old, sources: old[sources], (CACHED_KEYS, ("batch",)))
    return LayerCache(*(local(old, sources) for old in cache))


def written(
    pool: Float[jax.Array, "P K T H"],
    new: Float[jax.Array, "M K C H"],
    places: Int[jax.Array, "M S"],
    offsets: Int[jax.Array, "M"],
) -> Float[jax.Array, "P K T H"]:
    """The pool with each row's tokens in its pages `places`, from `offsets` on; pages beyond the last are left out.

    Whole pages are written: a scatter of single tokens is a loop on TPUs.
    """
    size, (rows, count) = pool.shape[2], places.shape
    index = jnp.arange(count * size) - offsets[:, None]
    moved = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1)[:, None, :, None], axis=2)
    moved = moved.reshape(rows, -1, count, size, new.shape[3]).swapaxes(1, 2)
    fresh = ((index >= 0) & (index < new.shape[2])).reshape(rows, count, 1, size, 1)
    return pool.at[places].set(jnp.where(fresh, moved, pool.at[places].get(mode="clip")), mode="drop")


@partial(jax.jit, static_argnames=("graphdef", "options"), donate_argnames="tail")
def decode(
    graphdef: nnx.GraphDef,
    weights: DecodingWeights,
    tail: Cache,
    cache: Cache,
    pages: tuple[Pages, ...],
    slots: Slots,
    stream: Stream,
    begun: Int[jax.Array, ""],
    steps: Int[jax.Array, ""],
    stop_after: Int[jax.Array, ""],
    *,
    options: RolloutConfig,
) -> tuple[sampling.Draw, Int[jax.Array, ""], Cache]:
    """Each slot's tokens of a chunk from `begun` on, at most `steps`; the place behind them, and their tail.

    `pages` says for each kind of layers what the cache holds of the tokens before the chunk, which `slots` counts. It
    stops early after `stop_after` sequences have ended, or all. What is drawn, [B, C], means nothing before `begun`,
    behind a stop token, or behind the last step. It reuses the memory of `tail`.
    """
    model = merge(graphdef, weights, 0)
    keys = sampling.sequence_keys(stream.seed, stream.step, slots.sequences)
    alive = slots.live.sum()

    def unfinished(carry: tuple) -> Bool[jax.Array, ""]:
        _, done, _, _, live = carry
        left = live.sum()
        return (done < begun + steps) & (left > 0) & (alive - left < stop_after)

    def decode_step(carry: tuple) -> tuple:
        chunk, done, tail, tokens, live = carry
        hidden, tail = apply_tokens(graphdef, weights, cache, pages, tail, tokens[:, None], slots.lengths, done)
        positions = slots.counts + done
        logits = logits_of(model, hidden[:, 0])
        # Both in one program: evaluation takes the likeliest tokens with those that training compiled.
        drawn = jax.lax.cond(
            stream.greedy,
            lambda logits: sampling.greedy(logits, options),
            lambda logits: sampling.sample(logits, keys, positions, options),
            logits,
        )
        stopped = (drawn.tokens[:, None] == stream.stop_ids).any(-1) | (positions + 1 >= slots.limits)
        chunk = jax.tree.map(lambda whole, new: whole.at[:, done].set(new), chunk, drawn)
        return chunk, done + 1, tail, drawn.tokens, live & ~stopped

    shape = (slots.tokens.shape[0], CHUNK)
    kept = jnp.zeros(shape, jnp.float32) if options.truncates else None
    none = sampling.Draw(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), kept), jnp.asarray(begun)
    chunk, done, tail, *_ = jax.lax.while_loop(unfinished, decode_step, (*none, tail, slots.tokens, slots.live))
    # Every process reads the tokens of all rows.
    return *jax.tree.map(partial(constrain, model.layout, axes=()), (chunk, done)), tail


@partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def extend(
    graphdef: nnx.GraphDef,
    weights: DecodingWeights,
    cache: Cache,
    pages: tuple[Pages, ...],
    places: tuple[Int[jax.Array, "M S"], ...],
    tokens: Int[jax.Array, "M W"],
    lengths: Int[jax.Array, "M"],
) -> Cache:
    """The cache with these tokens behind each row's first `lengths`, which `pages` have; `places` as for `add_tail`."""
    model = merge(graphdef, weights, 0)
    tail = empty_cache(model, [tokens.shape[0]] * len(model.config.kinds), tokens.shape[1])
    _, tail = apply_tokens(graphdef, weights, cache, pages, tail, tokens, lengths, 0)
    return add_tail(cache, tail, places, lengths, kinds=model.config.kind_of_layer, layout=model.layout)


def empty_cache(model: Decoder, counts: Sequence[int], places: int) -> Cache:
    """A cache of zeros, with the arguments of `abstract_cache`."""
    return zeros(abstract_cache(model, counts, places))()


@cache
def zeros(shapes: Cache) -> Callable[[], Cache]:
    """A program that makes zeros; they have a sharding, as what other programs return, or these would compile twice."""
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
    """The cache with the rows' tails behind their first `lengths` tokens, at the pages `places` of each kind."""
    write = on_each_device(layout, written, (CACHED_KEYS, CACHED_KEYS, ("batch",), ("batch",)))
    size = cache[0].keys.shape[2]
    return tuple(
        LayerCache(*(write(old, new, places[kind], lengths % size) for old, new in zip(pool, own, strict=True)))
        for kind, pool, own in zip(kinds, cache, tail, strict=True)
    )


def on_each_device(
    layout: Layout | None, function: Callable[..., jax.Array], axes: tuple[tuple[str, ...], ...]
) -> Callable[..., jax.Array]:
    """The function applied to each device's part of its arguments, which have these logical axes, the result the first.

    Inside jit. What the function does with rows stays on the device.
    """
    if layout is None or layout.mesh.size == 1:
        return function
    specs = tuple(layout.sharding(names).spec for names in axes)
    return jax.shard_map(function, mesh=layout.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
