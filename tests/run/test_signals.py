"""The first signal is noted the second ends the process."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from mllm.run import signals
from mllm.run.signals import Interrupt, Interrupted


@pytest.mark.parametrize("number", Interrupt.SIGNALS)
def test_the_first_signal_is_noted_and_the_handlers_of_before_are_restored(number):
    before = {number: signal.getsignal(number) for number in Interrupt.SIGNALS}
    with Interrupt() as interrupt:
        interrupt.poll()
        assert interrupt.received == 0
        signal.raise_signal(number)
        assert interrupt.received == number
        with pytest.raises(Interrupted):
            interrupt.poll()
    assert {number: signal.getsignal(number) for number in Interrupt.SIGNALS} == before


def test_in_a_thread_that_is_not_the_main_one_signals_are_the_caller_s():
    before = {number: signal.getsignal(number) for number in Interrupt.SIGNALS}

    def handlers():
        with Interrupt():
            return {number: signal.getsignal(number) for number in Interrupt.SIGNALS}

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers).result() == before


def test_a_signal_that_comes_while_the_processes_ask_each_other_is_not_lost(monkeypatch):
    with Interrupt() as interrupt:

        def gather(own):
            interrupt.received = signal.SIGTERM  # as the handler notes it
            return [own, 0]

        monkeypatch.setattr(signals, "gather_objects", gather)
        assert not interrupt.agree()
        monkeypatch.undo()
        assert interrupt.agree()


def test_a_second_signal_ends_the_process(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with Interrupt():
        signal.raise_signal(signal.SIGTERM)
        assert ended == []
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]
