"""SFT's source reads one batch ahead; and the length that rows are padded to."""

import pytest

from mllm.config.data import DataConfig
from mllm.data import pipeline as data
from mllm.data.batch import padded_length
from mllm.data.documents import TaskDocuments
from mllm.data.sft_source import SftSource
from mllm.data.tasks.task import Example, Task
from mllm.model.tokenizer import bytes_tokenizer
from mllm.stopwatch import Stopwatch


def test_the_last_batch_is_marked_as_the_last():
    problems = [Example([{"role": "user", "content": f"{i}"}], "x", "x") for i in range(8)]
    settings = DataConfig(source="task", max_length=8, packing=False, epochs=1)
    documents = TaskDocuments(Task("eight", problems, []), bytes_tokenizer(), 8)
    source = SftSource(data.sft_batches(settings, documents, batch_size=2, seed=0))
    assert [source.next(None, step, Stopwatch()).last for step in range(4)] == [False, False, False, True]
    with pytest.raises(StopIteration):
        source.next(None, 4, Stopwatch())


@pytest.mark.parametrize(
    ("length", "longest", "padded"),
    [*((n, 2048, m) for n, m in ((1, 16), (16, 16), (17, 24), (25, 32), (33, 48), (1025, 1536))), (1100, 1200, 1200)],
)
def test_rows_are_padded_to_a_power_of_two_or_half_as_much_again_but_not_beyond_the_longest(length, longest, padded):
    assert padded_length(length, longest) == padded
