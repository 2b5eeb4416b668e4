"""Completions of prompts: one prefill, then a decode loop with a KV cache, a compiled program each.

Prompts are padded on the left to one of a few lengths, so that all rows write the same slot of the cache at a
time and little is compiled. The loop ends as soon as every row has. It runs for about a quarter of a second at a time,
so that a signal is heard in between; where it is cut changes nothing. Rows don't see each other, and a token's
random key depends on neither batch nor padding (see `sampling`): which rows are decoded together changes
nothing but rounding. Over a mesh each device decodes its own rows, with parameters that were gathered over fsdp once
for all tokens of the rollout.

Left out: text (it is the caller's), rewards, and refilling rows that end early with waiting prompts: all rows
of a batch start together, and the slowest decides.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from mllm.config.schema import RolloutConfig
from mllm.model.decoder import CACHE, KVCache, Qwen2, in_use
from mllm.parallel.mesh import shard_batch
from mllm.parallel.processes import RowShare, gather_objects, local_rows
from mllm.rl import sampling

SHORTEST_BUCKET = 8
TURN = 0.25
"""Seconds that the decode loop may run before somebody asks whether to go on."""


class Completions(NamedTuple):
    """What was sampled; numpy or JAX arrays. C is the configuration's `max_completion_length`."""

    tokens: Int[Any, "B C"]
    """The stop token included; padding behind it."""
    logprobs: Float[Any, "B C"]
    """Under the distribution that was sampled from (temperature, top-k, top-p applied); 0 behind the end."""
    lengths: Int[Any, "B"]
    """Tokens, the stop token included."""
    finished: Bool[Any, "B"]
    """Ended by a stop token; not cut off."""


def generate(
    graphdef: nnx.GraphDef,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    options: RolloutConfig,
    stop_ids: Sequence[int],
    pad_id: int,
    seed: int,
    step: int,
    first_sequence: int = 0,
    greedy: bool = False,
    poll: Callable[[], None] = lambda: None,
) -> Completions:
    """Complete each prompt, `options.batch_size` of them at a time, rounded up for the mesh; the result is in numpy.

    Each of several processes passes the prompts of its own rows, as many as the others, and gets their completions.

    Args:
        graphdef: and `params`: of `nnx.split(model)`.
        stop_ids: tokens that end a completion.
        pad_id: stands behind it.
        first_sequence: the first prompt's number among the sequences of the step; the others' follow. Seed,
            step and this number determine the random key.
        greedy: take the likeliest token, whatever temperature, top-k and top-p say; log-probabilities are 0.
        poll: called every `TURN` seconds, by all processes alike; what it raises ends the rollout.

    Raises:
        ValueError: no prompts, or one that is empty or longer than `options.max_prompt_length`.
    """
    if not prompts:
        raise ValueError("prompts: none given")
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= options.max_prompt_length:
            raise ValueError(
                f"prompts: number {number} has {len(prompt)} tokens; "
                f"expected 1 to {options.max_prompt_length} (rollout.max_prompt_length)"
            )
    layout = nnx.merge(graphdef, params).layout
    shares = 1 if layout is None else RowShare.of_mesh(layout.mesh).count
    rows = -(-options.batch_size // shares) if options.batch_size else len(prompts)
    rows += 0 if layout is None else -rows % (layout.row_shards // shares)
    weights = decoding_weights(graphdef, params)
    slices = []
    for start in range(0, len(prompts), rows):
        some = prompts[start : start + rows]
        longest = max(gather_objects(max(map(len, some))))
        tokens, lengths = pad_left(some, rows, min(bucket(longest), options.max_prompt_length), pad_id)
        given = (tokens, lengths, first_sequence + start + np.arange(rows, dtype=np.int32))
        tokens, lengths, sequences = given if layout is None else shard_batch(layout.mesh, given)
        draw = Draw(lengths, sequences, np.asarray(stop_ids, np.int32), pad_id, seed, step)
        completions = complete(graphdef, weights, tokens, draw, poll, options=options, greedy=greedy)
        slices.append(local_rows(completions))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(prompts)], *slices)


def bucket(longest: int) -> int:
    """The length that prompts are padded to: a power of two, so that little is compiled."""
    return max(SHORTEST_BUCKET, 1 << (longest - 1).bit_length())


def pad_left(
    prompts: Sequence[Sequence[int]], rows: int, width: int, pad_id: int
) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, "B"]]:
    """The prompts in `rows` rows of `width` tokens, ending at the last, and their lengths: 0 in rows left over."""
    tokens, lengths = np.full((rows, width), pad_id, np.int32), np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        lengths[row] = len(prompt)
    return tokens, lengths


@partial(jax.jit, static_argnames="graphdef")
def decoding_weights(graphdef: nnx.GraphDef, params: Any) -> Any:
    """The parameters as `decode` reads them at every token: in the compute dtype, gathered over fsdp."""
    model = nnx.merge(graphdef, params)
    return in_use(params, model.dtype, model.layout)


def complete(
    graphdef: nnx.GraphDef,
    params: Any,
    prompts: Int[jax.Array | np.ndarray, "B P"],
    draw: "Draw",
    poll: Callable[[], None],
    **how: Any,
) -> Completions:
    """Complete the rows of one batch, a turn of the loop at a time. `params`: `decoding_weights`."""
    progress = begin(graphdef, params, prompts, draw, **how)
    made, turn, limit = 1, 1, progress.completions.tokens.shape[1]
    while made < limit:
        until, start = min(made + turn, limit), time.perf_counter()
        progress = advance(graphdef, params, progress, draw, until, **how)
        made = int(progress.made)  # waits for it
        poll()
        if made < until:  # all rows have ended
            break
        turn = next_turn(turn, time.perf_counter() - start)
    return progress.completions


