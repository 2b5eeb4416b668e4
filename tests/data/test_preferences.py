"""Records of preferences become two sequences that share a row, and are cached, held out and counted as one example."""

import jax
import numpy as np
import pytest
from test_data import BYTES, END, START, write
from tiny import config, forward_of

from mllm.algorithms.documents import load_documents
from mllm.algorithms.dpo.source import PreferenceBatches
from mllm.algorithms.recipes import recipe_of
from mllm.config.data import DataConfig
from mllm.config.task import ArithmeticConfig, TaskConfig
from mllm.data import cache
from mllm.data.tasks.load import load as load_task
from mllm.data.tokenizing import encode_pair
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel.mesh import make_mesh
from mllm.parallel.processes import RowShare
from mllm.training.recipe import Parts

RENDERER = Renderer(BYTES)
ASKED = [{"role": "user", "content": "ab"}]


def answer_of(text):
    return [{"role": "assistant", "content": text}]


def pair(record, max_length=32):
    return encode_pair(RENDERER, max_length, record)


def some(count):
    return [{"prompt": f"q{i}", "chosen": "a" * (1 + i % 5), "rejected": "b" * (1 + i % 3)} for i in range(count)]


def documents_of(folder, records, renderer=RENDERER, **settings):
    config = DataConfig(source=write(folder, records), max_length=32, **settings)
    return config, load_documents(config, renderer, None, pairs=True)


def test_every_form_of_a_chat_pair_gives_the_same_sequences():
    answers = {"chosen": answer_of("c"), "rejected": answer_of("de")}
    whole = {name: ASKED + answer for name, answer in answers.items()}
    chats = {"prompt": ASKED, **answers}, {"prompt": "ab", **answers}, whole, {"prompt": "ab", **whole}
    for record in (*chats, {"prompt": ASKED, **whole}, {"question": "ab", "chosen": "c", "rejected": "de"}):
        (chosen, rejected), complete, is_text = pair(record)
        assert (complete, is_text) == (True, False)
        for document, answer in ((chosen, b"c"), (rejected, b"de")):
            assert document.tokens.tolist() == [START, *b"ab", END, START, *answer, END], record
            assert document.counts.tolist() == [False] * 5 + [True] * (len(answer) + 1)


def test_a_text_prompt_is_not_repeated_before_differing_chats():
    systems = [[{"role": "system", "content": letter}, *ASKED] for letter in "xy"]
    record = {"prompt": "ab", "chosen": systems[0] + answer_of("c"), "rejected": systems[1] + answer_of("d")}
    (chosen, rejected), *_ = pair(record)
    assert chosen.tokens.tolist() == [START, *b"x", END, START, *b"ab", END, START, *b"c", END]
    assert rejected.tokens.tolist() == [START, *b"y", END, START, *b"ab", END, START, *b"d", END]


def test_texts_stay_texts_and_a_long_pair_is_cut_to_halves():
    (chosen, rejected), complete, is_text = pair({"prompt": "ab", "chosen": "c", "rejected": "d" * 20}, 15)
    assert (complete, is_text) == (False, True)
    assert chosen.tokens.tolist() == [*b"abc", END]
    assert rejected.tokens.tolist() == [*b"ab", *b"d" * 9]
    lengths = [len(one.tokens) for one in pair({"prompt": "ab", "chosen": "c" * 30, "rejected": "d" * 20}, 15)[0]]
    assert lengths == [7, 8]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "rejected is missing"),
        ({"chosen": ASKED, "rejected": ASKED + answer_of("a")}, "one of chosen and rejected is the beginning"),
        ({"chosen": answer_of("a"), "rejected": answer_of("b")}, "prompt is missing"),
        ({"prompt": "a", "chosen": 5, "rejected": "b"}, "chosen must be a string, got int"),
        ({"prompt": "a", "chosen": "b", "rejected": answer_of("c")}, "rejected must be a string, got list"),
    ],
)
def test_a_malformed_preference_is_an_error(record, message):
    with pytest.raises(UserError, match=message):
        pair(record)


