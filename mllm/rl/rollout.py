"""Completions of prompts: one prefill, then a decode loop with a KV cache, each a compiled program.

Prompts are padded on the left to one of a few lengths, so that all rows write the same slot of the cache at a time and
little is compiled. The decode loop runs in chunks, so that a signal is noticed between two of them; where a chunk ends
changes no result. Which rows are decoded together changes nothing but rounding. On a mesh each device decodes its own
rows, with parameters that are gathered over fsdp once. Rows that end early are not refilled.
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
from mllm.model.decoder import KVCache, Qwen2
from mllm.model.layout import Params, gather_parameters, map_with_axes
from mllm.parallel.mesh import shard_batch
from mllm.parallel.processes import RowShare, gather_objects, local_rows
from mllm.rl import sampling

SHORTEST_BUCKET = 8
CHUNK_SECONDS = 0.25


class Completions(NamedTuple):
    """Sampled completions; numpy or JAX arrays. C is the configuration's `max_completion_length`."""

    tokens: Int[Any, "B C"]
    """The stop token included; padding behind it."""
    logprobs: Float[Any, "B C"]
    """Under the distribution that was sampled from (temperature, top-k, top-p applied); 0 behind the end."""
    lengths: Int[Any, "B"]
    """Numbers of tokens, the stop token included."""
    finished: Bool[Any, "B"]
    """Whether a stop token ended the completion; False if it was cut off."""


