"""Sizes of a rollout: the prompts of each device, the tokens of each page, and how full the pools are."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from mllm.config.rollout import RolloutConfig
from mllm.model import weights
from mllm.model.decoder import Decoder
from mllm.model.presets import PRESETS
from mllm.sampler import decoding
from mllm.sampler.completion import RolloutWork
from mllm.sampler.decoding import DecodingWeights, View
from mllm.sampler.paged_cache import PagedCache
from mllm.sampler.pages import PageTable, page_size
from mllm.sampler.schedule import TypicalBatch, assign_prompts, pool_pages
from mllm.sampler.slots import CHUNK, written


def test_a_rollout_of_over_twice_the_usual_size_recompiles():
    """Smaller rollouts, and each shard, share the programs of the usual size."""
    typical, own = TypicalBatch(2, 8), TypicalBatch(17, 17)
    assert (typical.serve(TypicalBatch(16, 16), 1), typical.serve(own, 1)) == (typical, own)
    for usual, rollout in ((typical, TypicalBatch(3, 4)), (TypicalBatch(2, 6), TypicalBatch(1, 1))):
        assert usual.serve(rollout, 4) == TypicalBatch(1, 2)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=20), st.integers(1, 8))
def test_prompts_are_dealt_evenly_to_shards(groups, shards):
    prompts = [[number] * length for number, (length, count) in enumerate(groups) for _ in range(count)]
    queues = assign_prompts(prompts, shards)
    dealt = [sequence for queue in queues for group in queue for sequence in group]
    assert sorted(dealt) == list(range(len(prompts)))
    loads = [sum(map(len, queue)) for queue in queues]
    assert max(loads) == -(-len(prompts) // shards)
    for queue in queues:
        assert [prompts[first] for first, *_ in queue] == sorted((prompts[first] for first, *_ in queue), key=len)
        assert all(prompts[sequence] == prompts[group[0]] for group in queue for sequence in group)


def test_a_window_layer_has_only_the_pages_of_its_windows():
    sizes = Decoder.abstract(weights.read_config(Path(__file__).parent.parent / "fixtures" / "gemma3"))
    options = RolloutConfig(max_prompt_length=100, max_completion_length=900)
    assert page_size(options.total_length) == 64
    assert pool_pages(sizes, options, slots=3) == [3 * 16, 3 * 2]


@given(st.data())
def test_sequences_have_the_pages_of_their_tokens_to_themselves(data):
    """They grow, and others enter and leave, in pools that grow and shrink around what they have."""
    window = data.draw(st.sampled_from([None, 5, 70]))
    table, lengths = PageTable(2, 8, window, slack=4, most=46 if window is None else 10), dict[int, int]()
    for _ in range(data.draw(st.integers(1, 12))):
        grown = data.draw(st.dictionaries(st.integers(0, 5), st.integers(1, 30)))
        lengths = {one: lengths.get(one, 0) + more for one, more in grown.items()}
        wanted = {one: table.numbers(length, 3) for one, length in lengths.items()}
        for one in range(6):
            table.release(one % 2, one, wanted.get(one, range(0)))
        needed = [sum(len(numbers) for one, numbers in wanted.items() if one % 2 == shard) for shard in (0, 1)]
        before = table.owners, table.starts
        sources, kept = table.resize(max(needed) + 1), table.owners >= 0
        for old, new in zip(before, (table.owners, table.starts), strict=True):
            assert not kept.any() or (np.take_along_axis(old, sources, 1)[kept] == new[kept]).all()
        for one, numbers in wanted.items():
            table.reserve(one % 2, {one: numbers})
        sequences = np.array([[0, 2, 4], [5, 3, 1]])
        sequences = np.where(np.isin(sequences, [*lengths]), sequences, -1)
        counts = [[lengths.get(one, 0) for one in row] for row in sequences.tolist()]
        rows = table.of_rows(sequences, np.array(counts))
        for one, length in lengths.items():
            row = {0: 0, 2: 1, 4: 2, 5: 0, 3: 1, 1: 2}[one]
            mine = np.flatnonzero(rows.rows[one % 2] == row)
            tokens = {int(start) + i for start in rows.starts[one % 2, mine] for i in range(8)}
            first = 0 if window is None else max(0, length - window + 1)
            assert {*range(first, length + 3)} <= tokens
            assert len(mine) == len(wanted[one])
            seen = rows.of_row[one % 2, row][rows.of_row[one % 2, row] < table.pages]
            assert {*seen} <= {*mine}
            assert [*rows.starts[one % 2, seen]] == [*range(first // 8 * 8, length, 8)]
            place = table.places(np.array([[one]] * 2), np.array([[length]] * 2), 2)[one % 2, 0]
            assert rows.starts[one % 2, place[0]] == length // 8 * 8


@pytest.mark.parametrize(("platform", "many"), [("cpu", 64), ("cuda", 64), ("default", 64), ("default", 0)])
def test_only_pages_of_a_row_are_merged_on_every_platform(platform, many, monkeypatch):
    monkeypatch.setattr(decoding, "MANY_ROWS", many)
    chosen = lambda x, **ways: ways[platform](x)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    rows, none = np.array([[2, 3, 0, 2, 3, 0], [1, 1, 3, 3, 1, 2]]), 6  # of three rows; 3 is none
    of_row = np.array([[[2, 5, none], [none] * 3, [0, 3, none]], [[none] * 3, [0, 1, 4], [5, none, none]]])
    x = np.random.default_rng(0).normal(size=(2, 6, 2, 4)).astype(np.float32)
    seen = {"pages": jnp.ones((2, 6, 1, 4), bool), "tail": jnp.ones((1, 4), bool)}
    view = View(*map(jnp.asarray, (rows, of_row)), **seen)
    for name, merge, start in (("max", np.max, -np.inf), ("sum", np.sum, 0.0)):
        expected = [[merge(x[s][rows[s] == row], 0, initial=start) for row in range(3)] for s in (0, 1)]
        merged = view.merged(name, jnp.asarray(x), 3)
        np.testing.assert_allclose(merged, np.array(expected), rtol=1e-6)


@pytest.mark.parametrize("platform", ["cuda", "default"])
def test_tokens_are_written_from_an_offset_and_nowhere_else(platform, monkeypatch):
    chosen = lambda x, **ways: ways[platform](x)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    rng = np.random.default_rng(0)
    pool, new = rng.normal(size=(6, 2, 4, 3)), rng.normal(size=(2, 2, 5, 3))
    places, offsets = np.array([[4, 0, 6], [6, 1, 2]]), np.array([2, 3])  # 6 is no page
    expected = pool.copy()
    for row, pages in enumerate(places):
        for token in range(5):
            page, place = divmod(offsets[row] + token, 4)
            if pages[page] < 6:
                expected[pages[page], :, place] = new[row, :, token]
    np.testing.assert_array_equal(written(*map(jnp.array, (pool, new, places, offsets))), np.float32(expected))


class CountedCache(PagedCache):
    """The pages of a cache without the arrays."""

    def resize(self, pages):
        for table, count in zip(self.tables, pages, strict=True):
            if table.pages != count:
                table.resize(count)


@pytest.mark.slow
def test_long_answers_hold_little_beyond_their_cache():
    """Qwen2.5-3B, 320 answers of at most 16,384 tokens; the average is a quarter."""
    rows, limit, token, nbytes = 320, 16384, 36864, 2 * 3_085_938_688
    options = RolloutConfig(max_prompt_length=1024, max_completion_length=limit)
    parameters = DecodingWeights(nnx.State({"all": jax.ShapeDtypeStruct((nbytes,), jnp.int8)}), {})
    cache = CountedCache(Decoder.abstract(PRESETS["Qwen/Qwen2.5-3B"]), options, parameters, rows, None)
    rng, work, largest, most = np.random.default_rng(0), RolloutWork(), 0, 0
    lengths, prompts = np.minimum(rng.geometric(4 / limit, rows), limit), rng.integers(256, 512, rows)
    for made in range(0, lengths.max(), CHUNK):
        live = np.flatnonzero(lengths > made).tolist()
        for one in np.flatnonzero((lengths <= made) & (lengths > made - CHUNK)).tolist():
            cache.release(0, one)
        cache.fit_pages([{one: (int(prompts[one]) + made - 1, CHUNK) for one in live}], rows)
        now = int(prompts[live].sum()) + made * len(live)
        work.steps, work.read, work.held = work.steps + 1, work.read + cache.places, work.held + now
        largest, most = max(largest, cache.places), max(most, now)
        work.programs.add((rows, *cache.pages))
    assert work.bytes_over_least(nbytes, token) < 1.2
    assert largest < 1.2 * most
    assert len(work.programs) <= 6
