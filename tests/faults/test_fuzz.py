"""tests/faults/fuzz.py finds no fault in the readers, and finds those that are planted, small."""

import importlib
import re
import sys
import time

import fuzz
import fuzz_engine
import fuzz_targets
import hypothesis
import pytest
from fuzz_engine import Target
from hypothesis import strategies as st

from mllm.errors import UserError

SECONDS = 1.0
numbers = st.integers(0, 1000)


def take(value: int) -> None:
    """A reader that is right."""
    if value % 2:
        raise UserError(f"{value}: not even, and the file is /tmp/{value}.txt")


def tally(reader, inputs=numbers, seconds=SECONDS, seed=0):
    return fuzz_engine.fuzz(Target("planted", inputs, reader), seconds, seed)


@pytest.mark.slow
def test_no_reader_of_input_is_at_fault(capsys):
    begin = time.monotonic()
    assert fuzz.main(["--seconds", "20"]) == 0, capsys.readouterr().out
    assert time.monotonic() - begin < 60
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(fuzz_targets.TARGETS)
    for line in lines[1:]:
        _, tried, accepted, refused, _, faults = line.replace(",", "").split()
        assert int(accepted) + int(refused) == int(tried)
        assert int(accepted) > 0
        assert faults == "0"
        if not line.startswith("answers"):
            assert int(refused) > 0


def test_what_is_accepted_and_refused_is_counted_by_what_was_said():
    found = tally(take)
    assert found.tried == found.accepted + found.refused.total() > 100
    assert list(found.refused) == ["N: not even, and the file is PATH"]
    assert found.faults == {}


def test_a_fault_is_shown_with_the_smallest_input_that_does_it():
    def reader(value):
        take(value)
        if value > 500:
            raise KeyError(value)

    [(fault, (said, smallest))] = tally(reader).faults.items()
    assert re.fullmatch(r"KeyError at tests/faults/test_fuzz.py:[0-9]+", fault)
    assert (said, smallest) == ("502", "502")


def test_a_second_fault_is_not_hidden_by_the_first():
    def reader(value):
        assert value < 900
        if value > 800:
            raise IndexError

    assert sorted(fault.split()[0] for fault in tally(reader, seconds=2).faults) == ["AssertionError", "IndexError"]


def test_a_reader_that_takes_too_long_is_at_fault(monkeypatch):
    monkeypatch.setattr(fuzz_engine, "LIMIT", 0.05)
    monkeypatch.setattr(fuzz_engine, "SHRINKING", 2.0)

    def backtracks(text):
        re.fullmatch(r"(a|aa)+b", text)

    [fault] = tally(backtracks, st.integers(0, 60).map(lambda count: "a" * count)).faults
    assert fault.startswith("Slow")


def test_a_refusal_of_several_lines_is_a_fault(monkeypatch):
    def reader(value):
        error = UserError("")
        error.args = ("one\ntwo",)
        raise error

    [fault] = tally(reader).faults
    assert fault.startswith("WrongRefusal")


def test_what_is_no_exception_is_a_fault_and_control_c_is_not():
    def panics(value):
        raise SystemExit(1)

    def interrupted(value):
        raise KeyboardInterrupt

    assert [fault.split()[0] for fault in tally(panics).faults] == ["Panic"]
    with pytest.raises(KeyboardInterrupt):
        tally(interrupted)


def test_the_same_seed_tries_the_same_inputs():
    def inputs(seed):
        tried = []
        tally(tried.append, seconds=0.2, seed=seed)
        return tried[:50]

    assert inputs(1) == inputs(1) != inputs(2)


def test_faults_are_shown_and_told_by_the_exit_code(monkeypatch, capsys):
    def reader(value):
        raise KeyError("no such thing")

    monkeypatch.setattr(fuzz_targets, "TARGETS", {"planted": Target("planted", numbers, reader)})
    assert fuzz.main(["--seconds", "0.5", "--messages"]) == 1
    said = capsys.readouterr().out
    assert "FAULT in planted: KeyError at tests/faults/test_fuzz.py:" in said
    assert "input: 0" in said


def test_without_hypothesis_one_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert importlib.reload(fuzz).main([]) == 2
    assert capsys.readouterr().err == "error: fuzzing needs the package hypothesis: pip install -e '.[dev]'\n"
    monkeypatch.setitem(sys.modules, "hypothesis", hypothesis)
    importlib.reload(fuzz)
