"""Reward functions to copy; docs/examples/rewards.yaml uses them."""


def digits(completion):
    """The share of characters that are digits."""
    return sum(character in "0123456789" for character in completion) / max(len(completion), 1)


def close(completion, answer, scale=10):
    """1 for the right number, less with growing distance, and 0 for text that is no number."""
    if not completion.isdecimal():
        return 0.0
    return max(0.0, 1 - abs(int(completion) - int(answer)) / scale)


def varied(prompts, completions, **kwargs):
    """1 for a completion that occurs once among the completions of its prompt: batched, like TRL's functions."""
    pairs = list(zip(prompts, completions, strict=True))
    return [float(pairs.count(pair) == 1) for pair in pairs]
