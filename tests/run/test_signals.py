"""The first signal is noted whatever the process is doing, the second ends it, and so does one with nothing to save."""

import signal
import subprocess
import sys
import time

import pytest

from mllm.run import signals
from mllm.run.signals import Interrupt, Interrupted


@pytest.mark.parametrize("number", Interrupt.SIGNALS)
def test_the_first_signal_is_noted_and_the_handlers_of_before_are_restored(number):
    before = {number: signal.getsignal(number) for number in Interrupt.SIGNALS}
    with Interrupt() as interrupt:
        interrupt.holding = True
        interrupt.poll()
        assert interrupt.received == 0
        signal.raise_signal(number)
        while not interrupt.received:
            time.sleep(0.001)
        assert interrupt.received == number
        with pytest.raises(Interrupted):
            interrupt.poll()
    assert {number: signal.getsignal(number) for number in Interrupt.SIGNALS} == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_that_comes_while_the_processes_ask_each_other_is_not_lost(monkeypatch):
    with Interrupt() as interrupt:
        interrupt.holding = True

        def gather(own):
            interrupt.received = signal.SIGTERM  # as the thread notes it
            return [own, 0]

        monkeypatch.setattr(signals, "gather_objects", gather)
        assert not interrupt.agree()
        monkeypatch.undo()
        assert interrupt.agree()


@pytest.mark.slow
@pytest.mark.parametrize("holds", [True, False])
def test_a_second_signal_and_one_with_nothing_to_save_end_the_process_even_in_the_middle_of_a_call(holds):
    program = f"""
import hashlib
from mllm.run import signals
from mllm.run.signals import Interrupt
with Interrupt() as interrupt:
    interrupt.holding = {holds}
    print("here", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "here\n"
            process.send_signal(signal.SIGTERM)
            if holds:
                assert process.stderr.readline() == "\n"
                assert process.stderr.readline().startswith("SIGTERM: saving and stopping soon")
                assert process.poll() is None
                process.send_signal(signal.SIGINT)
            assert process.wait() == (130 if holds else 143)
        finally:
            process.kill()
