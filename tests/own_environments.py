"""Environments and tools as users write them, and a hostile environment that runs the assistant's text."""

import asyncio
import functools
import os
import random
import re
import sys
import time
from types import SimpleNamespace

import numpy as np

USED = functools, os, re, sys, time, np
CLOSED = []
MET = []


class Guess:
    """A game; rewards are numpy's, and there is metadata."""

    def __init__(self):
        self.tried, self._rng = [], random.Random()

    async def reset(self, seed, prompt, largest=9):
        self.number = random.Random(seed).randint(1, largest)
        return f" Up to {largest}."

    def step(self, completion):
        self.tried.append(completion)
        tried = int(completion) if completion.isdecimal() else 0
        hint = "higher" if tried < self.number else "lower"
        return hint, np.float32(tried == self.number), tried == self.number, {"why": hint}

    def get_reward(self):
        return -len(self.tried) / 4

    async def close(self):
        CLOSED.append(self.number)


def number(completion, environment):
    """The number that was to be guessed."""
    return environment.number


class Meeting:
    """Each of four meetings waits for the other three. Called one after the other, they would wait for ever."""

    async def step(self, completion):
        MET.append(completion)
        while len(MET) < 4:
            await asyncio.sleep(0.001)
        if completion == "never":
            await asyncio.sleep(60)
        return None, len(completion), True


class Echo:
    """In the form of TRL's examples. A tool may return something other than text."""

    def __init__(self):
        self.client = SimpleNamespace()

    def reset(self, **row) -> str | None:
        self.row = sorted(row)

    def step(self, number: int) -> str:
        """
        Echo a number.

        Args:
            number: The number.
        """
        if number < 1:
            raise ValueError("number must be positive")
        return number


class Hostile:
    """Runs the assistant's text, and the record's text as it begins."""

    def reset(self, begins=""):
        self.reward = 0
        exec(begins)

    def step(self, completion):
        names = {**globals(), "self": self}
        exec(completion, names)
        return names.get("result", ("on", 1.0, False))

    def close(self):
        sys.stderr.write("closed\n")


class Undescribed:
    def tool(self, amount):
        return amount


class Ended:
    """An environment with a method that can't be called."""

    def step(self):
        return "", 0.0, True


class Deck:
    """Takes cards out of its record's list, and has a tool that changes its argument."""

    def reset(self, cards):
        return f" {cards.pop()}"

    def sort(self, numbers: list[int]) -> str:
        """
        Sort numbers.

        Args:
            numbers: The numbers.
        """
        numbers.sort()
        return sys.exit("unsorted") if numbers == [] else str(numbers)


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


def by_environment(environments, **kwargs):
    return [environment.reward for environment in environments]


def numbered(completions):
    return range(len(completions))


def errors(tool_errors, messages, length):
    return tool_errors + len(messages) / 10 + length / 1000
