"""The compiled programs of the rollout engine: rows of a batch are slots, which sequences enter and leave.

Each device has its own slots and its own prompts, and no program moves keys or values between devices. All shapes are
static; the host (`rollout.py`) chooses among few of them and says by numbers what happens to each slot.

Letters: B slots (before repacking N), C steps of a chunk, D hidden size, M prompts of a batch, W its width, K key and
value heads, P places of the cache (after repacking Q), H size of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from mllm.config.grpo import RolloutConfig
from mllm.model.decoding import Cache, DecodingWeights, LayerCache, abstract_cache, decode_token, logits_of, merge
from mllm.model.layout import CACHED_KEYS, Layout, Params, constrain
from mllm.rl import sampling

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
    sequences: Int[Any, "B"]
    """The sequence's number among those of the step."""
    live: Bool[Any, "B"]
    """False for a slot without a sequence: it is computed all the same, and its tokens mean nothing."""
    history: Int[Any, "B L"] | None = None
    """All tokens of prompt and completion, some repeatedly; None where nothing depends on them."""


class Stream(NamedTuple):
    """What all slots share."""

    stop_ids: Int[Any, "S"]
    seed: Int[Any, ""]
    step: Int[Any, ""]


@partial(jax.jit, static_argnames="graphdef")
def prefill(
    graphdef: nnx.GraphDef, params: Params, prompts: Int[jax.Array, "M W"], lengths: Int[jax.Array, "M"]
) -> Cache:
    """The keys and values of prompts, each of which begins its row; in the result each one ends its row."""
    model = nnx.merge(graphdef, params)
    width = prompts.shape[1]
    places = jnp.broadcast_to(jnp.arange(width), prompts.shape)
    stacked = model.apply_layers(prompts, places, (places < lengths[:, None]).astype(jnp.int32), keep=True)[1]
    # A row begins with its prompt for cuDNN's sake; slots want it at the end.
    align = on_each_device(model.layout, jax.vmap(partial(jnp.roll, axis=1)), (CACHED_KEYS, ("batch",)))
    kept = [layer.keys.shape[2] for layer in abstract_cache(model, len(prompts), width)]
    return tuple(
        LayerCache(*(align(x[i], width - lengths)[:, :, width - places :] for x in stacked))
        for i, places in enumerate(kept)
    )


@partial(jax.jit, static_argnames=("ring", "layout"), donate_argnums=0)
def insert(
    cache: LayerCache,
    prompts: LayerCache,
    sources: Int[jax.Array, "B"],
    end: Int[jax.Array, ""],
    *,
    ring: bool,
    layout: Layout | None,
) -> LayerCache:
    """The cache with prompt `sources[b]` of this device at the places of slot b before `end`; -1 leaves a slot alone.

    `ring` says that the layer has a window, and place 0 follows the last. Without it `end` must be at least the
    prompts' width, which isn't checked.
    """

    def write(
        old: Float[jax.Array, "B K P H"], new: Float[jax.Array, "M K W H"], sources: Int[jax.Array, "B"], end: jax.Array
    ) -> Float[jax.Array, "B K P H"]:
        if ring:  # a prompt takes all places of its slot
            new, end = jnp.roll(lengthen(new, old.shape[2]), end, axis=2), jnp.asarray(old.shape[2])
        window = jax.lax.dynamic_slice_in_dim(old, end - new.shape[2], new.shape[2], axis=2)
        window = jnp.where((sources >= 0)[:, None, None, None], new[jnp.maximum(sources, 0)], window)
        return jax.lax.dynamic_update_slice_in_dim(old, window, end - new.shape[2], axis=2)

    local = on_each_device(layout, write, (CACHED_KEYS, CACHED_KEYS, ("batch",), ()))
    return LayerCache(*(local(old, new, sources, end) for old, new in zip(cache, prompts, strict=True)))


