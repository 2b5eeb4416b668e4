"""The rollout engine: schedules sequences on decode slots and cache pages (continuous batching).

Each distinct prompt is prefilled once and shared by its sequences. Sequences decode in slots, with pages of the cache's
pool. After every chunk, waiting sequences take freed slots. A chunk has `CHUNK` tokens, or fewer if an eighth of the
sequences has ended. If no sequence waits, and rows cost time (`slot_buckets`), the batch shrinks. The pool grows and
shrinks with the tokens of all sequences. When it is full, the shortest sequence is evicted and prefilled again later.

In a conversation, a sequence keeps its pages while it waits for a reply, and the reply is prefilled after them. With
delta nets it also keeps its slot, which has its states. Numbers of slots and pages come from few buckets.

Scheduling depends on counts of tokens and turns only, so runs are reproducible. The rest of the batch changes a token
only by rounding (int8 weights add a rounding, since prefill has none). Each device has its own prompts and slots.
"""

from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import numpy as np
from flax import nnx

from mllm.data.batch import bucket
from mllm.model.layout import Params
from mllm.sampler import sampling
from mllm.sampler.completion import Completion, SamplerSettings, Turns
from mllm.sampler.decoding import Cache, Pages, decoding_graphdef, decoding_weights
from mllm.sampler.paged_cache import PagedCache
from mllm.sampler.schedule import (
    PREFILL_TOKENS,
    PREFILLED_BATCHES,
    WIDTHS,
    DecodeLimits,
    TypicalBatch,
    assign_prompts,
    prompts_a_batch,
    slot_buckets,
)
from mllm.sampler.slots import CHUNK, Candidate, Prefilled, Slots, Stream, decode, empty_cache, on_devices, prefill


