"""Gives a target inputs until its time is over, and keeps what came of them: outcomes, and faults with a small input.

A target takes an input, or refuses it by a `UserError` in one line, within `LIMIT` seconds of processor time; anything
else is a fault. Hypothesis makes the inputs and, of one that is at fault, the smallest that still is. The same seed
makes the same inputs. Left out: coverage as a guide, a memory of earlier runs.
"""

import itertools
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from mllm.errors import LONGEST, UserError

LIMIT = 2.0
"""Seconds of processor time that an input may take."""
ROUND = 1000
"""Inputs between two seeds."""
SHRINKING = 20.0
"""Seconds past its time that a target may take to make a fault's input smaller."""
ROOT = Path(__file__).parent.parent.parent
Tell = Callable[[], None]


@dataclass(frozen=True)
class Target:
    name: str
    inputs: SearchStrategy[Any]
    take: Callable[[Any], object]
    """Returns where it accepts an input."""


@dataclass
class Tally:
    target: str
    tried: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """How often, by what was said, without names and numbers."""
    faults: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Error and place -> what it said, and the smallest input that was found."""


class Slow(Exception):
    """An input took longer than `LIMIT`."""


class WrongRefusal(Exception):
    """A refusal that is not one line."""


class Panic(Exception):
    """A BaseException, as Rust's libraries raise them."""


class OutOfTime(BaseException):
    """Hypothesis lets it pass, as it does KeyboardInterrupt."""


def fuzz(target: Target, seconds: float, seed: int, tell: Tell = lambda: None) -> Tally:
    """Try inputs for so long; `tell` is called after each."""
    tally, end = Tally(target.name), time.monotonic() + seconds
    smallest: dict[str, tuple[str, str]] = {}

    def attempt(value: Any) -> None:
        if time.monotonic() > end + (SHRINKING if smallest else 0):
            raise OutOfTime
        tally.tried += 1
        tell()
        try:
            refusal = offer(target, value)
        except Exception as error:
            fault, shown = place(error), repr(value)
            if fault in tally.faults:  # it would hide others
                return
            if fault not in smallest or len(shown) <= len(smallest[fault][1]):
                smallest[fault] = str(error), shown
            raise
        if refusal is None:
            tally.accepted += 1
        else:
            tally.refused[refusal] += 1

    for number in itertools.count(seed):
        try:
            rounds(target.inputs, attempt, number)
        except OutOfTime:
            pass
        except Exception as error:  # that of a fault, or Hypothesis' word that it comes and goes
            if not smallest:
                smallest[place(error)] = str(error), "?"
        tally.faults |= smallest
        smallest.clear()
        if time.monotonic() > end:
            break
    return tally


def offer(target: Target, value: Any) -> str | None:
    """What kind of refusal the input met; None: it was accepted. Raises what is a fault."""
    try:
        with processor_time(LIMIT):
            target.take(value)
    except UserError as error:
        said = str(error)
        if not said.isprintable() or len(said) > 10 * LONGEST:
            raise WrongRefusal(said) from None
        return kind(said)
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Panic(str(error)) from error
    return None


def rounds(inputs: SearchStrategy[Any], attempt: Callable[[Any], None], number: int) -> None:
    """Some inputs; raises the error of the smallest that fails."""
    settings = hypothesis.settings(
        max_examples=ROUND,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    settings(hypothesis.seed(number)(hypothesis.given(inputs)(attempt)))()


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raise Slow in the body when this process has computed for so long. In the main thread only.

    A signal is seen between two of Python's instructions, and by a regular expression that backtracks.
    """

    def late(*_: object) -> None:
        raise Slow(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def place(error: BaseException) -> str:
    """Its kind, and the innermost line of this project that it came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(ROOT)]
    ours = [frame for frame in frames if ".venv" not in frame.filename and "fuzz" not in Path(frame.filename).name]
    where = [f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}" for frame in (ours or frames)[-1:]]
    return " at ".join([type(error).__name__, *where])


def kind(said: str) -> str:
    """A refusal without what it quotes: names, numbers and the place."""
    said = re.sub(r" in \"<.*|; did you mean .*|\(got .*", "", said)
    said = re.sub(r"^.*(: unknown setting|: the value is not)", r"KEY\1", said)
    said = re.sub(r"\S*/\S*", "PATH", said)
    said = re.sub(r"'[^']*'|\"[^\"]*\"", "...", said)
    return re.sub(r"0x[0-9a-f]+|#x[0-9a-f]+|[0-9]+", "N", said)[:100]