@partial(jax.jit, static_argnames=("places", "layout"))
def repack(
    cache: LayerCache,
    sources: Int[jax.Array, "B"],
    ended: Int[jax.Array, ""],
    end: Int[jax.Array, ""],
    *,
    places: int,
    layout: Layout | None,
) -> LayerCache:
    """A cache of `places` with the row of slot `sources[b]` of this device, which ended at `ended`, in slot b.

    There it ends at `end`. Only the newest tokens are kept where not all have a place.
    """

    def move(
        old: Float[jax.Array, "N K P H"], sources: Int[jax.Array, "B"], ended: jax.Array, end: jax.Array
    ) -> Float[jax.Array, "B K Q H"]:
        # A gather, not two rolls: XLA's program for CPUs never ends where one of several rows is gathered and rolled.
        held = old.shape[2]
        age = (end - 1 - jnp.arange(places)) % places  # 0: the newest token's
        moved = old[sources][:, :, (ended - 1 - age) % held]
        return jnp.where((age < held)[:, None], moved, 0)

    local = on_each_device(layout, move, (CACHED_KEYS, ("batch",), (), ()))
    return LayerCache(*(local(old, sources, ended, end) for old in cache))


def lengthen(keys: Float[jax.Array, "B K P H"], places: int) -> Float[jax.Array, "B K Q H"]:
    """The keys or values with zeros in front, so that there are at least so many places."""
    return jnp.pad(keys, [(0, 0), (0, 0), (max(places - keys.shape[2], 0), 0), (0, 0)])


@partial(jax.jit, static_argnames=("graphdef", "options", "greedy"), donate_argnames="cache")
def decode(
    graphdef: nnx.GraphDef,
    weights: DecodingWeights,
    cache: Cache,
    slots: Slots,
    stream: Stream,
    end: Int[jax.Array, ""],
    steps: Int[jax.Array, ""],
    stop_after: Int[jax.Array, ""],
    *,
    options: RolloutConfig,
    greedy: bool,
) -> tuple[sampling.Draw, Int[jax.Array, ""], Cache]:
    """At most `steps` tokens of each slot, how many, and the cache with their predecessors from place `end` on.

    It stops early after `stop_after` sequences have ended, or all. What is drawn, [B, C], means nothing behind a stop
    token, or the last step. It reuses the memory of `cache`.
    """
    model = merge(graphdef, weights, 0)
    keys = sampling.sequence_keys(stream.seed, stream.step, slots.sequences)
    alive = slots.live.sum()

    def unfinished(carry: tuple) -> Bool[jax.Array, ""]:
        _, done, _, _, live, _ = carry
        left = live.sum()
        return (done < steps) & (left > 0) & (alive - left < stop_after)

    def decode_step(carry: tuple) -> tuple:
        chunk, done, cache, tokens, live, seen = carry
        hidden, cache = decode_token(graphdef, weights, cache, tokens, slots.lengths + done, end + done)
        positions = slots.counts + done
        logits = logits_of(model, hidden)
        if seen is not None:
            logits = sampling.penalize(logits, seen, options.repetition_penalty or 1.0)
        drawn = sampling.greedy(logits) if greedy else sampling.sample(logits, keys, positions, options)
        stopped = (drawn.tokens[:, None] == stream.stop_ids).any(-1) | (positions + 1 >= options.max_completion_length)
        chunk = jax.tree.map(lambda whole, new: whole.at[:, done].set(new), chunk, drawn)
        seen = None if seen is None else seen | (drawn.tokens[:, None] == jnp.arange(seen.shape[1]))
        return chunk, done + 1, cache, drawn.tokens, live & ~stopped, seen

    shape = (slots.tokens.shape[0], CHUNK)
    kept = jnp.zeros(shape, jnp.float32) if options.truncates and not greedy else None
    none = sampling.Draw(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), kept), jnp.zeros((), jnp.int32)
    nothing = jnp.zeros(model.config.vocab_size, bool)
    seen = None if slots.history is None else jax.vmap(lambda row: nothing.at[row].set(True))(slots.history)
    chunk, done, cache, *_ = jax.lax.while_loop(unfinished, decode_step, (*none, cache, slots.tokens, slots.live, seen))
    # Every process reads the tokens of all rows.
    return *jax.tree.map(partial(constrain, model.layout, axes=()), (chunk, done)), cache


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
