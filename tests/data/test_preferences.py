"""Records of preferences become two sequences that share a row, and are cached, held out and counted as one example."""

import json

import jax
import numpy as np
import pytest
from tiny import config

from mllm.algorithms.documents import load_documents
from mllm.algorithms.dpo import source
from mllm.algorithms.dpo.settings import DpoConfig
from mllm.algorithms.dpo.source import PreferenceBatches, PreferenceSource
from mllm.config.data import DataConfig
from mllm.config.task import ArithmeticConfig, TaskConfig
from mllm.data import cache
from mllm.data.source import Fixed
from mllm.data.tasks.load import load as load_task
from mllm.data.tokenizing import encode_preference, mismatched
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel.mesh import make_mesh
from mllm.parallel.processes import RowShare
from mllm.stopwatch import Stopwatch
from mllm.training.recipe import Parts

RENDERER = Renderer(bytes_tokenizer())
START, END = bytes_tokenizer().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
ASKED = [{"role": "user", "content": "ab"}]


def said(text):
    return [{"role": "assistant", "content": text}]


def pair(record, max_length=32):
    return encode_preference("pairs", RENDERER, max_length, record)


def some(count):
    return [{"prompt": f"q{i}", "chosen": "a" * (1 + i % 5), "rejected": "b" * (1 + i % 3)} for i in range(count)]


def labelled(count):
    return [{"prompt": f"q{i}", "completion": "abcdefg"[i % 7] * (1 + i % 4), "label": i % 3 > 0} for i in range(count)]


def documents_of(folder, records, form, renderer=RENDERER, **settings):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(**{"source": str(path), "max_length": 32, **settings})
    return config, load_documents(config, renderer, None, form)


def test_every_form_of_a_pair_of_chats_gives_the_same_two_sequences():
    answers = {"chosen": said("c"), "rejected": said("de")}
    whole = {name: ASKED + answer for name, answer in answers.items()}
    chats = {"prompt": ASKED, **answers}, {"prompt": "ab", **answers}, whole, {"prompt": "ab", **whole}
    for record in (*chats, {"prompt": ASKED, **whole}, {"question": "ab", "chosen": "c", "rejected": "de"}):
        (chosen, rejected, label), complete, is_text = pair(record)
        assert (label, complete, is_text) == (None, True, False)
        for found, answer in ((chosen, b"c"), (rejected, b"de")):
            assert found.tokens.tolist() == [START, *b"ab", END, START, *answer, END], record
            assert found.learned.tolist() == [False] * 5 + [True] * (len(answer) + 1)


def test_a_text_prompt_is_not_asked_twice_where_chats_differ_from_their_first_message():
    told = [[{"role": "system", "content": letter}, *ASKED] for letter in "xy"]
    record = {"prompt": "ab", "chosen": told[0] + said("c"), "rejected": told[1] + said("d")}
    (chosen, rejected, _), *_ = pair(record)
    assert chosen.tokens.tolist() == [START, *b"x", END, START, *b"ab", END, START, *b"c", END]
    assert rejected.tokens.tolist() == [START, *b"y", END, START, *b"ab", END, START, *b"d", END]


def test_texts_stay_texts_and_a_long_pair_is_cut_no_further_than_to_halves():
    (chosen, rejected, _), complete, is_text = pair({"prompt": "ab", "chosen": "c", "rejected": "d" * 20}, 15)
    assert (complete, is_text) == (False, True)
    assert chosen.tokens.tolist() == [*b"abc", END]
    assert rejected.tokens.tolist() == [*b"ab", *b"d" * 9]
    lengths = [len(one.tokens) for one in pair({"prompt": "ab", "chosen": "c" * 30, "rejected": "d" * 20}, 15)[0][:2]]
    assert lengths == [7, 8]


@pytest.mark.parametrize(
    ("form", "record", "message"),
    [
        ("pairs", {"prompt": "a", "chosen": "b"}, "rejected is missing"),
        ("pairs", {"chosen": ASKED, "rejected": ASKED + said("a")}, "one of chosen and rejected is the beginning"),
        ("pairs", {"chosen": said("a"), "rejected": said("b")}, "prompt is missing"),
        ("labelled", {"prompt": "a", "completion": "b", "label": "good"}, "label must be true or false, got good"),
    ],
)
def test_what_is_no_preference_is_an_error(form, record, message):
    with pytest.raises(UserError, match=message):
        encode_preference(form, RENDERER, 32, record)


def test_pairs_of_equal_tokens_are_counted_and_left_out(tmp_path, caplog):
    records = [
        {"question": "a", "chosen": "b", "rejected": "b"},
        {"question": "a", "chosen": "b", "rejected": "b\n"},
        {"prompt": ASKED, "chosen": said("c" * 90 + "d"), "rejected": said("c" * 99)},
        *some(3),
    ]
    trims = bytes_tokenizer()
    trims.chat_template = trims.chat_template.replace("['content']", "['content'] | trim")
    _, (documents, _) = documents_of(tmp_path, records, "pairs", Renderer(trims), cache=str(tmp_path))
    assert len(documents) == 3
    assert "3 examples were left out: chosen and rejected have equal tokens" in caplog.text