def next_turn(tokens: int, seconds: float) -> int:
    """Tokens of the decode loop's next turn, where the last took so long; as many in each process."""
    # A first turn compiles and says little: the fall is unbounded, the growth is not.
    return max(1, min(2 * tokens, int(tokens * TURN / max(gather_objects(seconds)))))


class Draw(NamedTuple):
    """What determines the tokens of a batch's rows, beside parameters and prompts."""

    lengths: Int[Any, "B"]
    """Of the prompts; a row of length 0 is none, and gets no tokens."""
    sequences: Int[Any, "B"]
    """The rows' numbers among the sequences of the step."""
    stop_ids: Int[Any, "S"]
    pad_id: Int[Any, ""]
    seed: Int[Any, ""]
    step: Int[Any, ""]


class Progress(NamedTuple):
    """What the decode loop carries."""

    made: Int[Any, ""]
    """Tokens so far, of the rows that haven't ended."""
    completions: Completions
    ended: Bool[Any, "B"]
    cache: KVCache


AXES: Any = Progress((), Completions(*[("batch",)] * 4), ("batch",), KVCache(CACHE, CACHE, ("batch",), ()))
"""Their logical axes."""


@partial(jax.jit, static_argnames=("graphdef", "options", "greedy"))
def begin(
    graphdef: nnx.GraphDef,
    params: Any,
    prompts: Int[jax.Array, "B P"],
    draw: Draw,
    *,
    options: RolloutConfig,
    greedy: bool,
) -> Progress:
    """The rows of one batch with their first token. `params`: `decoding_weights`."""
    rows, width = prompts.shape
    limit = options.max_completion_length
    model = nnx.merge(graphdef, params)
    empty = Completions(
        tokens=jnp.full((rows, limit), draw.pad_id, jnp.int32),
        logprobs=jnp.zeros((rows, limit)),
        lengths=jnp.zeros(rows, jnp.int32),
        finished=jnp.zeros(rows, bool),
    )
    hidden, cache = prefill(model, prompts, draw.lengths, width + limit)
    progress = Progress(jnp.zeros((), jnp.int32), empty, draw.lengths == 0, cache)
    return laid_out(model, extended(model, progress, draw, options, greedy, hidden, cache))


@partial(jax.jit, static_argnames=("graphdef", "options", "greedy"), donate_argnames="progress")
def advance(
    graphdef: nnx.GraphDef,
    params: Any,
    progress: Progress,
    draw: Draw,
    until: Int[jax.Array, ""],
    *,
    options: RolloutConfig,
    greedy: bool,
) -> Progress:
    """The same rows with `until` tokens each, or ended before; it takes over the memory of `progress`."""
    model = nnx.merge(graphdef, params)

    def unfinished(progress: Progress) -> Bool[jax.Array, ""]:
        return (progress.made < until) & ~progress.ended.all()

    def longer(progress: Progress) -> Progress:
        tokens = jax.lax.dynamic_index_in_dim(progress.completions.tokens, progress.made - 1, axis=1)
        positions = (draw.lengths + progress.made - 1)[:, None]
        hidden, cache = model(tokens, positions, jnp.ones_like(tokens), progress.cache)
        return extended(model, progress, draw, options, greedy, hidden, cache)

    return laid_out(model, jax.lax.while_loop(unfinished, longer, progress))


def extended(
    model: Qwen2,
    progress: Progress,
    draw: Draw,
    options: RolloutConfig,
    greedy: bool,
    hidden: Float[jax.Array, "B T D"],
    cache: KVCache,
) -> Progress:
    """One more token a row, from the hidden states at the row's end."""
    logits = jnp.einsum("bd,vd->bv", hidden[:, -1], model.head_weight, preferred_element_type=jnp.float32)
    if greedy:
        token, logprob = sampling.greedy(logits)
    else:
        token, logprob = sampling.sample(
            logits,
            sampling.sequence_keys(draw.seed, draw.step, draw.sequences),
            progress.made,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
    stopped = (token[:, None] == draw.stop_ids).any(-1)
    so_far, ended, made = progress.completions, progress.ended, progress.made
    completions = Completions(
        tokens=so_far.tokens.at[:, made].set(jnp.where(ended, draw.pad_id, token)),
        logprobs=so_far.logprobs.at[:, made].set(jnp.where(ended, 0.0, logprob)),
        lengths=so_far.lengths + ~ended,
        finished=so_far.finished | (stopped & ~ended),
    )
    return Progress(made + 1, completions, ended | stopped, cache)


def laid_out(model: Qwen2, progress: Progress) -> Progress:
    """By the table: what one program gives lies as the next one takes it."""
    layout = model.layout
    return progress if layout is None else by_axes(layout.constrain, progress)


def by_axes(place: Callable[[Any, tuple[str | None, ...]], Any], progress: Progress) -> Progress:
    """`place(array, its logical axes)` of everything that the loop carries."""
    return jax.tree.map(lambda axes, array: place(array, axes), AXES, progress, is_leaf=lambda x: type(x) is tuple)


def prefill(
    model: Qwen2, prompts: Int[jax.Array, "B P"], lengths: Int[jax.Array, "B"], slots: int
) -> tuple[Float[jax.Array, "B P D"], KVCache]:
    """Hidden states of the prompts, and a cache of `slots` tokens a row that begins with them."""
    rows, width = prompts.shape
    offsets = jnp.arange(width) - (width - lengths)[:, None]
    cache = KVCache.empty(model.config, rows, slots, model.dtype, model.layout)
    hidden, filled = model(prompts, jnp.maximum(offsets, 0), (offsets >= 0).astype(jnp.int32), cache)
    assert filled is not None
    return hidden, filled
