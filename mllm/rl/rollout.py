"""Prompts in, completions out: the sampler and its rollout engine, for training, evaluation and tools/generate.py.

A distinct prompt is prefilled once, attending to itself alone, and serves all of its sequences. Sequences are decoded
in slots. After every chunk (`CHUNK` tokens, or fewer where an eighth of the sequences has ended), waiting sequences
take the slots of those that ended; where none wait, the batch shrinks to fewer slots. The tokens of all rows end at the
same place of the cache; when the cache is full, or larger than it need be, the live rows are repacked into one with the
number of places that they need. Numbers of slots and of places are among few (buckets), so that little is compiled.

The order of refills and repacking depends on counted tokens only, never on time; the other sequences of a batch change
a token only by rounding. On a mesh each device has its own prompts and slots; all processes know those of all, so that
each of them decides the same.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from mllm.config.grpo import RolloutConfig
from mllm.model.decoding import Cache, LayerCache, abstract_cache, decoding_graphdef, decoding_weights
from mllm.model.layout import Params
from mllm.model.tokenizer import Tokenizer
from mllm.parallel.mesh import sharding
from mllm.parallel.processes import gather_objects
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
    """The stop token included; 0 behind the end."""
    logprobs: Float[Any, "B C"]
    """Under the distribution over the whole vocabulary, with the temperature; 0 behind the end."""
    lengths: Int[Any, "B"]
    """Numbers of tokens, the stop token included."""
    finished: Bool[Any, "B"]
    """Whether a stop token ended the completion; False if it was cut off."""
    kept: Float[Any, "B C"] | None = None
    """The probability of the tokens that top-k and top-p kept, 0 behind the end; None with neither of them."""
    texts: Sequence[str] = ()
    """Each completion's text, without the token that ended it."""

    def part(self, rows: slice) -> "Completions":
        """Some of the completions."""
        return self._replace(**{name: field[rows] for name, field in self._asdict().items() if field is not None})


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


@dataclass(frozen=True)
class Sampler:
    """Completes prompts with parameters that each call passes."""

    graphdef: Any
    tokenizer: Tokenizer
    stop_ids: Sequence[int]
    options: RolloutConfig
    seed: int
    max_slots: Callable[[], int | None] = lambda: None
    """Returns the most sequences that are decoded at a time over all devices, at least one on each; None: all. It is
    called where `options.max_slots` is None."""
    poll: Callable[[], None] = lambda: None
    """Called by all processes after each call of the decode program; what it raises ends the rollout."""
    work: RolloutWork = field(default_factory=RolloutWork)
    """What all rollouts so far did."""

    def complete(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        step: int,
        first_sequence: int = 0,
        greedy: bool = False,
    ) -> Completions:
        """Complete each prompt (token ids) once; prompt i draws from the stream (seed, step, first_sequence + i).

        All processes pass the same prompts, and get all completions. With `greedy` the likeliest token is taken;
        log-probabilities are 0. ValueError is raised if there are no prompts, or one is empty or longer than
        `options.max_prompt_length`.
        """
        lengths, limit = sorted({*map(len, prompts)}), self.options.max_prompt_length
        if not lengths or lengths[0] == 0 or lengths[-1] > limit:
            raise ValueError(f"prompts: expected 1 to {limit} tokens each (rollout.max_prompt_length), got {lengths}")
        engine = RolloutEngine(self, params, prompts, step, first_sequence, greedy)
        while engine.admit():
            engine.decode_chunk()
        done = engine.completions
        kept = zip(done.tokens, done.lengths - done.finished, strict=True)
        return done._replace(texts=self.tokenizer.batch_decode([row[:length].tolist() for row, length in kept]))