def test_a_labelled_completion_stands_beside_its_prompt_with_the_next_one_s_completion():
    records = [{"prompt": "ab", "completion": "c", "label": True}, {"prompt": "d", "completion": "ef", "label": 0}]
    encoded = [("", encode_preference("labelled", RENDERER, 4, record)) for record in records]
    (_, ((one, second, yes), _, _)), (_, ((other, last, no), _, _)) = mismatched(encoded, 4)
    assert (yes, no) == (True, False)
    assert (one.tokens.tolist(), other.tokens.tolist()) == ([*b"abc", END], [*b"def", END])
    assert (second.tokens.tolist(), second.learned.tolist()) == ([*b"abef"], [False, False, True, True])
    assert last.tokens.tolist() == [*b"dc", END]


@pytest.mark.parametrize("form", ["pairs", "labelled"])
def test_preferences_are_cached_apart_and_held_out_whole(tmp_path, form):
    records = (some if form == "pairs" else labelled)(20)
    config, (training, heldout) = documents_of(tmp_path, records, form, validation={"share": 0.2}, cache=str(tmp_path))
    assert (len(training), len(heldout), training.form) == (16, 4, form)
    read = [*training.read(np.arange(16)), *heldout.read(np.arange(4))]
    firsts = sorted(bytes(one.first.tokens[:-1].astype(np.uint8)).decode() for one in read)
    assert firsts == sorted(r["prompt"] + r.get("chosen", r.get("completion")) for r in records)
    for one, size in zip(read, [*training.sizes, *heldout.sizes], strict=True):
        again = cache.unsigned(cache.signed(one), form)
        np.testing.assert_array_equal(np.concatenate(again[:2], 1), np.concatenate(one[:2], 1))
        assert one.size == tuple(size)
        assert again.desirable == one.desirable
    assert load_documents(config, RENDERER, None, form)[0].content == training.content


@pytest.mark.parametrize("form", ["pairs", "labelled"])
def test_rows_hold_whole_examples_with_their_reference_and_processes_make_their_own(tmp_path, form):
    config, (documents, _) = documents_of(tmp_path, (some if form == "pairs" else labelled)(30), form, epochs=1)
    reference = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)

    def batches(**share):
        made = PreferenceBatches(config, documents, 4, 0, **share)
        made.reference = reference
        return made

    whole = batches()
    examples, seen = documents.read(range(30)), 0
    for plan, (batch, second) in zip(whole.plans(), whole.train(), strict=True):
        seen += len(plan)
        np.testing.assert_allclose(batch.weights[batch.weights > 0], 1 / len(plan))
        for row in range(4):
            for number, index in enumerate(index for index, at in plan if at == row):
                laid = [(batch, 2 * number + 1, 0), (batch, 2 * number + 2, 1)]
                if form == "labelled":
                    laid = [(batch, number + 1, 0), (second, number + 1, 1)]
                for into, segment, part in laid:
                    inside = into.segments[row] == segment
                    np.testing.assert_array_equal(into.tokens[row, inside], examples[index][part].tokens)
                    (at,) = np.flatnonzero(into.inputs.reference_logprobs[row] * inside)
                    assert into.inputs.reference_logprobs[row, at] == reference[index, part]
                    assert at == np.flatnonzero(into.weights[row] * inside)[0]
                    wanted = {True: 1, False: -1, None: 0}[examples[index].desirable]
                    assert form == "pairs" or into.inputs.labels[row, at] == wanted
    assert seen > 15
    parts = zip(*(batches(share=RowShare(index, 2)).train() for index in range(2)), strict=True)
    for expected, shares in zip(whole.train(), parts, strict=True):
        for one, *others in zip(expected, *shares, strict=True):
            for field, *halves in zip(*(jax.tree.leaves(b) for b in (one, *others)), strict=True):
                np.testing.assert_array_equal(np.concatenate(halves), field)


def test_what_is_drawn_from_each_source_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "logprobs_of", lambda forward: None)  # pairs alone need no pass of the model
    for name in ("a.jsonl", "b.jsonl"):
        documents_of(tmp_path, some(9), "pairs")
        (tmp_path / "data.jsonl").rename(tmp_path / name)
    data = {"source": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], "packing": False}
    settings = config("dpo", dpo={}, data=data, task=None, rollout=None, eval=None)
    parts = Parts(settings, make_mesh(settings.mesh), None, RENDERER, None)
    step = PreferenceSource(settings.section(DpoConfig), parts).next(None, 0, Stopwatch(), Fixed())
    assert [step.metrics[f"data/{name}.jsonl"] for name in "ab"] == [settings.batch_size // 2] * 2


def test_a_task_gives_right_and_wrong_completions():
    arithmetic = TaskConfig(name="arithmetic", arithmetic=ArithmeticConfig(operators="+-"), heldout=50)
    task, config = load_task(arithmetic), DataConfig(source="task", max_length=32)
    for example in [*task.train, *task.heldout]:
        assert 1 <= abs(int(example.rejected) - int(example.answer)) <= 9
        assert int(example.rejected) >= min(0, int(example.answer) - 9)
    documents, _ = load_documents(config, RENDERER, task, "pairs")
    assert len(documents) == len(task.train)
    (chosen, rejected, _), example = documents.read([3])[0], task.train[3]
    for found, answer in ((chosen, example.answer), (rejected, example.rejected)):
        assert found.tokens.tolist() == [START, *example.question.encode(), END, START, *answer.encode(), END]
    endless = load_task(TaskConfig(name="arithmetic", arithmetic=ArithmeticConfig(digits=6)))
    with pytest.raises(UserError, match=r"task .* problems, and at most"):
        load_documents(config, RENDERER, endless, "pairs")
