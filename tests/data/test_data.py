"""Batches contain the examples as they are, never mix two of them, and continue exactly from a position."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import grain
import numpy as np
import pytest
from tiny import config, forward_of

from mllm.algorithms.documents import hold_out, load_documents, task_documents
from mllm.algorithms.sft.algorithm import DocumentBatches, document_source
from mllm.config.data import DataConfig
from mllm.config.task import TaskConfig
from mllm.data.batch import Batch
from mllm.data.dataset import mixed_order, training_order
from mllm.data.source import FrozenModels
from mllm.data.tasks.load import load as load_task
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel.mesh import make_mesh
from mllm.parallel.processes import RowShare
from mllm.stopwatch import Stopwatch
from mllm.training.recipe import Parts
from mllm.training.step import NONE_FROZEN

BYTES = bytes_tokenizer()
START, END = BYTES.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
SHARES = [RowShare(index, 2) for index in range(2)]
ARITHMETIC = load_task(TaskConfig(name="arithmetic", heldout=32))


def write(folder, records, name="data.jsonl"):
    path = folder / name
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records), encoding="utf-8")
    return str(path)


def qa(question, answer):
    return {"question": question, "answer": answer}


def some(count):
    return [qa(f"q{i}", "a" * (1 + i * 7 % 11)) for i in range(count)]


def batches_of(source, *, batch_size=4, seed=0, **settings):
    config = DataConfig(**{"source": source, "max_length": 32, **settings})
    documents, _ = load_documents(config, Renderer(BYTES), ARITHMETIC)
    return DocumentBatches(config, documents, batch_size, seed).train()


def documents(batch):
    return [
        tokens[segments == segment].tolist()
        for tokens, segments in zip(batch.tokens, batch.segments, strict=True)
        for segment in range(1, segments.max() + 1)
    ]


def questions(batch):
    return [bytes(tokens[1 : tokens.index(END)]).decode() for tokens in documents(batch)]


def assert_same(first, second):
    for one, other in zip(first[:5], second[:5], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_row_is_laid_out_as_the_contract_says(tmp_path):
    source = write(tmp_path, [qa("ab", "c")])
    batch = next(batches_of(source, batch_size=1, max_length=8, shuffle=False, packing=False))
    a, b, c = b"abc"
    np.testing.assert_array_equal(batch.tokens, [[START, a, b, END, START, c, END, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 5, 6, 0]])
    np.testing.assert_array_equal(batch.segments, [[1, 1, 1, 1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.labels, [[0, 0, 0, 0, c, END, 0, 0]])
    np.testing.assert_array_equal(batch.weights, [[0, 0, 0, 0, 0.5, 0.5, 0, 0]])
    assert [field.dtype for field in batch[:5]] == [np.int32] * 4 + [np.float32]
    assert set(batch[5:]) == {None}


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_has_each_example_once_and_uncut(tmp_path, packing):
    """Only the examples of a last batch that is not full are left out."""
    examples = some(47)
    read = list(batches_of(write(tmp_path, examples), batch_size=3, epochs=1, packing=packing))
    whole = {q["question"]: [START, *q["question"].encode(), END, START, *q["answer"].encode(), END] for q in examples}
    seen = [question for batch in read for question in questions(batch)]
    assert len(set(seen)) == len(seen)
    assert all(tokens == whole[q] for b in read for q, tokens in zip(questions(b), documents(b), strict=True))
    assert len(seen) == 45 if not packing else len(seen) > 40
    assert not packing or np.mean([batch.segments > 0 for batch in read]) > 0.8
    for batch in read:
        np.testing.assert_allclose(batch.weights[batch.weights > 0], 1 / (batch.weights > 0).sum(), rtol=1e-6)


def test_plain_grain_reads_the_cache_and_resumes_its_position(tmp_path):
    source, cache = write(tmp_path, some(23)), tmp_path / "cache"
    read = batches_of(source, packing=False, seed=5, cache=str(cache))
    for _ in range(9):
        next(read)
    state = json.loads(json.dumps(read.get_state()))
    assert state["grain"] == {"next_index": 36}
    records = grain.sources.ArrayRecordDataSource([str(path) for path in cache.glob("*.arrayrecord")])
    plain = iter(grain.MapDataset.source(records).seed(5).shuffle().repeat().to_iter_dataset())
    plain.set_state(state["grain"])
    stored = [np.frombuffer(next(plain), np.int32) for _ in range(12)]
    expected = [tokens for _ in range(3) for tokens in documents(next(read))]
    assert [np.where(signed < 0, ~signed, signed).tolist() for signed in stored] == expected


def test_a_position_in_other_data_or_past_the_end_is_refused(tmp_path):
    read = batches_of(write(tmp_path, some(8)), packing=False)
    with pytest.raises(UserError, match=r"began with other examples: .* \(8 then, 9 now\)"):
        batches_of(write(tmp_path, some(9))).set_state(read.get_state())
    with pytest.raises(UserError, match=r"data: the run began with another order of them: install"):
        batches_of(write(tmp_path, some(8)), seed=1).set_state(read.get_state())
    state = {**read.get_state(), "grain": {"next_index": 9}}
    with pytest.raises(UserError, match=r"data.epochs: 1: the run has gone through more of its data: raise it"):
        batches_of(write(tmp_path, some(8)), epochs=1).set_state(state)


def test_cut_and_left_out_examples_are_counted(tmp_path, caplog):
    examples = [qa("a" * 40, "b"), qa("ab", "c" * 50), qa("good", "b"), qa("a" * 40, "b")]
    read = batches_of(write(tmp_path, examples), batch_size=2, packing=False, shuffle=False)
    cut, whole = documents(next(read))
    assert cut == [START, *b"ab", END, START, *b"c" * 27]
    assert whole == [START, *b"good", END, START, *b"b", END]
    assert (read.examples, "1 examples were cut" in caplog.text) == (2, True)
    assert "2 examples were left out: none of the tokens to learn lies within data.max_length (32)" in caplog.text


def test_sft_from_a_task_learns_its_solutions_alone():
    batch = next(batches_of("task", packing=False))
    for question, tokens in zip(questions(batch), documents(batch), strict=True):
        assert tokens[-len(str(eval(question[:-1]))) - 1 :] == [*str(eval(question[:-1])).encode(), END]
    prompt = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "2"), ("user", "b"))]
    shots = [Example(prompt, answer, answer) for answer in ("4", "44", "4")]
    made = task_documents(Task("shots", shots, []), Renderer(BYTES), 64)
    document, other, again = made.read([0, 1, 2])
    assert made.sizes.tolist() == [[len(one.tokens), one.counts.sum()] for one in (document, other, again)]
    assert made.hashes[0] == made.hashes[2] != made.hashes[1]
    assert bytes(document.tokens[document.counts].tolist()[:-1]) == b"4"  # not the answers in the prompt
    with pytest.raises(UserError, match=r"data:7 has no solution"):
        task_documents(Task("judged", [Example(prompt, "", None, place="data:7")], []), Renderer(BYTES), 9)


def counted(documents):
    """The documents, and a list of the documents that are read."""
    given = []
    return replace(documents, read=lambda indices: given.extend(indices) or documents.read(indices)), given


def read_all(documents):
    return [bytes(document.tokens.astype(np.uint8)) for document in documents.read(range(len(documents)))]


@pytest.mark.parametrize("packing", [False, True])
def test_processes_split_the_batch_and_read_only_their_part(tmp_path, packing):
    settings = DataConfig(source=write(tmp_path, some(60)), max_length=48, packing=packing, epochs=1)
    whole, _ = load_documents(settings, Renderer(BYTES), None)
    noted = [counted(whole) for _ in SHARES]
    parts = (DocumentBatches(settings, noted[share.index][0], 4, share=share).train() for share in SHARES)
    sizes = np.zeros(2, int)
    for batch, *own in zip(DocumentBatches(settings, whole, 4).train(), *parts, strict=True):
        assert_same(Batch(*(np.concatenate(pair) for pair in zip(*(part[:5] for part in own), strict=True))), batch)
        sizes += [len(documents(part)) for part in own]
    read = [{*given} for _, given in noted]
    assert [len(indices) for indices in read] == sizes.tolist()
    assert read[0].isdisjoint(read[1])
    assert len(read[0] | read[1]) > 50


def test_a_hub_split_is_read_without_nulls_also_in_a_mix(tmp_path, monkeypatch):
    """`datasets` gives rows with a value or None in every column, and names the files that hold the rows."""
    loaded = []

    class Split(list):
        cache_files = ({"filename": write(tmp_path, ["a"])},)

    def load_dataset(source, subset, split):
        loaded.append((source, subset, split))
        return Split({"text": f"{split} {i}", "messages": None} for i in range(3))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    one = {"source": "user/set", "subset": "main"}
    for source in (one, {"source": [one] * 2}):
        data = DataConfig(**source, max_length=32, validation={"split": "test"})
        training, heldout = load_documents(data, Renderer(BYTES), None)
        assert (read_all(training)[1][:-1], read_all(heldout)[2][:-1]) == (b"train 1", b"test 2")
        assert {*loaded} == {("user/set", "main", split) for split in ("train", "test")}
        loaded.clear()


def test_a_share_is_held_out_by_a_fixed_permutation(tmp_path):
    """Equal examples fall on the same side."""
    settings = DataConfig(source=write(tmp_path, some(40)), max_length=32)
    documents, _ = load_documents(settings, Renderer(BYTES), None)
    (training,), (heldout,) = hold_out([documents], 0.2)
    trained, heldout_rows, everything = map(read_all, (training, heldout, documents))
    assert (len(heldout_rows), sorted(trained + heldout_rows)) == (8, sorted(everything))
    assert heldout_rows != everything[:8]
    assert [tokens for tokens, _ in training.sizes] == [len(text) for text in trained]
    assert len({part.content for part in (documents, training, heldout)}) == 3
    repeated = DataConfig(source=write(tmp_path, some(40) * 2, "twice.jsonl"), max_length=32)
    twice, _ = load_documents(repeated, Renderer(BYTES), None)
    (trained,), (heldout_part,) = hold_out([twice], 0.2)
    assert len(heldout_part) == 16
    assert {*read_all(trained)}.isdisjoint(read_all(heldout_part))
    with pytest.raises(UserError, match=r"data.validation.share: 0.99 of 40 examples leaves none to train on"):
        hold_out([documents], 0.99)


def test_a_share_of_a_mix_repeats_nothing_of_another_source(tmp_path):
    names = [write(tmp_path, records, f"{i}.jsonl") for i, records in enumerate([some(40), some(50)[::-1]])]
    settings = DataConfig(source=names, max_length=32, validation={"share": 0.1})
    training, heldout = load_documents(settings, Renderer(BYTES), None)
    assert {*read_all(training)}.isdisjoint(read_all(heldout))
    assert sum(map(len, (training, heldout))) == 90


@pytest.mark.parametrize(("once", "heldout"), [(3, 2), (0, None)])
def test_an_example_of_more_than_a_share_is_trained_on(once, heldout, tmp_path):
    settings = DataConfig(source=write(tmp_path, [*some(1) * 20, *some(4)[1 : once + 1]]), max_length=32)
    documents, _ = load_documents(settings, Renderer(BYTES), None)
    if heldout:
        assert len(hold_out([documents], 0.1)[1][0]) == heldout
    else:
        with pytest.raises(UserError, match="leaves none to train on"):
            hold_out([documents], 0.1)


def test_validation_that_repeats_training_examples_warns(tmp_path, caplog):
    other = write(tmp_path, [*some(3), qa("new", "b")], "other.jsonl")
    settings = DataConfig(source=write(tmp_path, some(40)), max_length=32, validation={"source": other})
    load_documents(settings, Renderer(BYTES), None)
    assert "data.validation.source: 3 of 4 examples are also trained on" in caplog.text
    problems = [Example([{"role": "user", "content": f"q{i}"}], None, solution="a") for i in range(2)]
    load_documents(settings.model_copy(update={"source": "task"}), Renderer(BYTES), Task("", problems, []))
    assert "data.validation.source: 1 of 4 examples are also trained on" in caplog.text


@pytest.mark.parametrize(
    ("settings", "batch_size"),
    [({}, 1), ({}, 7), ({"packing": False}, 7), ({"shuffle": False}, 3), ({"epochs": 3, "max_length": 32}, 7)],
)
def test_batches_are_counted_from_sizes_alone(tmp_path, settings, batch_size, caplog):
    """Examples that fill no batch are counted and named."""
    data = DataConfig(**{"source": write(tmp_path, some(41)), "max_length": 64, "epochs": 1, **settings})
    documents, given = counted(load_documents(data, Renderer(BYTES), None)[0])
    batches = DocumentBatches(data, documents, batch_size, seed=3)
    examples = [int(batch.segments.max(1).sum()) for batch in batches.train()]
    expected, left = len(examples), 41 * data.epochs - sum(examples)
    given.clear()
    assert DocumentBatches(data.model_copy(update={"epochs": None}), documents, batch_size).count(10**9) == 10**9
    for most in (expected - 1, expected, expected + 1, 10**6):
        assert batches.count(most) == min(expected, most)
    assert given == []
    assert (f"the last {left} examples do not fill a batch" in caplog.text) == (left > 0)


@pytest.mark.slow
def test_sources_take_turns_by_weight_in_their_own_order():
    order = mixed_order((5, 40), (1.0, 3.0), seed=7)
    numbers = np.array([order[place] for place in range(400)])
    first = numbers[numbers < 5]
    assert len(first) == 100
    assert all(abs(np.count_nonzero(numbers[:n] < 5) - n / 4) <= 1 for n in range(1, 400))  # evenly spread
    orders = training_order(5, 7), training_order(40, 8)
    assert first.tolist() == [orders[0][place] for place in range(100)]
    assert numbers[numbers >= 5].tolist() == [5 + orders[1][place] for place in range(300)]


def test_an_unshuffled_mix_takes_each_source_in_order(tmp_path):
    sources = [write(tmp_path, [qa(f"{name}{i}", "a") for i in range(8)], f"{name}.jsonl") for name in "mn"]
    batch = next(batches_of(sources, batch_size=8, shuffle=False, packing=False))
    assert sorted(questions(batch)) == [f"{name}{i}" for name in "mn" for i in range(4)]


def test_a_list_of_names_or_mappings_stands_for_a_mix():
    config = DataConfig(source=["a.jsonl", {"source": "b.jsonl", "weight": 2}], max_length=8)
    assert [(one.source, one.weight) for one in config.mix] == [("a.jsonl", 1.0), ("b.jsonl", 2.0)]
    assert DataConfig.model_validate(config.model_dump()) == config
    one = DataConfig(source=[{"source": "a.jsonl", "weight": 2, "columns": {"text": "body"}}], max_length=8, epochs=2)
    assert one == DataConfig(source="a.jsonl", columns={"text": "body"}, max_length=8, epochs=2)


def test_a_mix_resumes_where_it_stopped(tmp_path):
    first = write(tmp_path, [{"text": f"a{number}"} for number in range(30)], "a.jsonl")
    second = write(tmp_path, [{"text": f"b{number}"} for number in range(7)], "b.jsonl")
    data = {"source": [{"source": first, "weight": 3}, second], "packing": False, "validation": {"share": 0.2}}
    settings = config("sft", data=data, task=None, rollout=None, eval=None)

    def source():
        mesh = make_mesh(settings.mesh)
        return document_source(settings, Parts(mesh, forward_of(None, mesh, settings), Renderer(BYTES), None))

    def next_of(source):
        return source.next(NONE_FROZEN, 0, Stopwatch(), FrozenModels())

    whole, resumed, steps = source(), source(), []
    for number in range(4):
        steps.append(next_of(whole))
        if number == 1:
            resumed.seek(json.loads(json.dumps(whole.position())))
    for step in steps[2:]:
        again = next_of(resumed)
        assert_same(again.batch, step.batch)
        assert again.metrics == step.metrics