def test_pairs_of_equal_tokens_are_counted_and_left_out(tmp_path, caplog):
    records = [
        {"question": "a", "chosen": "b", "rejected": "b"},
        {"question": "a", "chosen": "b", "rejected": "b\n"},
        {"prompt": ASKED, "chosen": answer_of("c" * 90 + "d"), "rejected": answer_of("c" * 99)},
        *some(3),
    ]
    trims = bytes_tokenizer()
    trims.chat_template = trims.chat_template.replace("['content']", "['content'] | trim")
    _, (documents, _) = documents_of(tmp_path, records, Renderer(trims), cache=str(tmp_path))
    assert len(documents) == 3
    assert "3 examples were left out: chosen and rejected have equal tokens" in caplog.text


def test_pairs_are_cached_and_held_out_whole(tmp_path):
    records = some(20)
    config, (training, heldout) = documents_of(tmp_path, records, validation={"share": 0.2}, cache=str(tmp_path))
    assert (len(training), len(heldout)) == (16, 4)
    read = [*training.read(np.arange(16)), *heldout.read(np.arange(4))]
    for name in ("chosen", "rejected"):
        texts = sorted(bytes(getattr(one, name).tokens[:-1].astype(np.uint8)).decode() for one in read)
        assert texts == sorted(record["prompt"] + record[name] for record in records)
    for one, size in zip(read, [*training.sizes, *heldout.sizes], strict=True):
        again = cache.unsigned(cache.signed(one), pairs=True)
        np.testing.assert_array_equal(np.concatenate(again, 1), np.concatenate(one, 1))
        assert one.size == tuple(size)
    assert load_documents(config, RENDERER, None, pairs=True)[0].content == training.content


def test_rows_hold_whole_pairs_with_their_reference(tmp_path):
    """Each process makes the rows of its own pairs."""
    config, (documents, _) = documents_of(tmp_path, some(30), epochs=1)
    reference = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)

    def batches(**share):
        made = PreferenceBatches(config, documents, 4, 0, **share)
        made.reference = reference
        return made

    whole = batches()
    pairs, seen = documents.read(range(30)), 0
    for plan, batch in zip(whole.plans(), whole.train(), strict=True):
        seen += len(plan)
        np.testing.assert_allclose(batch.weights[batch.weights > 0], 1 / len(plan))
        for row in range(4):
            laid = [(index, part) for index, at in plan if at == row for part in (0, 1)]
            for segment, (index, part) in enumerate(laid, start=1):
                inside = batch.segments[row] == segment
                np.testing.assert_array_equal(batch.tokens[row, inside], pairs[index][part].tokens)
                (at,) = np.flatnonzero(batch.inputs.reference_logprobs[row] * inside)
                assert batch.inputs.reference_logprobs[row, at] == reference[index, part]
                assert at == np.flatnonzero(batch.weights[row] * inside)[0]
    assert seen > 15
    parts = zip(*(batches(share=RowShare(index, 2)).train() for index in range(2)), strict=True)
    for expected, shares in zip(whole.train(), parts, strict=True):
        for field, *halves in zip(*(jax.tree.leaves(batch) for batch in (expected, *shares)), strict=True):
            np.testing.assert_array_equal(np.concatenate(halves), field)


def test_validation_pairs_have_a_reference_like_training(tmp_path):
    data = {"source": write(tmp_path, some(20)), "validation": {"share": 0.2}}
    settings = config("dpo", data=data, task=None, eval=None, rollout=None)
    mesh = make_mesh(settings.mesh)
    source = recipe_of(settings).source(Parts(mesh, forward_of(None, mesh, settings), RENDERER, None))
    source.logprobs = lambda params, batch: np.float32(batch.weights > 0)
    source.set_reference(None, "")
    for batches in (source.batches, source.heldout):
        np.testing.assert_array_equal(batches.reference, [[one.size[1] for one in pair] for pair in batches.documents])


def test_a_task_gives_right_and_wrong_completions():
    arithmetic = TaskConfig(name="arithmetic", arithmetic=ArithmeticConfig(operators="+-"), heldout=50)
    task, config = load_task(arithmetic), DataConfig(source="task", max_length=32)
    for example in [*task.train, *task.heldout]:
        assert 1 <= abs(int(example.rejected) - int(example.answer)) <= 9
        assert int(example.rejected) >= min(0, int(example.answer) - 9)
    documents, _ = load_documents(config, RENDERER, task, pairs=True)
    assert len(documents) == len(task.train)
    (chosen, rejected), example = documents.read([3])[0], task.train[3]
    for document, answer in ((chosen, example.answer), (rejected, example.rejected)):
        assert document.tokens.tolist() == [START, *example.question.encode(), END, START, *answer.encode(), END]
