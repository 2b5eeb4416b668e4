"""The rewards that chaos.py and endurance.py train on: plain functions of the completion, as a user's are."""

import time
from typing import Any


def even_characters(prompt: str, completion: str, example: Any) -> float:
    """The share of characters with an even number: a model from scratch gets some of it, and learns it."""
    return sum(ord(character) % 2 == 0 for character in completion) / max(1, len(completion))


def raises_at_times(prompt: str, completion: str, example: Any) -> float:
    """Can't bear a completion that begins with a letter or digit of its kind."""
    if ord(completion[:1] or "a") % 8 == 1:
        raise RuntimeError("not this one")
    return 1.0


def hangs_at_times(prompt: str, completion: str, example: Any) -> float:
    """Sleeps far beyond any time limit at some completions."""
    if ord(completion[:1] or "b") % 8 == 1:
        time.sleep(3600)
    return 1.0


def slow(prompt: str, completion: str, example: Any) -> float:
    """Takes a quarter of a second."""
    time.sleep(0.25)
    return even_characters(prompt, completion, example)
