"""Documents apart from their sizes: a process reads only its own, and a share of them is held out."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from test_data import BYTES, some, write

from mllm.config.data import DataConfig
from mllm.data.documents import Documents, hold_out
from mllm.data.pipeline import count_batches, sft_batches, validation_batches
from mllm.data.sft_source import load_documents
from mllm.errors import UserError


class Counted(Documents):
    """Documents that note which of them are read."""

    def __init__(self, documents):
        self.documents = documents
        self.given = []

    def __len__(self):
        return len(self.documents)

    def size(self, index):
        return self.documents.size(index)

    def read(self, indices):
        self.given += indices
        return self.documents.read(indices)


@pytest.mark.parametrize("packing", [False, True])
def test_a_process_reads_only_the_documents_of_its_own_rows(tmp_path, packing):
    settings = DataConfig(source=write(tmp_path, some(60)), max_length=48, packing=packing, epochs=1)
    documents, _ = load_documents(settings, BYTES, None)
    shares, given = [Counted(documents) for _ in range(2)], []
    for index, share in enumerate(shares):
        read = sft_batches(settings, share, batch_size=4, seed=0, process_index=index, process_count=2)
        given.append(sum(int(batch.segments.max(axis=1).sum()) for batch in read))
    assert [len({*share.given}) for share in shares] == given  # the first batch is made twice
    assert {*shares[0].given}.isdisjoint(shares[1].given)
    assert sum(given) > 50


def test_validation_holds_every_document_once_and_pads_the_last_batch(tmp_path):
    settings = DataConfig(source=write(tmp_path, some(30)), max_length=32)
    documents, _ = load_documents(settings, BYTES, None)
    places = [{"process_index": i, "process_count": 2} for i in range(2)]
    shares = [list(validation_batches(settings, documents, batch_size=4, **place)) for place in places]
    assert {batch.tokens.shape[0] for share in shares for batch in share} == {2}
    assert len(shares[0]) == len(shares[1]) > 2
    assert not all(batch.segments.any(axis=1).all() for share in shares for batch in share)
    tokens = np.concatenate([b.tokens[b.segments > 0] for share in shares for b in share])
    assert sorted(tokens) == sorted(np.concatenate([documents[i][:, 0] for i in range(30)]))


def test_a_split_of_a_hub_s_data_set_is_cached_by_its_files_and_read_without_nulls(tmp_path, monkeypatch):
    """`datasets` gives rows in which every column has a value or None, and names the files that hold them."""
    loaded = []

    class Split(list):
        def __init__(self, split):
            if not (tmp_path / split).exists():
                (tmp_path / split).write_text(split)
            super().__init__({"text": f"{split} {i}", "messages": None} for i in range(3))
            self.cache_files = [{"filename": str(tmp_path / split)}]

    def load_dataset(source, subset, split):
        loaded.append((source, subset, split))
        return Split(split)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    data = DataConfig(source="user/set", subset="main", max_length=32, validation={"split": "test"})
    for _ in range(2):
        training, heldout = load_documents(data, BYTES, None)
        assert bytes(training[1][:-1, 0].astype(np.uint8)) == b"train 1"
        assert bytes(heldout[2][:-1, 0].astype(np.uint8)) == b"test 2"
    read_again = [("user/set", "main", split) for split in ("train", "test")]
    assert sorted(loaded) == sorted(read_again * 4)  # thrice for the files, once for the rows


def test_a_share_is_held_out_by_a_fixed_permutation(tmp_path):
    settings = DataConfig(source=write(tmp_path, some(40)), max_length=32)
    documents, _ = load_documents(settings, BYTES, None)
    training, heldout = hold_out(documents, 0.2)
    numbers = [[bytes(d[i][:, 0].astype(np.uint8)) for i in range(len(d))] for d in (training, heldout, documents)]
    assert (len(numbers[0]), len(numbers[1])) == (32, 8)
    assert sorted(numbers[0] + numbers[1]) == sorted(numbers[2])
    assert numbers[1] != numbers[2][:8]
    assert [training.size(i).tokens for i in range(32)] == [len(text) for text in numbers[0]]
    with pytest.raises(UserError, match=r"data.validation.share: 0.99 of 40 examples leaves none to train on"):
        hold_out(documents, 0.99)


@pytest.mark.parametrize("settings", [{}, {"packing": False}, {"shuffle": False}, {"epochs": 3}, {"max_length": 32}])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_batches_are_counted_from_sizes_alone_and_examples_that_fill_none_too(tmp_path, settings, batch_size, caplog):
    data = DataConfig(**{"source": write(tmp_path, some(41)), "max_length": 64, "epochs": 1, **settings})
    documents = Counted(load_documents(data, BYTES, None)[0])
    examples = [
        int(batch.segments.max(1).sum()) for batch in sft_batches(data, documents, batch_size=batch_size, seed=3)
    ]
    expected, left = len(examples), 41 * data.epochs - sum(examples)
    documents.given.clear()
    for most in (expected - 1, expected, expected + 1, 10**6):
        counted = count_batches(data, documents, batch_size=batch_size, seed=3, most=most)
        assert counted == min(expected, most)
    assert documents.given == []
    assert (f"the last {left} examples do not fill a batch" in caplog.text) == (left > 0)


def test_without_epochs_the_data_never_ends_and_enough_tokens_need_no_counting(tmp_path):
    class Enough(Counted):
        def size(self, index):
            raise AssertionError

        def tokens(self):
            return 11 * 2 * 32

    source = write(tmp_path, some(9))
    documents = Enough(load_documents(DataConfig(source=source, max_length=32), BYTES, None)[0])
    for epochs in (None, 1):
        data = DataConfig(source=source, max_length=32, epochs=epochs)
        assert count_batches(data, documents, batch_size=2, seed=0, most=10) == 10
