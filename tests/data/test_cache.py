"""A source is tokenized once; a stale or unfinished cache is not used, and a damaged cache is an error."""

from pathlib import Path

import pytest
from test_data import BYTES, qa, some, write

from mllm.config.data import DataConfig
from mllm.data import cache, tokenizing
from mllm.data.records import Origin
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """A function that opens the cache of a source, and the list of caches that had to be made."""
    made, make = [], cache.make

    def counting(folder, *arguments):
        made.append(folder)
        return make(folder, *arguments)

    monkeypatch.setattr(cache, "make", counting)

    def open_cache(source, tokenizer=BYTES, rule="auto", **settings):
        data = DataConfig(**{"source": str(source), "max_length": 32, "cache": f"{tmp_path}/cache", **settings})
        return cache.cached_documents(Origin("data.source", data.source), data, Renderer(tokenizer, rule))

    return open_cache, made


def contents(documents):
    return [(document.tokens.tolist(), document.counts.tolist()) for document in documents.read(range(len(documents)))]


def test_a_cache_is_made_once_for_the_same_inputs(tmp_path, opened):
    """The inputs are the content, the tokenizer and the settings."""
    open_cache, made = opened
    path = Path(write(tmp_path, some(20)))
    first = open_cache(path)
    assert [(len(tokens), sum(learned)) for tokens, learned in contents(first)] == [*map(tuple, first.sizes)]
    assert contents(open_cache(path.rename(tmp_path / "renamed.jsonl"))) == contents(first)
    assert len(made) == 1
    other = bytes_tokenizer()
    other.chat_template = other.chat_template.replace("content'] }}", "content'] }}!")
    open_cache(tmp_path / "renamed.jsonl", tokenizer=other)
    open_cache(tmp_path / "renamed.jsonl", rule="always")
    open_cache(tmp_path / "renamed.jsonl", max_length=16)
    open_cache(tmp_path / "renamed.jsonl", columns={"question": "answer", "answer": "question"})
    changed = open_cache(write(tmp_path, [*some(19), qa("q19", "other")], "renamed.jsonl"))
    assert len({*made}) == 6
    assert changed.content != first.content


@pytest.mark.parametrize("ending", [cache.RECORDS, cache.SUMMARY])
def test_a_damaged_cache_error_names_the_file_to_delete(tmp_path, opened, ending):
    open_cache, made = opened
    source = write(tmp_path, some(20))
    expected = contents(open_cache(source))
    file = made[0].with_suffix(ending)
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match=f"data.cache: {file} is damaged .*: delete it"):
        contents(open_cache(source))
    file.unlink()
    made[0].with_suffix(cache.SUMMARY).unlink(missing_ok=True)
    assert contents(open_cache(source)) == expected


@pytest.mark.parametrize("fault", ["interrupted", "a bad line"])
def test_an_unfinished_cache_is_not_used(tmp_path, opened, monkeypatch, fault):
    open_cache, made = opened
    source, encode = write(tmp_path, [*some(20), *["{"] * (fault == "a bad line")]), tokenizing.encode_records

    def disturbed(*arguments):
        yield from encode(*arguments)
        if fault == "interrupted":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cache, "encode_records", disturbed)
        with pytest.raises((UserError, KeyboardInterrupt), match=r"data.jsonl:21\)" if fault == "a bad line" else None):
            open_cache(source)
        assert [*made[0].parent.iterdir()] == []
    write(tmp_path, some(20))
    assert len(contents(open_cache(source))) == 20


def test_a_cache_that_can_not_be_written_is_refused(tmp_path, opened):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.cache: .*/file/x can't be written \(Not a directory\): make"):
        opened[0](write(tmp_path, some(2)), cache=f"{tmp_path}/file/x")
