"""Reward functions and an environment as a user writes them, in a module; a model from scratch gets some of each."""


def even_characters(completion):
    """The share of characters with an even number."""
    return sum(ord(character) % 2 == 0 for character in completion) / 4


def seldom(completion):
    """1 where three characters or more have an even number; most groups get none."""
    return float(even_characters(completion) > 0.7)


class Counter:
    """An environment that answers with a number from its seed and the conversation, and may end by the number."""

    def reset(self, seed):
        self.count = seed % 100

    def step(self, completion):
        self.count += sum(map(ord, completion)) % 10
        return f"{self.count}", self.count % 7 / 7, self.count % 5 == 0
