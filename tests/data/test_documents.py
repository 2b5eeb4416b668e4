"""Documents apart from their sizes: a process reads only its own, and a share of them is held out."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_data import BYTES, some, write

from mllm.config.data import DataConfig
from mllm.data.sft_source import SftBatches, hold_out, load_documents
from mllm.data.tasks.task import OnDemand
from mllm.data.tokenizing import Documents
from mllm.errors import UserError
from mllm.parallel.processes import RowShare

SHARES = [RowShare(index, 2) for index in range(2)]


def counted(documents):
    """The documents, and a list of those that are read."""
    given = []
    return replace(documents, read=lambda indices: given.extend(indices) or documents.read(indices)), given


def read_all(documents):
    return [bytes(document.tokens.astype(np.uint8)) for document in documents.read(range(len(documents)))]


@pytest.mark.parametrize("packing", [False, True])
def test_a_process_reads_only_the_documents_of_its_own_rows(tmp_path, packing):
    settings = DataConfig(source=write(tmp_path, some(60)), max_length=48, packing=packing, epochs=1)
    documents, _ = load_documents(settings, BYTES, None)
    read = []
    for share in SHARES:
        noted, given = counted(documents)
        batches = list(SftBatches(settings, noted, 4, share=share).train())
        assert len({*given}) == sum(int(batch.segments.max(axis=1).sum()) for batch in batches)
        read.append({*given})
    assert read[0].isdisjoint(read[1])
    assert len(read[0] | read[1]) > 50


def test_validation_holds_every_document_once_and_pads_the_last_batch(tmp_path):
    settings = DataConfig(source=write(tmp_path, some(30)), max_length=32)
    documents, _ = load_documents(settings, BYTES, None)
    shares = [list(SftBatches(settings, documents, 4, share=share).validate()) for share in SHARES]
    assert {batch.tokens.shape[0] for share in shares for batch in share} == {2}
    assert len(shares[0]) == len(shares[1]) > 2
    assert not all(batch.segments.any(axis=1).all() for share in shares for batch in share)
    tokens = np.concatenate([b.tokens[b.segments > 0] for share in shares for b in share])
    assert sorted(tokens) == sorted(np.concatenate([document.tokens for document in documents.read(range(30))]))


def test_a_split_of_a_hub_s_data_set_is_cached_by_its_files_and_read_without_nulls(tmp_path, monkeypatch):
    """`datasets` gives rows in which every column has a value or None, and names the files that hold them."""
    loaded = []

    class Split(list):
        cache_files = ({"filename": write(tmp_path, ["a"])},)

    def load_dataset(source, subset, split):
        loaded.append((source, subset, split))
        return Split({"text": f"{split} {i}", "messages": None} for i in range(3))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    data = DataConfig(source="user/set", subset="main", max_length=32, validation={"split": "test"})
    for _ in range(2):
        training, heldout = load_documents(data, BYTES, None)
        assert (read_all(training)[1][:-1], read_all(heldout)[2][:-1]) == (b"train 1", b"test 2")
    read_again = [("user/set", "main", split) for split in ("train", "test")]
    assert sorted(loaded) == sorted(read_again * 4)  # thrice for the files, once for the rows


def test_a_share_is_held_out_by_a_fixed_permutation(tmp_path):
    settings = DataConfig(source=write(tmp_path, some(40)), max_length=32)
    documents, _ = load_documents(settings, BYTES, None)
    training, heldout = hold_out(documents, 0.2)
    trained, held, everything = map(read_all, (training, heldout, documents))
    assert (len(trained), len(held)) == (32, 8)
    assert sorted(trained + held) == sorted(everything)
    assert held != everything[:8]
    assert [tokens for tokens, _ in training.sizes] == [len(text) for text in trained]
    with pytest.raises(UserError, match=r"data.validation.share: 0.99 of 40 examples leaves none to train on"):
        hold_out(documents, 0.99)


@pytest.mark.parametrize(
    ("settings", "batch_size"),
    [({}, 1), ({}, 7), ({"packing": False}, 7), ({"shuffle": False}, 3), ({"epochs": 3, "max_length": 32}, 7)],
)
def test_batches_are_counted_from_sizes_alone_and_examples_that_fill_none_too(tmp_path, settings, batch_size, caplog):
    data = DataConfig(**{"source": write(tmp_path, some(41)), "max_length": 64, "epochs": 1, **settings})
    documents, given = counted(load_documents(data, BYTES, None)[0])
    batches = SftBatches(data, documents, batch_size, seed=3)
    examples = [int(batch.segments.max(1).sum()) for batch in batches.train()]
    expected, left = len(examples), 41 * data.epochs - sum(examples)
    given.clear()
    assert SftBatches(data.model_copy(update={"epochs": None}), documents, batch_size).count(10**9) == 10**9
    for most in (expected - 1, expected, expected + 1, 10**6):
        assert batches.count(most) == min(expected, most)
    assert given == []
    assert (f"the last {left} examples do not fill a batch" in caplog.text) == (left > 0)


def test_steps_that_the_examples_surely_fill_are_not_planned():
    documents = Documents(OnDemand(lambda index: pytest.fail("a document was made"), range(100)), lambda indices: [])
    assert SftBatches(DataConfig(source="task", epochs=1, max_length=8), documents, 1).count(11) == 11
