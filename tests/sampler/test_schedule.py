"""Sizes of a rollout: which device has which prompts, and for how many of them programs are made."""

from hypothesis import given
from hypothesis import strategies as st

from mllm.sampler.schedule import Usual, assign_prompts


def test_a_rollout_of_more_than_twice_the_usual_size_has_programs_of_its_own_and_shards_share_the_usual_ones():
    usual, own = Usual(2, 8), Usual(17, 17)
    assert (usual.serve(Usual(16, 16), 1), usual.serve(own, 1)) == (usual, own)
    assert (usual.serve(Usual(3, 4), 4), Usual(2, 6).serve(Usual(1, 1), 4)) == (Usual(1, 2), Usual(1, 2))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=20), st.integers(1, 8))
def test_prompts_are_dealt_so_that_every_shard_has_as_many_sequences(groups, shards):
    prompts = [[number] * length for number, (length, count) in enumerate(groups) for _ in range(count)]
    queues = assign_prompts(prompts, shards)
    dealt = [sequence for queue in queues for group in queue for sequence in group]
    assert sorted(dealt) == list(range(len(prompts)))
    loads = [sum(map(len, queue)) for queue in queues]
    assert max(loads) == -(-len(prompts) // shards)
    for queue in queues:
        assert [prompts[first] for first, *_ in queue] == sorted((prompts[first] for first, *_ in queue), key=len)
        assert all(prompts[sequence] == prompts[group[0]] for group in queue for sequence in group)
