"""Completions of prompts: the rollout engine, for training, evaluation and tools/generate.py.

A distinct prompt is prefilled once, attending to itself alone, and serves all of its sequences. Sequences are decoded
in slots. After every chunk (`CHUNK` tokens, or fewer where an eighth of the sequences has ended), waiting sequences
take the slots of those that ended; where none wait, the batch shrinks to fewer slots. The tokens of all rows end at the
same place of the cache; when the cache is full, or larger than it need be, the live rows are repacked into one with the
number of places that they need. Numbers of slots and of places are among few (buckets), so that little is compiled.

The order of refills and repacking depends on counted tokens only, never on time; the other sequences of a batch change
a token only by rounding. On a mesh each device has its own prompts and slots.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from mllm.config.grpo import RolloutConfig
from mllm.model.decoding import Cache, LayerCache, abstract_cache, decoding_graphdef, decoding_weights
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch
from mllm.parallel.processes import RowShare, gather_objects, local_rows
from mllm.rl.schedule import (
    PREFILLED_BATCHES,
    WIDTHS,
    assign_prompts,
    bucket,
    places_for,
    prompts_a_batch,
    slot_buckets,
)
from mllm.rl.slots import CHUNK, Slots, Stream, decode, insert, prefill, repack

CALL_SECONDS = 0.25
"""About how long a call of the decode program may take, so that a signal takes effect soon."""


class Completions(NamedTuple):
    """Sampled completions in numpy arrays. C is the configuration's `max_completion_length`."""

    tokens: Int[Any, "B C"]
    """The stop token included; padding behind it."""
    logprobs: Float[Any, "B C"]
    """Under the distribution over the whole vocabulary, with the temperature; 0 behind the end."""
    lengths: Int[Any, "B"]
    """Numbers of tokens, the stop token included."""
    finished: Bool[Any, "B"]
    """Whether a stop token ended the completion; False if it was cut off."""
    kept: Float[Any, "B C"] | None = None
    """The probability of the tokens that top-k and top-p kept, 0 behind the end; None with neither of them."""


@dataclass
class RolloutWork:
    """What a rollout did, in counts; the same whenever the same tokens are sampled."""

    completions: int = 0
    """Completions that have ended."""
    tokens: int = 0
    """Tokens of completions."""
    prefilled: int = 0
    """Tokens that were prefilled, padding included."""
    steps: int = 0
    """Decode steps."""
    slot_steps: int = 0
    """Decode steps times slots: the tokens that were computed."""
    place_steps: int = 0
    """Decode steps times slots times places of the cache: the keys, and the values, that were read in a layer."""


@dataclass
class PrefilledBatch:
    """Prompts of all devices in the form of a cache."""

    cache: Cache
    width: int


class Candidate(NamedTuple):
    """A sequence whose prompt is prefilled, and which waits for a slot."""

    sequence: int
    batch: PrefilledBatch
    source: int
    """The prompt's row among those that its device prefilled in the batch."""
    tokens: Sequence[int]


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
    max_slots: int | None = None,
    poll: Callable[[], None] = lambda: None,
    work: RolloutWork | None = None,
) -> Completions:
    """Complete each prompt, at most `max_slots` at a time over all devices (None: all), at least one on each.

    Each process passes the prompts of its own rows, as many as the others. Seed, step and a prompt's number from
    `first_sequence` on determine its random key. With `greedy` the likeliest token is taken; log-probabilities are
    0. What `poll`, called by all processes after each call of the decode program, raises ends the rollout. `work` is
    added to. ValueError is raised if there are no prompts, or one is empty or longer than
    `options.max_prompt_length`.
    """
    lengths, limit = sorted({*map(len, prompts)}), options.max_prompt_length
    if not lengths or lengths[0] == 0 or lengths[-1] > limit:
        raise ValueError(f"prompts: expected 1 to {limit} tokens each (rollout.max_prompt_length), got {lengths}")
    engine = RolloutEngine(
        graphdef, params, prompts, options, max_slots, first_sequence, pad_id, greedy, poll, work or RolloutWork()
    )
    stream = Stream(np.asarray(stop_ids, np.int32), np.int32(seed), np.int32(step))
    while engine.admit():
        engine.decode_chunk(stream)
    return engine.completions


