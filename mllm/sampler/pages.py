"""The pages of a pool by sequence and tokens: the host's side of the cache, the same in all processes.

Each kind of layers has a table: a kind with a window frees pages that no later token sees.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int

from mllm.sampler.decoding import Pages

FREE = -1


class PageTable:
    """The pages of one kind of layers, numbered from 0 on each shard; `size` is the number of tokens in a page."""

    def __init__(self, shards: int, size: int, window: int | None, slack: int, most: int) -> None:
        """A window's pages are kept until `slack` more tokens have followed; a token sees at most `most` pages."""
        self.size, self.window, self.slack, self.most = size, window, slack, most
        self.owners: Int[np.ndarray, "X P"] = np.full((shards, 0), FREE)
        """The sequence that a page belongs to."""
        self.starts: Int[np.ndarray, "X P"] = np.zeros((shards, 0), np.int64)
        self.pages_of: dict[int, dict[int, int]] = {}
        """Each sequence's pages, by the number of the page in the sequence."""

    @property
    def pages(self) -> int:
        """The pages of a shard."""
        return self.owners.shape[1]

    def numbers(self, length: int, ahead: int) -> range:
        """The numbers of the pages that a sequence of so many tokens needs, with so many ahead."""
        first = 0 if self.window is None else max(0, length + 1 - self.window - self.slack) // self.size
        return range(first, -(-(length + ahead) // self.size))

    def needed(self, spans: Iterable[tuple[int, int]]) -> int:
        """The pages that sequences need, by their arguments of `numbers`."""
        return sum(len(self.numbers(*span)) for span in spans)

    def reserve(self, shard: int, wanted: Mapping[int, range]) -> None:
        """Give sequences their pages of these numbers; the pool must have enough of them."""
        free = iter(np.flatnonzero(self.owners[shard] == FREE).tolist())
        for sequence, numbers in wanted.items():
            page_of = self.pages_of.setdefault(sequence, {})
            for number in numbers:
                if number not in page_of:
                    page_of[number] = page = next(free)
                    self.owners[shard, page], self.starts[shard, page] = sequence, number * self.size

    def release(self, shard: int, sequence: int, wanted: range = range(0)) -> None:
        """Free the sequence's pages, except the pages `wanted`."""
        page_of = self.pages_of.setdefault(sequence, {})
        for number in [number for number in page_of if number not in wanted]:
            self.owners[shard, page_of.pop(number)] = FREE

    def resize(self, pages: int) -> Int[np.ndarray, "X P"]:
        """Set the number of pages of each shard, at least the used ones; returns each page's old number, or 0."""
        sources = np.zeros((len(self.owners), pages), np.int64)
        owners, starts = np.full_like(sources, FREE), np.zeros_like(sources)
        for shard, used in enumerate(self.owners != FREE):
            kept = np.flatnonzero(used)
            sources[shard, : kept.size] = kept
            owners[shard, : kept.size], starts[shard, : kept.size] = self.owners[shard, kept], self.starts[shard, kept]
        self.owners, self.starts = owners, starts
        for shard, page in zip(*np.nonzero(owners != FREE), strict=True):
            self.pages_of[owners[shard, page]][starts[shard, page] // self.size] = int(page)
        return sources

    def of_rows(self, sequences: Int[np.ndarray, "X B"], lengths: Int[np.ndarray, "X B"]) -> Pages:
        """The pages' contents if the shards' rows have `lengths` tokens of `sequences`, [X, ...]; -1 for none."""
        rows, of_row = np.full_like(self.owners, FREE), np.full((*sequences.shape, self.most), self.pages)
        for shard, row in enumerate(sequences):
            row_of = {sequence: index for index, sequence in enumerate(row.tolist()) if sequence >= 0}
            rows[shard] = [row_of.get(owner, FREE) for owner in self.owners[shard].tolist()]
            for sequence, index in row_of.items():
                length, page_of = int(lengths[shard, index]), self.pages_of[sequence]
                first = 0 if self.window is None else max(0, length + 1 - self.window)
                seen = [page_of[number] for number in range(first // self.size, -(-length // self.size))]
                of_row[shard, index, : len(seen)] = seen
        return Pages(rows, self.starts, of_row)

    def places(
        self, sequences: Int[np.ndarray, "X M"], lengths: Int[np.ndarray, "X M"], count: int
    ) -> Int[np.ndarray, "X M S"]:
        """The pages of each row's tokens from its length on, `count` of them; the number of pages stands for none."""
        pages = np.full((*sequences.shape, count), self.pages)
        for row in zip(*np.nonzero(sequences >= 0), strict=True):
            sequence = int(sequences[row])
            first, page_of = int(lengths[row]) // self.size, self.pages_of[sequence]
            pages[row] = [page_of.get(number, self.pages) for number in range(first, first + count)]
        return pages


def page_size(longest: int) -> int:
    """The tokens of a page, where sequences have at most so many: 32 to 256, about a sixteenth of them.

    Half a page a sequence is wasted; smaller pages leave more softmaxes to merge.
    """
    return min(256, max(32, 1 << (longest // 16 - 1).bit_length()))