class RolloutEngine:
    """The state of one rollout on the host, equal in all processes. Arrays [X, B]: slots B of each row shard X."""

    def __init__(
        self,
        sampler: SamplerSettings,
        params: Params,
        prompts: Sequence[Sequence[int]],
        step: int,
        first_sequence: int,
        greedy: bool,
    ) -> None:
        self.sampler, self.options, self.work = sampler, sampler.options, sampler.work
        self.params, self.prompts, self.first_sequence = params, prompts, first_sequence
        stop_ids, seed = np.asarray(sampler.stop_ids, np.int32), np.int32(sampler.seed)
        self.stream = Stream(stop_ids, seed, np.int32(step), np.bool_(greedy))
        self.model = nnx.merge(sampler.graphdef, params)
        self.decoder = decoding_graphdef(self.model)
        self.weights = decoding_weights(sampler.graphdef, params, self.options.weights == "int8")
        self.layout = self.model.layout
        self.shards = 1 if self.layout is None else self.layout.row_shards
        self.queues = assign_prompts(prompts, self.shards)
        share = TypicalBatch(max(map(len, self.queues)), max(sum(map(len, queue)) for queue in self.queues))
        self.most_prompts, most = share if sampler.typical is None else sampler.typical.serve(share, self.shards)
        slots = self.options.max_slots
        room = sampler.room() if slots is None else DecodeLimits(slots)
        self.most_slots = most if room is None else max(1, min(most, room.slots // self.shards))
        tokens = None if room is None or room.tokens is None else room.tokens // self.shards
        self.cache = PagedCache(self.model, self.options, self.weights, self.most_slots, tokens)
        vocabulary, answered = self.model.config.vocab_size, self.options.turns > 1
        self.slot_sizes = slot_buckets(self.most_slots, vocabulary, self.cache.weights, answered)
        self.batches: list[Prefilled] = []
        self.candidates: list[deque[Candidate]] = [deque() for _ in range(self.shards)]
        self.tail: Cache = ()
        self.shard_of = {number: shard for shard, part in enumerate(self.queues) for group in part for number in group}
        self.waiting: list[int] = []
        """Sequences with a turn that ended in the last chunk."""
        self.answered: list[deque[int]] = [deque() for _ in range(self.shards)]
        """Sequences with a reply to prefill."""
        self.cached: dict[int, int] = {}
        """The number of cached tokens of waiting and answered sequences."""
        self.overrun: set[int] = set()
        """Sequences that decoded tokens after a stop text in the last chunk."""
        self.completions = [Completion(kept=array("f") if self.options.truncates else None) for _ in prompts]
        self.sequences = np.full((self.shards, 0), -1)
        """The sequence in each slot, -1 for an empty slot."""

    def admit(self) -> bool:
        """Fill free slots while there are pages; False if all slots are empty."""
        self.make_room()
        while self.wants_prompts():
            self.prefill()
        resumed, entering = zip(*(self.take_waiting(shard) for shard in range(self.shards)), strict=True)
        entered = [[*part, *(entry.sequence for entry in queue)] for part, queue in zip(resumed, entering, strict=True)]
        decoded = [[*self.live(shard), *part] for shard, part in enumerate(entered)]
        if not any(decoded):
            return False
        occupants = [[*dict.fromkeys([*part, *self.parked(shard)])] for shard, part in enumerate(decoded)]
        slots = bucket(max(map(len, occupants)), self.slot_sizes)
        kept = np.array([[*part, *[-1] * (slots - len(part))] for part in occupants])
        self.sequences = np.where(np.arange(slots) < [[len(part)] for part in decoded], kept, -1)
        spans = [{number: self.span(number) for number in self.holding(shard)} for shard in range(self.shards)]
        self.cache.fit_pages(spans, slots)
        self.cache.states.arrange(kept)
        self.insert(entering)
        self.extend(resumed)
        return True

    def live(self, shard: int) -> list[int]:
        """The sequences in the shard's slots."""
        return [sequence for sequence in self.sequences[shard].tolist() if sequence >= 0]

    def parked(self, shard: int) -> list[int]:
        """Waiting sequences that keep their slot in the shard, because the slot has their delta-net states."""
        waiting = self.cached if self.cache.states.used else ()
        return [number for number in waiting if self.shard_of[number] == shard]

    def context(self, sequence: int) -> list[int]:
        """The tokens of a prompt and its completion so far; the last token is not in the cache yet."""
        return [*self.prompts[sequence], *self.completions[sequence].tokens]

    def length(self, sequence: int) -> int:
        """The number of a sequence's tokens in the cache, once it has entered."""
        return len(self.prompts[sequence]) + len(self.completions[sequence].tokens) - 1

    def holding(self, shard: int) -> list[int]:
        """The sequences that have pages of the shard, or are about to get pages."""
        return [*self.live(shard), *(number for number in self.cached if self.shard_of[number] == shard)]

    def span(self, sequence: int) -> tuple[int, int]:
        """(tokens of the sequence in pages, further tokens that need a place)."""
        cached = self.cached.get(sequence, length := self.length(sequence))
        # Tokens of a chunk beyond the limit have no place and are not read.
        behind = min(length + CHUNK, len(self.prompts[sequence]) + self.limit(sequence)) - cached
        return cached, 0 if sequence in self.waiting else behind

    def make_room(self) -> None:
        """Evict the shortest sequences if pages run out; they go to the front of the queue."""
        for shard, queue in enumerate(self.queues):
            owners = sorted(self.holding(shard), key=lambda number: (self.length(number), -number))
            needed = self.cache.needed(*map(self.span, owners))
            while self.cache.lacks(needed):
                self.cache.release(shard, sequence := owners.pop(0))
                needed -= self.cache.needed(self.span(sequence))
                self.sequences[shard][self.sequences[shard] == sequence] = -1
                self.cached.pop(sequence, None)
                if sequence in self.answered[shard]:
                    self.answered[shard].remove(sequence)
                if sequence not in self.waiting:
                    queue.appendleft([sequence])

    def take_waiting(self, shard: int) -> tuple[list[int], list[Candidate]]:
        """The answered sequences and the candidates that enter the shard's free slots; each gets pages to grow."""
        answered, candidates, owners = self.answered[shard], self.candidates[shard], self.holding(shard)
        live = self.live(shard)
        resumed = [answered.popleft() for _ in range(min(self.most_slots - len(live), len(answered)))]
        entering = [*islice(candidates, self.most_slots - len({*live, *resumed, *self.parked(shard)}))]
        needed = self.cache.needed(*map(self.span, [*owners, *(candidate.sequence for candidate in entering)]))
        while entering and (count := len(owners) + len(entering)) > 1 and self.cache.lacks(needed, growing=count):
            needed -= self.cache.needed(self.span(entering.pop().sequence))
        for _ in entering:
            candidates.popleft()
        return resumed, entering

    def wants_prompts(self) -> bool:
        """Whether a shard has more free slots than prefilled sequences, and prompts to prefill."""
        counts, most = [batch.tokens for batch in self.batches], PREFILLED_BATCHES * PREFILL_TOKENS * self.shards
        if len(counts) >= PREFILLED_BATCHES and (self.cache.states.used or sum(counts) + max(counts) > most):
            return False
        free = [self.most_slots - len(self.live(shard)) - len(self.parked(shard)) for shard in range(self.shards)]
        shards = zip(self.queues, self.candidates, free, strict=True)
        return any(queue and len(candidates) < count for queue, candidates, count in shards)

    def prefill(self) -> None:
        """Prefill the next prompts of each shard."""
        longest = max(self.length(first) + 1 for queue in self.queues for first, *_ in queue)
        rows = prompts_a_batch(self.model, min(self.most_prompts, self.most_slots), bucket(longest, WIDTHS))
        taken = [[queue.popleft() for _ in range(min(rows, len(queue)))] for queue in self.queues]
        # A prompt's last token is the input of its first decode step.
        contexts = [[self.context(first)[:-1] for first, *_ in part] for part in taken]
        longest = max(len(context) for part in contexts for context in part)
        widths = bucket(longest, WIDTHS), self.options.max_prompt_length, self.options.total_length
        width = min(width for width in widths if width >= longest)
        tokens, lengths = np.zeros((self.shards, rows, width), np.int32), np.zeros((self.shards, rows), np.int32)
        for shard, part in enumerate(contexts):
            for row, context in enumerate(part):
                lengths[shard, row] = len(context)
                tokens[shard, row, : len(context)] = context
        batch = prefill(self.sampler.graphdef, self.params, *on_devices(self.layout, (tokens, lengths)))
        for candidates, part in zip(self.candidates, taken, strict=True):
            candidates.extend(Candidate(sequence, batch, row) for row, group in enumerate(part) for sequence in group)
        self.batches.append(batch)
        self.work.prefilled += tokens.size

    def insert(self, entering: Sequence[Sequence[Candidate]]) -> None:
        """Copy the prompts of these sequences of each shard into their pages."""
        for batch in self.batches:
            chosen = [[candidate for candidate in candidates if candidate.batch is batch] for candidates in entering]
            if not (most := max(map(len, chosen))):
                continue
            rows = bucket(most, self.slot_sizes)
            sources, sequences = np.zeros((self.shards, rows), np.int64), np.full((self.shards, rows), -1)
            for shard, candidates in enumerate(chosen):
                sources[shard, : len(candidates)] = [candidate.source for candidate in candidates]
                sequences[shard, : len(candidates)] = [candidate.sequence for candidate in candidates]
            self.cache.insert(batch, sources, sequences)
        wanted = {id(candidate.batch) for queue in self.candidates for candidate in queue}
        self.batches = [batch for batch in self.batches if id(batch) in wanted]

    def extend(self, resumed: Sequence[Sequence[int]]) -> None:
        """Prefill the replies to these sequences of each shard, after their cached tokens."""
        if not (most := max(map(len, resumed))):
            return
        sequences = np.full((self.shards, bucket(most, self.slot_sizes)), -1)
        for row, part in zip(sequences, resumed, strict=True):
            row[: len(part)] = part
        contexts = {number: self.context(number)[self.cached[number] : -1] for part in resumed for number in part}
        self.work.prefilled += self.cache.extend(self.decoder, self.weights, sequences, contexts, self.cached)
        for number in contexts:
            del self.cached[number]

    def answer(self, turns: Turns, ended: Mapping[int, Completion]) -> dict[int, Completion]:
        """Send ended turns to their environments while other sequences decode; returns the finished completions.

        Waits for the replies to the previous chunk, or for all replies if no sequence is left to decode.
        """
        turns.send({i: replace(completion, tokens=completion.turn, given=[]) for i, completion in ended.items()})
        again = {*ended} & self.overrun if self.cache.states.used else set()
        self.release(again)
        self.cached |= {sequence: self.length(sequence) for sequence in ended if sequence not in again}
        due, self.waiting = self.waiting, [*ended]
        if not ((self.sequences >= 0).any() or any(self.queues) or any(self.candidates) or any(self.answered)):
            due, self.waiting = [*due, *self.waiting], []
        over = []
        for sequence, tokens in turns.receive(due).items() if due else ():
            completion = self.completions[sequence]
            if tokens is None:
                self.cached.pop(sequence, None)
                over.append(sequence)
                continue
            completion.given.append((len(completion.tokens), len(completion.tokens) + len(tokens)))
            completion.tokens.extend(tokens)
            if sequence in self.cached:
                self.answered[self.shard_of[sequence]].append(sequence)
            else:
                self.queues[self.shard_of[sequence]].appendleft([sequence])
        return self.release(over)

    def release(self, sequences: Collection[int]) -> dict[int, Completion]:
        """Free the pages of ended sequences; returns their completions."""
        for sequence in sequences:
            self.cache.release(self.shard_of[sequence], sequence)
        return {sequence: self.completions[sequence] for sequence in sequences}

    def decode_chunk(self) -> dict[int, Completion]:
        """Decode a chunk; returns the completions that have ended, by their sequences."""
        before = self.sequences.copy()
        pages, places, lengths = self.begin_chunk()
        self.record(*self.run_decode(pages, self.stop_after(int((self.sequences >= 0).sum()))))
        self.sampler.poll()
        self.cache.add_tail(self.tail, places, lengths)
        if self.sampler.stop_texts:
            self.stop_at_texts(before)
        finished = before[(before >= 0) & (self.sequences != before)].tolist()
        for sequence in finished:
            completion = self.completions[sequence]
            self.completions[sequence] = replace(completion, text=self.sampler.text_of(completion))
        return {sequence: self.completions[sequence] for sequence in finished}

    def begin_chunk(self) -> Any:
        """The pages, places and lengths that `decode` and `add_tail` take, on the devices; makes the tail."""
        lengths = self.slots().lengths
        views = on_devices(self.layout, (*self.cache.views(self.sequences, lengths, CHUNK), lengths))
        if not self.tail or len(self.tail[0].keys) != lengths.size:
            self.tail = empty_cache(self.model, [lengths.size] * len(views[0]), CHUNK)
        return views

    def compile_rest(self) -> None:
        """At the end of a rollout, compile the decode programs for numbers of slots without a program."""
        for slots in sorted({*self.slot_sizes} - {slots for slots, *_ in self.work.programs}):
            self.sequences = np.full((self.shards, slots), -1)
            self.cache.fit_pages([{}] * self.shards, slots)
            self.cache.states.arrange(self.sequences)
            pages, places, lengths = self.begin_chunk()
            self.run_decode(pages, stop_after=1)
            self.cache.add_tail(self.tail, places, lengths)
            self.work.programs.add((slots, *self.cache.pages))

    def stop_at_texts(self, sequences: np.ndarray) -> None:
        """End the completions of the slots' sequences behind the token that completes a stop text."""
        self.overrun.clear()
        for slot in zip(*np.nonzero(sequences >= 0), strict=True):
            completion = self.completions[sequences[slot]]
            if length := self.sampler.stopped_length(completion.turn):
                if extra := len(completion.turn) - length:
                    self.overrun.add(int(sequences[slot]))
                self.work.tokens -= extra
                self.work.completions += int(self.sequences[slot] >= 0)
                for items in filter(None, (completion.tokens, completion.logprobs, completion.norms, completion.kept)):
                    del items[len(items) - extra :]
                completion.finished, self.sequences[slot] = True, -1

    def stop_after(self, live: int) -> int:
        """The number of the `live` sequences that must end before a chunk ends early."""
        if self.batches or any(self.queues):
            return max(1, live // 8)
        smaller = max((size for size in self.slot_sizes if size < self.sequences.shape[1]), default=0)
        return max(1, live - smaller * self.shards)

    def slots(self) -> Slots:
        """The state of the slots as arrays [X, B]; 0 in an empty slot."""
        live = self.sequences >= 0
        tokens, lengths, counts, limits = np.zeros((4, *live.shape), np.int32)
        for slot in zip(*np.nonzero(live), strict=True):
            prompt, made = self.prompts[self.sequences[slot]], self.completions[self.sequences[slot]].tokens
            tokens[slot] = made[-1] if made else prompt[-1]
            lengths[slot], counts[slot] = len(prompt) + len(made) - 1, len(made)
            limits[slot] = self.limit(int(self.sequences[slot]))
        return Slots(tokens, lengths, counts, limits, self.sequences + self.first_sequence, live)

    def limit(self, sequence: int) -> int:
        """The number of tokens after the sequence's prompt at which its turn is cut off."""
        completion = self.completions[sequence]
        return len(completion.tokens) - len(completion.turn) + self.options.max_completion_length

    def run_decode(self, pages: tuple[Pages, ...], stop_after: int) -> tuple[sampling.Draw, int]:
        """Call the decode program; returns NumPy arrays [X, B, C] and the number of steps."""
        slots = self.slots()
        chunk, done, self.tail, states = decode(
            self.decoder,
            self.weights,
            self.tail,
            tuple(self.cache.states.layers),
            tuple(self.cache.layers),
            pages,
            on_devices(self.layout, slots),
            self.stream,
            np.int32(stop_after),
            options=self.options,
        )
        self.cache.states.layers = [*states]
        return jax.tree.map(lambda x: x.reshape(*slots.live.shape, -1), jax.device_get(chunk)), int(done)

    def record(self, chunk: sampling.Draw, steps: int) -> None:
        """Add the tokens of `steps` steps to their completions."""
        stops = np.isin(chunk.tokens[:, :, :steps], self.stream.stop_ids)
        lengths = np.where(stops.any(-1), stops.argmax(-1) + 1, steps)
        used = self.sequences >= 0
        sampling.check_logprobs(chunk.logprobs[:, :, :steps][used[..., None] & (np.arange(steps) < lengths[..., None])])
        for slot in zip(*np.nonzero(used), strict=True):
            sequence = int(self.sequences[slot])
            completion, most = self.completions[sequence], self.limit(sequence)
            count = min(int(lengths[slot]), most - len(completion.tokens))
            completion.tokens.extend(chunk.tokens[slot][:count].tolist())
            completion.logprobs.extend(chunk.logprobs[slot][:count].tolist())
            completion.norms.extend(chunk.norms[slot][:count].tolist())
            if chunk.kept is not None and completion.kept is not None:
                completion.kept.extend(chunk.kept[slot][:count].tolist())
            completion.finished = bool(stops[slot][:count].any())
            self.work.tokens += count
            self.work.held += count * self.length(sequence) - count * (count - 1) // 2
            if completion.finished or len(completion.tokens) == most:
                self.sequences[slot] = -1
                self.work.completions += 1
        self.work.steps += steps
        self.work.slot_steps += steps * self.sequences.size
        self.work.read += steps * self.shards * self.cache.places
        self.work.programs.add((self.sequences.shape[1], *self.cache.pages))
