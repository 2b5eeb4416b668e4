"""Code that takes too long is stopped, even if it swallows the exception that is to stop it."""

import time

import pytest

from mllm.errors import UserError
from mllm.model import time_limit


class SlowToDelete:
    """Its `__del__` takes until an exception ends it, which Python reports and then forgets."""

    def __del__(self):
        spin(10)


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_that_a_destructor_swallows_does_not_let_the_code_go_on(monkeypatch):
    monkeypatch.setattr(time_limit, "CHECK_SECONDS", 0.05)
    begin = time.monotonic()
    expected = pytest.raises(UserError, match=r"^the template took longer than 0.1 s$")
    with expected, time_limit.time_limit(0.1, "the template"):
        SlowToDelete()
        spin(10)
    assert time.monotonic() - begin < 5
