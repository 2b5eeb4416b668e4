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
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mllm.config.grpo import RolloutConfig
from mllm.data.batch import bucket
from mllm.model.decoding import Cache, LayerCache, abstract_cache, decoding_graphdef, decoding_weights
from mllm.model.layout import Params
from mllm.model.tokenizer import Renderer
from mllm.parallel.mesh import sharding
from mllm.rl import sampling
from mllm.rl.schedule import PREFILLED_BATCHES, WIDTHS, assign_prompts, places_for, prompts_a_batch, slot_buckets
from mllm.rl.slots import CHUNK, Slots, Stream, decode, insert, prefill, repack

CALL_SECONDS = 0.25
"""About how long a call of the decode program may take in a process that is alone, so that a signal acts soon."""


@dataclass
class Completion:
    """A sampled completion; its arrays have an item for each token."""

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    """The stop token included."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    """Under the distribution over the whole vocabulary, with the temperature and a penalty."""
    kept: "array[float] | None" = None
    """The probability that top-k, top-p and min-p kept; None with none of them."""
    finished: bool = False
    """Whether a stop token or text ended it; False if it was cut off."""
    text: str = ""
    """Without the token or text that ended it, and without control tokens."""


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


class Candidate(NamedTuple):
    """A sequence whose prompt is prefilled, and which waits for a slot."""

    sequence: int
    batch: Cache
    """The keys and values of the prompts that were prefilled with its own, on all devices."""
    source: int
    """The prompt's row among those that its device prefilled in the batch."""