@dataclass
class RolloutEngine:
    """The state of one rollout on the host. Arrays [X, B] have the slots of each of this process's row shards."""

    graphdef: nnx.GraphDef
    params: Params
    prompts: Sequence[Sequence[int]]
    options: RolloutConfig
    max_slots: int | None
    first_sequence: int
    pad_id: int
    greedy: bool
    poll: Callable[[], None]
    work: RolloutWork
    batches: list[PrefilledBatch] = field(default_factory=list)
    cache: list[LayerCache] = field(default_factory=list)
    end: int = 0
    """The place of the next token in the cache."""
    steps_a_call: int = 1

    def __post_init__(self) -> None:
        self.model = nnx.merge(self.graphdef, self.params)
        self.layout = self.model.layout
        shares = 1 if self.layout is None else RowShare.of_mesh(self.layout.mesh).count
        self.all_shards = 1 if self.layout is None else self.layout.row_shards
        self.shards = self.all_shards // shares
        self.queues = assign_prompts(self.prompts, self.shards)
        most = max(gather_objects(max(sum(len(p.sequences) for p in queue) for queue in self.queues)))
        self.most_slots = most if self.max_slots is None else max(1, min(most, self.max_slots // self.all_shards))
        self.candidates: list[deque[Candidate]] = [deque() for _ in range(self.shards)]
        self.decoder, self.weights = decoding_graphdef(self.model), decoding_weights(self.graphdef, self.params)
        rows, limit = len(self.prompts), self.options.max_completion_length
        self.completions = Completions(
            tokens=np.full((rows, limit), self.pad_id, np.int32),
            logprobs=np.zeros((rows, limit), np.float32),
            lengths=np.zeros(rows, np.int32),
            finished=np.zeros(rows, bool),
            kept=np.zeros((rows, limit), np.float32) if self.options.truncates and not self.greedy else None,
        )
        self.sequences = np.full((self.shards, 0), -1)
        """The sequence in each slot, -1 for none."""
        self.last_tokens = np.zeros((self.shards, 0), np.int32)
        self.lengths = np.zeros((self.shards, 0), np.int32)
        """How many tokens of a row are in the cache."""

    @property
    def places(self) -> int:
        return self.cache[0].keys.shape[2] if self.cache else 0

    # --- sequences enter and leave ------------------------------------------------------------------------------------

    def admit(self) -> bool:
        """Fill free slots, in a cache as large as the rows need; False where no sequence is left in any process."""
        while max(gather_objects(self.wants_prompts())):
            self.prefill()
        live = (self.sequences >= 0).sum(axis=1)
        entering = [
            [candidates[i] for i in range(min(len(candidates), self.most_slots - count))]
            for candidates, count in zip(self.candidates, live, strict=True)
        ]
        rows = max(count + len(new) for count, new in zip(live, entering, strict=True))
        width = max((candidate.batch.width for new in entering for candidate in new), default=0)
        longest = int(self.lengths.max(initial=0, where=self.sequences >= 0))
        rows, end = (int(most) for most in np.max(gather_objects((rows, max(width, longest))), axis=0))
        if rows == 0:
            return False
        slots, places = bucket(rows, slot_buckets(self.most_slots)), places_for(end, self.options)
        full = self.end + CHUNK > self.places or self.end < end
        if slots != self.sequences.shape[1] or full or places < self.places:
            self.repack(slots, places, end)
        self.fill_slots(entering)
        return True

    def wants_prompts(self) -> bool:
        """Whether a shard has more free slots than prefilled sequences for them, and prompts that may be prefilled."""
        if len(self.batches) == PREFILLED_BATCHES:
            return False
        free = self.most_slots - (self.sequences >= 0).sum(axis=1)
        return any(
            queue and len(candidates) < count
            for queue, candidates, count in zip(self.queues, self.candidates, free, strict=True)
        )

    def prefill(self) -> None:
        """Prefill the next prompts of each shard."""
        most = max(gather_objects(max(map(len, self.queues))))
        longest = max(gather_objects(max((len(p.tokens) for queue in self.queues for p in queue), default=1)))
        rows = prompts_a_batch(min(most, self.most_slots), bucket(longest, WIDTHS))
        taken = [[queue.popleft() for _ in range(min(rows, len(queue)))] for queue in self.queues]
        # The last token of a prompt is the first that is decoded.
        longest = max(gather_objects(max((len(p.tokens) - 1 for part in taken for p in part), default=0)))
        width = min(bucket(longest, WIDTHS), self.options.max_prompt_length)
        tokens, lengths = np.zeros((self.shards, rows, width), np.int32), np.zeros((self.shards, rows), np.int32)
        batch = PrefilledBatch((), width)
        for shard, part in enumerate(taken):
            for row, prompt in enumerate(part):
                lengths[shard, row] = len(prompt.tokens) - 1
                tokens[shard, row, : lengths[shard, row]] = prompt.tokens[:-1]
                for sequence in prompt.sequences:
                    self.candidates[shard].append(Candidate(sequence, batch, row, prompt.tokens))
        batch.cache = prefill(self.graphdef, self.params, *self.on_devices((tokens, lengths)))
        self.batches.append(batch)
        self.work.prefilled += tokens.size

    def repack(self, slots: int, places: int, end: int) -> None:
        """Put the live rows into the first slots of a cache of this size, so that they end at `end`."""
        order = np.argsort(self.sequences < 0, axis=1, kind="stable")
        sources = np.zeros((self.shards, slots), np.int32)
        kept = min(slots, order.shape[1])
        sources[:, :kept] = order[:, :kept]
        if self.cache:
            before = end if end > self.end else 0
            shift, placed = np.int32(self.end - end + before), self.on_devices(sources)
            for index, layer in enumerate(self.cache):  # one at a time, so that no second cache is held
                self.cache[index] = repack(layer, placed, shift, before=before, places=places, layout=self.layout)
        else:
            shapes = abstract_cache(self.model, self.all_shards * slots, places)
            self.cache = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), x) for x in shapes]
        self.end = end

        def moved(array: np.ndarray, nothing: int) -> np.ndarray:
            result = np.full((self.shards, slots), nothing, array.dtype)
            result[:, :kept] = np.take_along_axis(array, order[:, :kept], axis=1)
            return result

        self.sequences, self.last_tokens = moved(self.sequences, -1), moved(self.last_tokens, 0)
        self.lengths = moved(self.lengths, 0)

    def fill_slots(self, entering: Sequence[Sequence[Candidate]]) -> None:
        """Put these sequences of each shard into free slots."""
        sources = {id(batch): np.full(self.sequences.shape, -1, np.int32) for batch in self.batches}
        for shard, candidates in enumerate(entering):
            free = np.flatnonzero(self.sequences[shard] < 0)
            for slot, candidate in zip(free, candidates, strict=False):
                self.candidates[shard].popleft()
                self.sequences[shard, slot] = candidate.sequence
                self.last_tokens[shard, slot] = candidate.tokens[-1]
                self.lengths[shard, slot] = len(candidate.tokens) - 1
                sources[id(candidate.batch)][shard, slot] = candidate.source
        for batch in list(self.batches):
            chosen = sources[id(batch)]
            waits = any(candidate.batch is batch for queue in self.candidates for candidate in queue)
            entered, waiting = zip(*gather_objects((bool((chosen >= 0).any()), waits)), strict=True)
            if any(entered):
                placed, end = self.on_devices(chosen), np.int32(self.end)
                for index, prompts in enumerate(batch.cache):
                    self.cache[index] = insert(self.cache[index], prompts, placed, end, layout=self.layout)
            if not any(waiting):
                self.batches.remove(batch)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def decode_chunk(self, stream: Stream) -> None:
        """Decode until `CHUNK` tokens are made or `stop_after` sequences have ended, in calls that don't take long."""
        left, live = CHUNK, sum(gather_objects(int((self.sequences >= 0).sum())))
        stop_after = self.stop_after(live)
        while left and live and stop_after > 0:
            start, steps = time.perf_counter(), min(left, self.steps_a_call)
            chunk = self.run_decode(stream, steps, stop_after)
            made, ended = int(chunk.steps), self.record(chunk, stream.stop_ids)
            seconds, ended = np.array(gather_objects((time.perf_counter() - start, ended))).T
            self.poll()
            left, live, stop_after = left - made, live - int(ended.sum()), stop_after - int(ended.sum())
            # The first call compiles and says little: the fall is unbounded, the growth is not.
            speed = int(made * CALL_SECONDS / max(seconds.max(), 1e-9))
            self.steps_a_call = max(1, min(2 * steps, speed, CHUNK))

    def stop_after(self, live: int) -> int:
        """How many of the `live` sequences have to end before a chunk ends early."""
        waiting = any(gather_objects(bool(self.batches) or any(self.queues)))
        if waiting:
            return max(1, live // 8)
        slots = self.sequences.shape[1]
        smaller = max((size for size in slot_buckets(self.most_slots) if size < slots), default=0)
        return max(1, live - smaller * self.all_shards)

    def run_decode(self, stream: Stream, steps: int, stop_after: int) -> Any:
        """Call the decode program; the result's arrays are numpy's, and hold this process's rows."""
        live = self.sequences >= 0
        counts = np.where(live, self.completions.lengths[self.sequences], 0)
        slots = Slots(self.last_tokens, self.lengths, counts, self.sequences + self.first_sequence, live)
        chunk, cache = decode(
            self.decoder,
            self.weights,
            tuple(self.cache),
            self.on_devices(slots),
            stream,
            np.int32(self.end),
            np.int32(steps),
            np.int32(stop_after),
            options=self.options,
            greedy=self.greedy,
        )
        self.cache = list(cache)
        return local_rows(chunk)

    def record(self, chunk: Any, stop_ids: Int[np.ndarray, "S"]) -> int:
        """Add the chunk's tokens to their completions and free the slots of those that ended; returns their number."""
        steps, tokens = int(chunk.steps), chunk.tokens.reshape(*self.sequences.shape, -1)
        results, ended = self.completions, 0
        for shard, slot in np.argwhere(self.sequences >= 0):
            sequence = self.sequences[shard, slot]
            count = results.lengths[sequence]
            made = tokens[shard, slot, : min(steps, results.tokens.shape[1] - count)]
            stops = np.flatnonzero(np.isin(made, stop_ids))
            made = made[: stops[0] + 1] if stops.size else made
            results.tokens[sequence, count : count + made.size] = made
            # Greedy log-probabilities are 0, as they are already; XLA gives each process those of all rows.
            logprobs = None if self.greedy else results.logprobs
            for whole, part in ((logprobs, chunk.logprobs), (results.kept, chunk.kept)):
                if whole is not None:
                    whole[sequence, count : count + made.size] = part.reshape(tokens.shape)[shard, slot, : made.size]
            results.lengths[sequence] += made.size
            results.finished[sequence] = stops.size > 0
            self.work.tokens += made.size
            if stops.size or results.lengths[sequence] == results.tokens.shape[1]:
                self.sequences[shard, slot] = -1
                self.work.completions += 1
                ended += 1
        self.last_tokens = tokens[:, :, steps - 1].copy()
        self.lengths = self.lengths + steps
        self.end += steps
        self.work.steps += steps
        self.work.slot_steps += steps * self.sequences.size
        self.work.place_steps += steps * self.sequences.size * self.places
        return ended

    def on_devices(self, tree: Any) -> Any:
        """Arrays [X, B, ...] as the programs take them, [X B, ...], on the devices of their shards."""
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]).astype(bool if x.dtype == bool else np.int32), tree)
        return flat if self.layout is None else shard_batch(self.layout.mesh, flat)
