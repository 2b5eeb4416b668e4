"""A number game for a tiny model: find a number from 1 to 31 with five guesses, each answered "higher" or "lower".

`Guess` is the environment, and `problems` returns the task's games. `python -m mllm.examples.guess FILE` writes played
games as JSON lines for SFT. Shares of games won:

    always the middle of the remaining numbers    1
    random guesses of 1 to 31                     0.15
    random guesses of the remaining numbers       0.55
    the guesses in FILE                           0.57
"""

import json
import random
import re
import sys
from pathlib import Path

LARGEST, TURNS = 31, 5
SKILL = 0.5
"""The share of played games that always guess the middle of the remaining numbers; other games guess at random."""
GAMES, PLAYED = 1000, 20_000
"""The number of different prompts, and of played games in FILE."""


class Guess:
    """A game: the completion is the guess, the reward 1 for the number itself."""

    def reset(self, seed: int, **record) -> None:
        """Choose the number by the group's seed, so that a group's conversations have the same number."""
        self.number = random.Random(seed).randint(1, LARGEST)
        self.left = TURNS

    def step(self, completion: str) -> tuple[str, float, bool]:
        """The answer to a guess, its reward, and whether the game is over. A text without a number counts."""
        self.left -= 1
        text = completion.strip()
        guess = int(text) if re.fullmatch("[0-9]{1,2}", text) else None
        if guess == self.number:
            return "right", 1.0, True
        if guess is None:
            return "a number", 0.0, not self.left
        return "higher" if guess < self.number else "lower", 0.0, not self.left


def problems() -> list[dict[str, str]]:
    """The prompts of the games; the environment chooses the numbers. Prompts differ so that games can be held out."""
    return [{"prompt": f"game {number}"} for number in range(GAMES)]


def played(seed: int, skill: float = SKILL) -> tuple[list[dict[str, str]], float]:
    """The messages of a played game, and its reward; the share `skill` of the games is played perfectly."""
    draw, game = random.Random(f"guesses {seed}"), Guess()
    skilled = draw.random() < skill
    game.reset(seed)
    chat, low, high, done = [{"role": "user", "content": f"game {seed % GAMES}"}], 1, LARGEST, False
    while not done:
        guess = (low + high) // 2 if skilled else draw.randint(1, LARGEST)
        answer, reward, done = game.step(str(guess))
        chat += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": answer}]
        low, high = (max(low, guess + 1), high) if answer == "higher" else (low, min(high, guess - 1))
    return chat[:-1], reward


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": played(seed)[0]}) + "\n" for seed in range(PLAYED)))
