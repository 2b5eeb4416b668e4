"""The first signal is noted, the second is not held up."""

import signal

import pytest

from mllm.signals import Interrupt


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_is_noted_and_gives_the_exit_code(number, exit_code):
    with Interrupt() as interrupt:
        assert interrupt.received is None
        assert interrupt.exit_code == 0
        signal.raise_signal(number)
        assert interrupt.received == number
        assert interrupt.exit_code == exit_code


def test_the_second_signal_has_its_usual_effect():
    with Interrupt():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_leaving_restores_what_was_there():
    before = {number: signal.getsignal(number) for number in Interrupt.SIGNALS}
    with Interrupt():
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in Interrupt.SIGNALS} == before


def test_a_signal_to_another_process_counts_as_one_to_this():
    interrupt = Interrupt()
    assert not interrupt.agree(lambda mine: [mine, None])
    assert interrupt.agree(lambda mine: [mine, signal.SIGTERM])
    assert interrupt.exit_code == 143
