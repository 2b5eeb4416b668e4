"""Completions of prompts: one prefill, then a decode loop with a KV cache, both in one compiled program.

Prompts are padded on the left to one of a few lengths, so that all rows write the same slot of the cache at a
time and little is compiled. The loop ends as soon as every row has. Rows don't see each other, and a token's
random key depends on neither batch nor padding (see `sampling`): which rows are decoded together changes
nothing but rounding.

Left out: text (it is the caller's), rewards, and refilling rows that end early with waiting prompts: all rows
of a batch start together, and the slowest decides.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from mllm import sampling
from mllm.config import RolloutConfig
from mllm.model import KVCache

SHORTEST_BUCKET = 8


class Completions(NamedTuple):
    """What was sampled; numpy or JAX arrays. C is the configuration's `max_completion_length`."""

    tokens: Int[jax.Array, "B C"]
    """The stop token included; padding behind it."""
    logprobs: Float[jax.Array, "B C"]
    """Under the distribution that was sampled from (temperature, top-k, top-p applied); 0 behind the end."""
    lengths: Int[jax.Array, "B"]
    """Tokens, the stop token included."""
    finished: Bool[jax.Array, "B"]
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
) -> Completions:
    """Complete each prompt, `options.batch_size` of them at a time; the result is in numpy.

    Args:
        graphdef: and `params`: of `nnx.split(model)`.
        stop_ids: tokens that end a completion.
        pad_id: stands behind it.
        first_sequence: the first prompt's number among the sequences of the step; the others' follow. Seed,
            step and this number determine the random key.
        greedy: take the likeliest token, whatever temperature, top-k and top-p say; log-probabilities are 0.

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
    rows = options.batch_size or len(prompts)
    slices = []
    for start in range(0, len(prompts), rows):
        tokens, lengths = pad_left(prompts[start : start + rows], rows, options.max_prompt_length, pad_id)
        completions = decode(
            graphdef,
            params,
            tokens,
            lengths,
            first_sequence + start + np.arange(rows, dtype=np.int32),
            np.asarray(stop_ids, np.int32),
            pad_id,
            seed,
            step,
            options=options,
            greedy=greedy,
        )
        slices.append(jax.device_get(completions))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(prompts)], *slices)


def pad_left(
    prompts: Sequence[Sequence[int]], rows: int, max_length: int, pad_id: int
) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, "B"]]:
    """The prompts in `rows` rows, ending at the last column, and their lengths: 0 in rows left over."""
    longest = max(map(len, prompts))
    bucket = min(max(SHORTEST_BUCKET, 1 << (longest - 1).bit_length()), max_length)
    tokens, lengths = np.full((rows, bucket), pad_id, np.int32), np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, bucket - len(prompt) :] = prompt
        lengths[row] = len(prompt)
    return tokens, lengths


class Progress(NamedTuple):
    """What the decode loop carries."""

    made: Int[jax.Array, ""]
    """Tokens so far, of the rows that haven't ended."""
    completions: Completions
    ended: Bool[jax.Array, "B"]
    cache: KVCache


@partial(jax.jit, static_argnames=("graphdef", "options", "greedy"))
def decode(
    graphdef: nnx.GraphDef,
    params: Any,
    prompts: Int[jax.Array, "B P"],
    lengths: Int[jax.Array, "B"],
    sequences: Int[jax.Array, "B"],
    stop_ids: Int[jax.Array, "S"],
    pad_id: Int[jax.Array, ""],
    seed: Int[jax.Array, ""],
    step: Int[jax.Array, ""],
    *,
    options: RolloutConfig,
    greedy: bool,
) -> Completions:
    """Complete the rows of one batch; a row of length 0 is none, and gets no tokens."""
    rows, width = prompts.shape
    limit = options.max_completion_length
    # Cast once rather than at every token: decoding is bound by reading the parameters.
    dtype = nnx.merge(graphdef, params).dtype
    model = nnx.merge(graphdef, jax.tree.map(lambda p: p.astype(dtype), params))
    keys = sampling.sequence_keys(seed, step, sequences)

    def extend(progress: Progress, hidden: Float[jax.Array, "B T D"], cache: KVCache) -> Progress:
        """One more token a row, from the hidden states at the row's end."""
        logits = jnp.einsum("bd,vd->bv", hidden[:, -1], model.head_weight, preferred_element_type=jnp.float32)
        if greedy:
            token, logprob = sampling.greedy(logits)
        else:
            token, logprob = sampling.sample(
                logits,
                keys,
                progress.made,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
            )
        stopped = (token[:, None] == stop_ids).any(-1)
        so_far, ended, made = progress.completions, progress.ended, progress.made
        completions = Completions(
            tokens=so_far.tokens.at[:, made].set(jnp.where(ended, pad_id, token)),
            logprobs=so_far.logprobs.at[:, made].set(jnp.where(ended, 0.0, logprob)),
            lengths=so_far.lengths + ~ended,
            finished=so_far.finished | (stopped & ~ended),
        )
        return Progress(made + 1, completions, ended | stopped, cache)

    def unfinished(progress: Progress) -> Bool[jax.Array, ""]:
        return (progress.made < limit) & ~progress.ended.all()

    def advance(progress: Progress) -> Progress:
        tokens = jax.lax.dynamic_index_in_dim(progress.completions.tokens, progress.made - 1, axis=1)
        positions = (lengths + progress.made - 1)[:, None]
        return extend(progress, *model(tokens, positions, jnp.ones_like(tokens), progress.cache))

    offsets = jnp.arange(width) - (width - lengths)[:, None]
    empty = Completions(
        tokens=jnp.full((rows, limit), pad_id, jnp.int32),
        logprobs=jnp.zeros((rows, limit)),
        lengths=jnp.zeros(rows, jnp.int32),
        finished=jnp.zeros(rows, bool),
    )
    cache = KVCache.empty(model.config, rows, width + limit, dtype)
    progress = Progress(jnp.zeros((), jnp.int32), empty, lengths == 0, cache)
    prefilled = model(prompts, jnp.maximum(offsets, 0), (offsets >= 0).astype(jnp.int32), cache)
    return jax.lax.while_loop(unfinished, advance, extend(progress, *prefilled)).completions