@dataclass(frozen=True)
class Sampler:
    """Completes prompts with parameters that each call passes."""

    graphdef: Any
    renderer: Renderer
    stop_ids: Sequence[int]
    options: RolloutConfig
    seed: int
    max_slots: Callable[[], int | None] = lambda: None
    """Returns the most sequences that are decoded at a time over all devices, at least one on each; None: all. It is
    called where `options.max_slots` is None."""
    poll: Callable[[], object] = lambda: None
    """Called by all processes after each call of the decode program; what it raises ends the rollout."""
    work: RolloutWork = field(default_factory=RolloutWork)
    """What all rollouts so far did."""
    stop_texts: Sequence[str] = ()
    """Texts that end a completion; those of one token are among `stop_ids`, too."""

    def complete(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        step: int,
        first_sequence: int = 0,
        greedy: bool = False,
        ended: Callable[[Mapping[int, Completion]], object] = lambda found: None,
    ) -> list[Completion]:
        """Complete each prompt (token ids) once; prompt i draws from the stream (seed, step, first_sequence + i).

        All processes pass the same prompts, and get all completions. With `greedy` the likeliest token is taken;
        log-probabilities are 0. `ended` is called with the completions that have ended, by their prompts' numbers,
        while others are decoded. ValueError is raised if there are no prompts, or one is empty or longer than
        `options.max_prompt_length`.
        """
        lengths, limit = sorted({*map(len, prompts)}), self.options.max_prompt_length
        if not lengths or lengths[0] == 0 or lengths[-1] > limit:
            raise ValueError(f"prompts: expected 1 to {limit} tokens each (rollout.max_prompt_length), got {lengths}")
        engine = RolloutEngine(self, params, prompts, step, first_sequence, greedy)
        while engine.admit():
            ended(engine.decode_chunk())
        return engine.completions

    def text_of(self, completion: Completion) -> str:
        """The text of a completion, up to the first of the stop texts."""
        own = completion.tokens[: len(completion.tokens) - (completion.tokens[-1] in self.stop_ids)]
        text = cast(str, self.renderer.tokenizer.decode(own.tolist(), skip_special_tokens=True))
        return min((text.partition(stop)[0] for stop in self.stop_texts), key=len, default=text)

    def stopped_length(self, tokens: "array[int]") -> int | None:
        """The number of tokens with which the first stop text is complete, None without one in the last chunk."""
        # A token has a byte at least; one more, since tokenizers may drop a space before the first.
        first = max(0, len(tokens) - CHUNK - 1 - max(len(stop.encode()) for stop in self.stop_texts))

        def stops(end: int) -> bool:
            text = self.renderer.tokenizer.decode(tokens[first:end].tolist(), skip_special_tokens=True)
            return any(stop in text for stop in self.stop_texts)

        return next(filter(stops, range(first + 1, len(tokens))), len(tokens)) if stops(len(tokens)) else None


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
        self.params, self.prompts = params, prompts
        self.first_sequence = first_sequence
        self.greedy = greedy
        self.stream = Stream(np.asarray(sampler.stop_ids, np.int32), np.int32(sampler.seed), np.int32(step))
        self.model = nnx.merge(sampler.graphdef, params)
        self.decoder = decoding_graphdef(self.model)
        self.weights = decoding_weights(sampler.graphdef, params, self.options.weights == "int8")
        self.layout = self.model.layout
        self.shards = 1 if self.layout is None else self.layout.row_shards
        self.queues = assign_prompts(prompts, self.shards)
        most = max(sum(map(len, queue)) for queue in self.queues)
        limit = self.options.max_slots or sampler.max_slots()
        self.most_slots = most if limit is None else max(1, min(most, limit // self.shards))
        self.batches: list[Cache] = []
        self.candidates: list[deque[Candidate]] = [deque() for _ in range(self.shards)]
        self.cache: list[LayerCache] = []
        self.places = 0
        """The places of a layer's cache, except where a window leaves fewer."""
        self.end = 0
        """The place of the next token in the cache."""
        self.steps_a_call = 1
        truncates = self.options.truncates and not greedy
        self.completions = [Completion(kept=array("f") if truncates else None) for _ in prompts]
        self.sequences = np.full((self.shards, 0), -1)
        """The sequence in each slot, -1 for none."""

    # --- sequences enter and leave ------------------------------------------------------------------------------------

    def admit(self) -> bool:
        """Fill free slots, in a cache as large as the rows need; False where no sequence is left."""
        while self.wants_prompts():
            self.prefill()
        live = (self.sequences >= 0).sum(axis=1).tolist()
        entering = [
            [candidates.popleft() for _ in range(min(len(candidates), self.most_slots - count))]
            for candidates, count in zip(self.candidates, live, strict=True)
        ]
        rows = max(count + len(new) for count, new in zip(live, entering, strict=True))
        batches = [candidate.batch for new in entering for candidate in new]
        width = max((layer.keys.shape[2] for batch in batches for layer in batch), default=0)
        if rows == 0:
            return False
        end = max(width, int(self.slots().lengths.max(initial=0)))
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
        shards = zip(self.queues, self.candidates, free, strict=True)
        return any(queue and len(candidates) < count for queue, candidates, count in shards)

    def prefill(self) -> None:
        """Prefill the next prompts of each shard."""
        most = max(map(len, self.queues))
        longest = max(len(self.prompts[first]) for queue in self.queues for first, *_ in queue)
        rows = prompts_a_batch(min(most, self.most_slots), bucket(longest, WIDTHS))
        taken = [[queue.popleft() for _ in range(min(rows, len(queue)))] for queue in self.queues]
        # The last token of a prompt is the first that is decoded.
        longest = max(len(self.prompts[first]) - 1 for part in taken for first, *_ in part)
        width = min(bucket(longest, WIDTHS), self.options.max_prompt_length)
        tokens, lengths = np.zeros((self.shards, rows, width), np.int32), np.zeros((self.shards, rows), np.int32)
        for shard, part in enumerate(taken):
            for row, (first, *_) in enumerate(part):
                lengths[shard, row] = len(self.prompts[first]) - 1
                tokens[shard, row, : lengths[shard, row]] = self.prompts[first][:-1]
        batch = prefill(self.sampler.graphdef, self.params, *self.on_devices((tokens, lengths)))
        for candidates, part in zip(self.candidates, taken, strict=True):
            candidates.extend(Candidate(one, batch, row) for row, group in enumerate(part) for one in group)
        self.batches.append(batch)
        self.work.prefilled += tokens.size

    def repack(self, slots: int, places: int, end: int) -> None:
        """Put the live rows into the first slots of a cache of this size, so that they end at `end`."""
        order = np.argsort(self.sequences < 0, axis=1, kind="stable")
        sources = np.zeros((self.shards, slots), np.int32)
        kept = min(slots, order.shape[1])
        sources[:, :kept] = order[:, :kept]
        shapes = abstract_cache(self.model, self.shards * slots, places)
        if self.cache:
            moved = self.on_devices(sources), np.int32(self.end), np.int32(end)
            for index, shape in enumerate(shapes):  # one at a time, so that no second cache is held
                size = shape.keys.shape[2]
                self.cache[index] = repack(self.cache[index], *moved, places=size, layout=self.layout)
        else:
            self.cache = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), x) for x in shapes]
        sequences = np.full((self.shards, slots), -1)
        sequences[:, :kept] = np.take_along_axis(self.sequences, order[:, :kept], axis=1)
        self.sequences, self.places, self.end = sequences, places, end

    def fill_slots(self, entering: Sequence[Sequence[Candidate]]) -> None:
        """Put these sequences of each shard into free slots."""
        config = self.model.config
        sources = {id(batch): np.full(self.sequences.shape, -1, np.int32) for batch in self.batches}
        for shard, candidates in enumerate(entering):
            free = np.flatnonzero(self.sequences[shard] < 0)
            for slot, candidate in zip(free, candidates, strict=False):
                self.sequences[shard, slot] = candidate.sequence
                sources[id(candidate.batch)][shard, slot] = candidate.source
        for batch in self.batches:
            chosen = sources[id(batch)]
            if (chosen >= 0).any():
                placed, end = self.on_devices(chosen), np.int32(self.end)
                for index, prompts in enumerate(batch):
                    ring = config.kinds[config.kind_of_layer[index]].window is not None
                    self.cache[index] = insert(self.cache[index], prompts, placed, end, ring=ring, layout=self.layout)
        wanted = {id(candidate.batch) for queue in self.candidates for candidate in queue}
        self.batches = [batch for batch in self.batches if id(batch) in wanted]

    # --- decoding -----------------------------------------------------------------------------------------------------

    def decode_chunk(self) -> dict[int, Completion]:
        """Decode until `CHUNK` tokens are made or `stop_after` sequences have ended, in calls that don't take long.

        Returns the completions that have ended, by their sequences.
        """
        left, ended, before = CHUNK, 0, self.sequences.copy()
        enough = self.stop_after(int((self.sequences >= 0).sum()))
        while left and ended < enough:
            # Several processes exchange once a chunk whether a signal has come.
            start, steps = time.perf_counter(), left if jax.process_count() > 1 else min(left, self.steps_a_call)
            chunk, made = self.run_decode(steps, enough - ended)
            ended += self.record(chunk, made)
            left -= made
            seconds = time.perf_counter() - start
            self.sampler.poll()
            # The first call compiles and says little: the fall is unbounded, the growth is not.
            speed = int(made * CALL_SECONDS / max(seconds, 1e-9))
            self.steps_a_call = max(1, min(2 * steps, speed, CHUNK))
        if self.sampler.stop_texts:  # not after each call, since the clock says where one ends
            self.stop_at_texts(before)
        finished = before[(before >= 0) & (self.sequences != before)].tolist()
        for sequence in finished:
            one = self.completions[sequence]
            self.completions[sequence] = replace(one, text=self.sampler.text_of(one))
        return {sequence: self.completions[sequence] for sequence in finished}

    def stop_at_texts(self, sequences: np.ndarray) -> None:
        """End the completions of the slots' sequences behind the token that completes a stop text."""
        for place in zip(*np.nonzero(sequences >= 0), strict=True):
            one = self.completions[sequences[place]]
            if length := self.sampler.stopped_length(one.tokens):
                self.work.tokens -= len(one.tokens) - length
                self.work.completions += int(self.sequences[place] >= 0)
                for items in (one.tokens, one.logprobs, one.kept or array("f")):
                    del items[length:]
                one.finished, self.sequences[place] = True, -1

    def stop_after(self, live: int) -> int:
        """How many of the `live` sequences have to end, at most all, before a chunk ends early."""
        if self.batches or any(self.queues):
            return max(1, live // 8)
        slots = self.sequences.shape[1]
        smaller = max((size for size in slot_buckets(self.most_slots) if size < slots), default=0)
        return max(1, live - smaller * self.shards)

    def slots(self) -> Slots:
        """What determines the next token of each slot, arrays [X, B]; 0 where there is no sequence."""
        live, most = self.sequences >= 0, self.options.max_prompt_length + self.options.max_completion_length
        tokens, lengths, counts = np.zeros((3, *live.shape), np.int32)
        history = None if self.options.repetition_penalty is None else np.zeros((*live.shape, most), np.int32)
        for place in zip(*np.nonzero(live), strict=True):
            prompt, made = self.prompts[self.sequences[place]], self.completions[self.sequences[place]].tokens
            tokens[place] = made[-1] if made else prompt[-1]
            lengths[place], counts[place] = len(prompt) + len(made) - 1, len(made)
            if history is not None:
                history[place] = tokens[place]
                history[place][: lengths[place] + 1] = [*prompt, *made]
        return Slots(tokens, lengths, counts, self.sequences + self.first_sequence, live, history)

    def run_decode(self, steps: int, stop_after: int) -> tuple[sampling.Draw, int]:
        """Call the decode program; the result's arrays [X, B, ...] are numpy's."""
        chunk, done, cache = decode(
            self.decoder,
            self.weights,
            tuple(self.cache),
            self.on_devices(self.slots()),
            self.stream,
            np.int32(self.end),
            np.int32(steps),
            np.int32(stop_after),
            options=self.options,
            greedy=self.greedy,
        )
        self.cache = list(cache)
        shape = self.sequences.shape
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), jax.device_get(chunk)), int(done)

    def record(self, chunk: sampling.Draw, steps: int) -> int:
        """Add the tokens of so many steps to their completions, and free the slots of those that ended: how many."""
        most, ended = self.options.max_completion_length, 0
        for place in zip(*np.nonzero(self.sequences >= 0), strict=True):
            completion = self.completions[self.sequences[place]]
            made = chunk.tokens[place][: min(steps, most - len(completion.tokens))]
            stops = np.flatnonzero(np.isin(made, self.stream.stop_ids))
            count = int(stops[0]) + 1 if stops.size else made.size
            completion.tokens.extend(made[:count].tolist())
            completion.logprobs.extend(chunk.logprobs[place][:count].tolist())
            if chunk.kept is not None and completion.kept is not None:
                completion.kept.extend(chunk.kept[place][:count].tolist())
            completion.finished = stops.size > 0
            self.work.tokens += count
            if completion.finished or len(completion.tokens) == most:
                self.sequences[place] = -1
                self.work.completions += 1
                ended += 1
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
