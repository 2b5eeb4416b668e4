"""A rollout's cache: pools of pages on the devices, which grow and shrink, their tables, and states."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int

from mllm.config.rollout import RolloutConfig
from mllm.data.batch import bucket
from mllm.model.decoder import Decoder
from mllm.sampler.decoding import Cache, DecodingWeights, LayerCache, Pages, abstract_cache
from mllm.sampler.pages import PageTable, page_size
from mllm.sampler.schedule import PIECE, WIDTHS, pool_pages
from mllm.sampler.slots import CHUNK, Prefilled, add_tail, empty_cache, extend, insert, on_devices, resize
from mllm.sampler.states import SlotStates

POOLS = sorted(size * 2**power for power in range(20) for size in (16, 22))
"""The pages of pools, so few that few programs are compiled; each is at least 0.68 of the next."""
SHORT = 8
"""The pages of sequences that are short."""
Span = tuple[int, int]
"""(tokens of a sequence in pages, further tokens that need a place)."""


class PagedCache:
    """The cache of all layers. Numbers of pages count one shard's; arrays [X, ...] have all shards."""

    def __init__(
        self, model: Decoder, options: RolloutConfig, weights: DecodingWeights, slots: int, tokens: int | None
    ) -> None:
        """A cache without pages, for at most `tokens` a shard; None: as many as all slots have at their limit."""
        self.model, self.options, self.layout = model, options, model.layout
        self.shards = 1 if self.layout is None else self.layout.row_shards
        self.page = page_size(options.total_length)
        self.limits = pool_pages(model, options, slots, tokens)
        """The most pages of each kind of layers."""
        # A program more costs more than pages that are empty.
        self.short = max(self.limits) <= SHORT * slots
        slack = 2 * CHUNK  # the chunk with the end of a stop text is taken back
        kinds = zip(model.config.kinds, pool_pages(model, options, slots=1), strict=True)
        self.tables = [PageTable(self.shards, self.page, kind.window, slack, most) for kind, most in kinds]
        self.layers: list[LayerCache] = []
        self.states = SlotStates(model)
        # A pool of less than a sixteenth of the weights' bytes saves little, and is a program more.
        shapes = abstract_cache(model, [self.shards * (kind.window is None) for kind in model.config.kinds], self.page)
        page = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) // self.shards
        self.weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))
        """The bytes of the weights."""
        self.least = self.weights // 16 // page if page else 0

    @property
    def pages(self) -> list[int]:
        """The pages of each kind of layers."""
        return [table.pages for table in self.tables]

    @property
    def places(self) -> int:
        """The number of places for tokens, in layers without a window."""
        return self.page * max(self.pages)

    def needed(self, *spans: Span) -> Int[np.ndarray, " kinds"]:
        """The pages of each kind that sequences of these spans need together."""
        return np.array([table.needed(spans) for table in self.tables])

    def lacks(self, needed: Int[np.ndarray, " kinds"], growing: int = 0) -> bool:
        """Whether a shard may not have so many pages, and one more for each of so many sequences that may need it."""
        grown = np.minimum(needed + growing, pool_pages(self.model, self.options, growing))
        return bool((np.maximum(needed, grown) > self.limits).any())

    def fit_pages(self, spans: Sequence[Mapping[int, Span]], rows: int) -> None:
        """Give each shard's sequences the pages that their spans need, in pools for so many rows."""
        for table in self.tables:
            for shard, shard_spans in enumerate(spans):
                for sequence, span in shard_spans.items():
                    table.release(shard, sequence, table.numbers(*span))
        needed = [max(table.needed(shard_spans.values()) for shard_spans in spans) for table in self.tables]
        self.resize(self.pages_for(needed, rows))
        for table in self.tables:
            for shard, shard_spans in enumerate(spans):
                table.reserve(shard, {sequence: table.numbers(*span) for sequence, span in shard_spans.items()})

    def pages_for(self, needed: Sequence[int], rows: int) -> list[int]:
        """The pages of each kind's pool, where so many are needed; few numbers occur."""
        if self.short:
            return self.limits
        most = pool_pages(self.model, self.options, rows)
        wanted = min(max(self.limits), bucket(max(rows, self.least, *needed), POOLS))
        windows = zip(self.tables, most, needed, strict=True)
        return [wanted if table.window is None else min(wanted, max(of_rows, need)) for table, of_rows, need in windows]

    def resize(self, pages: Sequence[int]) -> None:
        """Have so many pages of each kind, at least the pages in use."""
        if self.pages == list(pages):
            return
        sources = [on_devices(self.layout, table.resize(n)) for table, n in zip(self.tables, pages, strict=True)]
        if not self.layers:
            self.layers = [*empty_cache(self.model, [self.shards * n for n in pages], self.page)]
            return
        for index, kind in enumerate(self.model.config.kind_of_layer):  # one at a time: no second cache is held
            self.layers[index] = resize(self.layers[index], sources[kind], layout=self.layout)

    def release(self, shard: int, sequence: int) -> None:
        """Take the sequence's pages back."""
        for table in self.tables:
            table.release(shard, sequence)

    def insert(self, batch: Prefilled, sources: Int[np.ndarray, "X M"], sequences: Int[np.ndarray, "X M"]) -> None:
        """Copy the prompts in the rows `sources` of the batch into the pages of these sequences, and their states.

        -1 is none.
        """
        count = -(-batch.cache[0].keys.shape[2] // self.page)
        none = np.zeros_like(sequences)
        placed = [on_devices(self.layout, (sources, x.places(sequences, none, count))) for x in self.tables]
        for index, (prompts, kind) in enumerate(zip(batch.cache, self.model.config.kind_of_layer, strict=True)):
            self.layers[index] = insert(self.layers[index], prompts, *placed[kind], layout=self.layout)
        self.states.insert(batch.states, sources, sequences)

    def extend(
        self,
        graphdef: nnx.GraphDef,
        weights: DecodingWeights,
        sequences: Int[np.ndarray, "X M"],
        contexts: Mapping[int, Sequence[int]],
        cached: Mapping[int, int],
    ) -> int:
        """Prefill further tokens of the sequences after their cached tokens; returns the number of tokens computed."""
        width = min(PIECE, bucket(longest := max(map(len, contexts.values())), WIDTHS))
        computed = 0
        for start in range(0, longest, width):
            tokens = np.zeros((*sequences.shape, width), np.int32)
            lengths, counts = np.zeros((2, *sequences.shape), np.int32)
            for row in zip(*np.nonzero(sequences >= 0), strict=True):
                piece = contexts[sequences[row]][start : start + width]
                tokens[row][: len(piece)], counts[row] = piece, len(piece)
                lengths[row] = cached[sequences[row]] + start
            views, slots = self.views(sequences, lengths, width), self.states.slots_of(sequences)
            inputs = on_devices(self.layout, (*views, slots, tokens, lengths, counts))
            updated = extend(graphdef, weights, tuple(self.layers), tuple(self.states.layers), *inputs)
            self.layers, self.states.layers = map(list, updated)
            computed += tokens.size
        return computed

    def add_tail(self, tail: Cache, places: tuple[Int[Any, "B S"], ...], lengths: Int[Any, "B"]) -> None:
        """Write the tails of slots to these pages, behind the slots' first `lengths` tokens."""
        kinds = self.model.config.kind_of_layer
        self.layers = [*add_tail(tuple(self.layers), tail, places, lengths, kinds=kinds, layout=self.layout)]

    def views(
        self, sequences: Int[np.ndarray, "X M"], lengths: Int[np.ndarray, "X M"], tokens: int
    ) -> tuple[tuple[Pages, ...], tuple[Int[np.ndarray, "X M S"], ...]]:
        """The pages' contents for the rows' sequences, and the pages for the given numbers of further tokens."""
        count = (tokens - 2) // self.page + 2
        rows = tuple(table.of_rows(sequences, lengths) for table in self.tables)
        return rows, tuple(table.places(sequences, lengths, count) for table in self.tables)
