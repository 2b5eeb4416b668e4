"""The first signal is noted; the second ends the process."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from mllm.run import signals
from mllm.run.signals import Interrupt, Interrupted


@pytest.mark.parametrize("number", Interrupt.SIGNALS)
def test_the_first_signal_is_noted_and_handlers_are_restored(number):
    before = {number: signal.getsignal(number) for number in Interrupt.SIGNALS}
    with Interrupt() as interrupt:
        interrupt.poll()
        assert interrupt.received == 0
        signal.raise_signal(number)
        assert interrupt.received == number
        with pytest.raises(Interrupted):
            interrupt.poll()
    assert {number: signal.getsignal(number) for number in Interrupt.SIGNALS} == before


def test_signals_outside_the_main_thread_are_the_callers():
    before = {number: signal.getsignal(number) for number in Interrupt.SIGNALS}

    def handlers():
        with Interrupt():
            return {number: signal.getsignal(number) for number in Interrupt.SIGNALS}

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers).result() == before


def test_a_signal_while_processes_agree_is_not_lost(monkeypatch):
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