class RolloutEngine:
    """The state of one rollout on the host, the same in all processes. Arrays [X, B]: slots B of each row shard X."""

    def __init__(
        self,
        sampler: Sampler,
        params: Params,
        prompts: Sequence[Sequence[int]],
        step: int,
        first_sequence: int,
        greedy: bool,
    ) -> None:
        self.sampler, self.options, self.work = sampler, sampler.options, sampler.work
        self.params = params
        self.first_sequence = first_sequence
        self.greedy = greedy
        self.stream = Stream(np.asarray(sampler.stop_ids, np.int32), np.int32(sampler.seed), np.int32(step))
        self.model = nnx.merge(sampler.graphdef, params)
        self.decoder, self.weights = decoding_graphdef(self.model), decoding_weights(sampler.graphdef, params)
        self.layout = self.model.layout
        self.shards = 1 if self.layout is None else self.layout.row_shards
        self.queues = assign_prompts(prompts, self.shards)
        most = max(sum(len(p.sequences) for p in queue) for queue in self.queues)
        limit = self.options.max_slots or sampler.max_slots()
        self.most_slots = most if limit is None else max(1, min(most, limit // self.shards))
        self.batches: list[PrefilledBatch] = []
        self.candidates: list[deque[Candidate]] = [deque() for _ in range(self.shards)]
        self.cache: list[LayerCache] = []
        self.end = 0
        """The place of the next token in the cache."""
        self.steps_a_call = 1
        shape = len(prompts), self.options.max_completion_length
        self.completions = Completions(
            tokens=np.zeros(shape, np.int32),
            logprobs=np.zeros(shape, np.float32),
            lengths=np.zeros(shape[0], np.int32),
            finished=np.zeros(shape[0], bool),
            kept=np.zeros(shape, np.float32) if self.options.truncates and not greedy else None,
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
        """Fill free slots, in a cache as large as the rows need; False where no sequence is left."""
        while self.wants_prompts():
            self.prefill()
        live = (self.sequences >= 0).sum(axis=1).tolist()
        entering = [
            [candidates[i] for i in range(min(len(candidates), self.most_slots - count))]
            for candidates, count in zip(self.candidates, live, strict=True)
        ]
        rows = max(count + len(new) for count, new in zip(live, entering, strict=True))
        width = max((candidate.batch.width for new in entering for candidate in new), default=0)
        longest = int(self.lengths.max(initial=0, where=self.sequences >= 0))
        if rows == 0:
            return False
        end = max(width, longest)
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
        most = max(map(len, self.queues))
        longest = max(len(p.tokens) for queue in self.queues for p in queue)
        rows = prompts_a_batch(min(most, self.most_slots), bucket(longest, WIDTHS))
        taken = [[queue.popleft() for _ in range(min(rows, len(queue)))] for queue in self.queues]
        # The last token of a prompt is the first that is decoded.
        longest = max(len(p.tokens) - 1 for part in taken for p in part)
        width = min(bucket(longest, WIDTHS), self.options.max_prompt_length)
        tokens, lengths = np.zeros((self.shards, rows, width), np.int32), np.zeros((self.shards, rows), np.int32)
        batch = PrefilledBatch((), width)
        for shard, part in enumerate(taken):
            for row, prompt in enumerate(part):
                lengths[shard, row] = len(prompt.tokens) - 1
                tokens[shard, row, : lengths[shard, row]] = prompt.tokens[:-1]
                for sequence in prompt.sequences:
                    self.candidates[shard].append(Candidate(sequence, batch, row, prompt.tokens))
        batch.cache = prefill(self.sampler.graphdef, self.params, *self.on_devices((tokens, lengths)))
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
            shapes = abstract_cache(self.model, self.shards * slots, places)
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
            if (chosen >= 0).any():
                placed, end = self.on_devices(chosen), np.int32(self.end)
                for index, prompts in enumerate(batch.cache):
                    self.cache[index] = insert(self.cache[index], prompts, placed, end, layout=self.layout)
            if not any(candidate.batch is batch for queue in self.candidates for candidate in queue):
                self.batches.remove(batch)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def decode_chunk(self) -> None:
        """Decode until `CHUNK` tokens are made or `stop_after` sequences have ended, in calls that don't take long."""
        left, live = CHUNK, int((self.sequences >= 0).sum())
        stop_after = self.stop_after(live)
        while left and live and stop_after > 0:
            start, steps = time.perf_counter(), min(left, self.steps_a_call)
            chunk = self.run_decode(steps, stop_after)
            made, ended = int(chunk.steps), self.record(chunk)
            seconds = max(gather_objects(time.perf_counter() - start))
            self.sampler.poll()
            left, live, stop_after = left - made, live - ended, stop_after - ended
            # The first call compiles and says little: the fall is unbounded, the growth is not.
            speed = int(made * CALL_SECONDS / max(seconds, 1e-9))
            self.steps_a_call = max(1, min(2 * steps, speed, CHUNK))

    def stop_after(self, live: int) -> int:
        """How many of the `live` sequences have to end before a chunk ends early."""
        if self.batches or any(self.queues):
            return max(1, live // 8)
        slots = self.sequences.shape[1]
        smaller = max((size for size in slot_buckets(self.most_slots) if size < slots), default=0)
        return max(1, live - smaller * self.shards)

    def run_decode(self, steps: int, stop_after: int) -> Any:
        """Call the decode program; the result's arrays are numpy's."""
        live = self.sequences >= 0
        counts = np.where(live, self.completions.lengths[self.sequences], 0)
        slots = Slots(self.last_tokens, self.lengths, counts, self.sequences + self.first_sequence, live)
        chunk, cache = decode(
            self.decoder,
            self.weights,
            tuple(self.cache),
            self.on_devices(slots),
            self.stream,
            np.int32(self.end),
            np.int32(steps),
            np.int32(stop_after),
            options=self.options,
            greedy=self.greedy,
        )
        self.cache = list(cache)
        return jax.device_get(chunk)

    def record(self, chunk: Any) -> int:
        """Add the chunk's tokens to their completions and free the slots of those that ended; returns their number."""
        steps, tokens = int(chunk.steps), chunk.tokens.reshape(*self.sequences.shape, -1)
        results, ended = self.completions, 0
        for shard, slot in np.argwhere(self.sequences >= 0):
            sequence = self.sequences[shard, slot]
            count = results.lengths[sequence]
            made = tokens[shard, slot, : min(steps, results.tokens.shape[1] - count)]
            stops = np.flatnonzero(np.isin(made, self.stream.stop_ids))
            made = made[: stops[0] + 1] if stops.size else made
            results.tokens[sequence, count : count + made.size] = made
            for whole, part in ((results.logprobs, chunk.logprobs), (results.kept, chunk.kept)):
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
        return ended

    def on_devices(self, tree: Any) -> Any:
        """Arrays [X, B, ...] as the programs take them, [X B, ...], on the devices of their shards."""
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]).astype(bool if x.dtype == bool else np.int32), tree)
        if self.layout is None:
            return flat
        place = partial(jax.make_array_from_process_local_data, sharding(self.layout.mesh, ("batch",)))
        return jax.tree.map(lambda x: place(x, x.shape), flat)  # the shape says that each process passes all rows