def generate(
    graphdef: nnx.GraphDef,
    params: Params,
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

    Each process passes the prompts of its own rows, as many as the others. Seed, step and a prompt's number from
    `first_sequence` on determine its random key. With `greedy` the likeliest token is taken; log-probabilities are
    0. What `poll`, called after every chunk by all processes, raises ends the rollout. ValueError is raised if
    there are no prompts, or one is empty or longer than `options.max_prompt_length`.
    """
    lengths, limit = sorted({*map(len, prompts)}), options.max_prompt_length
    if not lengths or lengths[0] == 0 or lengths[-1] > limit:
        raise ValueError(f"prompts: expected 1 to {limit} tokens each (rollout.max_prompt_length), got {lengths}")
    layout = nnx.merge(graphdef, params).layout
    shares = 1 if layout is None else RowShare.of_mesh(layout.mesh).count
    rows = -(-options.batch_size // shares) if options.batch_size else len(prompts)
    rows += 0 if layout is None else -rows % (layout.row_shards // shares)
    weights = decoding_weights(graphdef, params)
    batches = []
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        longest = max(gather_objects(max(map(len, batch))))
        # A power of two, so that little is compiled.
        width = min(max(SHORTEST_BUCKET, 1 << (longest - 1).bit_length()), limit)
        arrays = (*pad_left(batch, rows, width, pad_id), first_sequence + start + np.arange(rows, dtype=np.int32))
        tokens, prompt_lengths, sequences = arrays if layout is None else shard_batch(layout.mesh, arrays)
        inputs = DecodeInputs(prompt_lengths, sequences, np.asarray(stop_ids, np.int32), pad_id, seed, step)
        completions = complete(graphdef, weights, tokens, inputs, poll, options=options, greedy=greedy)
        batches.append(local_rows(completions))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(prompts)], *batches)


def pad_left(
    prompts: Sequence[Sequence[int]], rows: int, width: int, pad_id: int
) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, "B"]]:
    """The prompts in `rows` rows of `width` tokens, each ending at the last, and their lengths: 0 in spare rows."""
    tokens, lengths = np.full((rows, width), pad_id, np.int32), np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        lengths[row] = len(prompt)
    return tokens, lengths


@partial(jax.jit, static_argnames="graphdef")
def decoding_weights(graphdef: nnx.GraphDef, params: Params) -> Params:
    """The parameters as `decode` reads them at every token: in the compute dtype, gathered over fsdp."""
    model = nnx.merge(graphdef, params)
    return gather_parameters(params, model.dtype, model.layout)


def complete(
    graphdef: nnx.GraphDef,
    weights: Params,
    prompts: Int[jax.Array | np.ndarray, "B P"],
    inputs: "DecodeInputs",
    poll: Callable[[], None],
    **settings: Any,
) -> Completions:
    """Complete the rows of one batch, a chunk of the decode loop at a time, with `decoding_weights`."""
    state = prefill(graphdef, weights, prompts, inputs, **settings)
    num_tokens, chunk, limit = 1, 1, state.completions.tokens.shape[1]
    while num_tokens < limit:
        until, start = min(num_tokens + chunk, limit), time.perf_counter()
        state = decode(graphdef, weights, state, inputs, until, **settings)
        num_tokens = int(state.num_tokens)  # waits for the chunk
        poll()
        if num_tokens < until:  # all rows have ended
            break
        chunk = next_chunk(chunk, time.perf_counter() - start)
    return state.completions


def next_chunk(steps: int, seconds: float) -> int:
    """Decode steps of the next chunk, if the last one made `steps` in `seconds`; the same in every process."""
    # The first chunk compiles and says little: the fall is unbounded, the growth is not.
    return max(1, min(2 * steps, int(steps * CHUNK_SECONDS / max(gather_objects(seconds)))))


class DecodeInputs(NamedTuple):
    """What determines the tokens of a batch's rows, beside the parameters and the prompts' tokens."""

    prompt_lengths: Int[Any, "B"]
    """0 for a spare row, which gets no tokens."""
    sequences: Int[Any, "B"]
    stop_ids: Int[Any, "S"]
    pad_id: Int[Any, ""]
    seed: Int[Any, ""]
    step: Int[Any, ""]


class DecodeState(NamedTuple):
    """What the decode loop carries from step to step."""

    num_tokens: Int[Any, ""]
    completions: Completions
    ended: Bool[Any, "B"]
    cache: KVCache


STATE_AXES: Any = DecodeState((), Completions(*[("batch",)] * 4), ("batch",), KVCache.axes())


@partial(jax.jit, static_argnames=("graphdef", "options", "greedy"))
def prefill(
    graphdef: nnx.GraphDef,
    weights: Params,
    prompts: Int[jax.Array, "B P"],
    inputs: DecodeInputs,
    *,
    options: RolloutConfig,
    greedy: bool,
) -> DecodeState:
    """The state with the prompts in the cache and the first token of every row. See `decoding_weights`."""
    rows, width = prompts.shape
    limit = options.max_completion_length
    model = nnx.merge(graphdef, weights)
    empty = Completions(
        tokens=jnp.full((rows, limit), inputs.pad_id, jnp.int32),
        logprobs=jnp.zeros((rows, limit)),
        lengths=jnp.zeros(rows, jnp.int32),
        finished=jnp.zeros(rows, bool),
    )
    offsets = jnp.arange(width) - (width - inputs.prompt_lengths)[:, None]
    cache = KVCache.empty(model.config, rows, width + limit, model.dtype, model.layout)
    hidden, filled = model(prompts, jnp.maximum(offsets, 0), (offsets >= 0).astype(jnp.int32), cache)
    assert filled is not None
    state = DecodeState(jnp.zeros((), jnp.int32), empty, inputs.prompt_lengths == 0, filled)
    return constrain_state(model, append_token(model, state, inputs, options, greedy, hidden, filled))


@partial(jax.jit, static_argnames=("graphdef", "options", "greedy"), donate_argnames="state")
def decode(
    graphdef: nnx.GraphDef,
    weights: Params,
    state: DecodeState,
    inputs: DecodeInputs,
    until: Int[jax.Array, ""],
    *,
    options: RolloutConfig,
    greedy: bool,
) -> DecodeState:
    """The state after decode steps until each row has `until` tokens or has ended; it reuses the memory of `state`."""
    model = nnx.merge(graphdef, weights)

    def unfinished(state: DecodeState) -> Bool[jax.Array, ""]:
        return (state.num_tokens < until) & ~state.ended.all()

    def decode_step(state: DecodeState) -> DecodeState:
        tokens = jax.lax.dynamic_index_in_dim(state.completions.tokens, state.num_tokens - 1, axis=1)
        positions = (inputs.prompt_lengths + state.num_tokens - 1)[:, None]
        hidden, cache = model(tokens, positions, jnp.ones_like(tokens), state.cache)
        return append_token(model, state, inputs, options, greedy, hidden, cache)

    return constrain_state(model, jax.lax.while_loop(unfinished, decode_step, state))


def append_token(
    model: Qwen2,
    state: DecodeState,
    inputs: DecodeInputs,
    options: RolloutConfig,
    greedy: bool,
    hidden: Float[jax.Array, "B T D"],
    cache: KVCache,
) -> DecodeState:
    """The state with one more token in each row, drawn from the hidden states of the rows' last tokens."""
    logits = jnp.einsum("bd,vd->bv", hidden[:, -1], model.head_weight, preferred_element_type=jnp.float32)
    if greedy:
        token, logprob = sampling.greedy(logits)
    else:
        token, logprob = sampling.sample(
            logits,
            sampling.sequence_keys(inputs.seed, inputs.step, inputs.sequences),
            state.num_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
    stopped = (token[:, None] == inputs.stop_ids).any(-1)
    before, ended, place = state.completions, state.ended, state.num_tokens
    completions = Completions(
        tokens=before.tokens.at[:, place].set(jnp.where(ended, inputs.pad_id, token)),
        logprobs=before.logprobs.at[:, place].set(jnp.where(ended, 0.0, logprob)),
        lengths=before.lengths + ~ended,
        finished=before.finished | (stopped & ~ended),
    )
    return DecodeState(place + 1, completions, ended | stopped, cache)


def constrain_state(model: Qwen2, state: DecodeState) -> DecodeState:
    """The state, laid out by the mesh's table: `prefill` and `decode` give what `decode` takes."""
    layout = model.layout
    return state if layout is None else map_with_axes(layout.constrain, STATE_AXES, state)
