"""Sums of three numbers, with a calculator as a tool.

`python -m mllm.examples.calculator FILE` writes chats for SFT as JSON lines; half of the chats call the calculator.
"""

import json
import random
import sys
from pathlib import Path

PROBLEMS, CHATS = 10_000, 20_000


def add(numbers: str) -> int:
    """Add numbers.

    Args:
        numbers: They are written as a sum, such as "1+2+3".

    Returns:
        The sum.
    """
    return sum(map(int, numbers.split("+")))


def problems() -> list[dict[str, str]]:
    """Sums of three numbers: the numbers have two digits and the sums three, since a tiny model copies by position."""
    return [problem(f"problem {number}") for number in range(PROBLEMS)]


def problem(seed: str) -> dict[str, str]:
    draw = random.Random(seed)
    numbers = "+".join(str(draw.randrange(34, 100)) for _ in range(3))
    return {"prompt": f"{numbers}=", "answer": str(add(numbers))}


def chat(number: int) -> list[dict[str, str]]:
    """The messages of a sum; every second chat calls the calculator, in Llama 3's format."""
    prompt, answer = problem(f"chat {number}").values()
    call = json.dumps({"name": "add", "parameters": {"numbers": prompt[:-1]}}, separators=(",", ":"))
    lookup = [{"role": "assistant", "content": call}, {"role": "tool", "content": answer}]
    return [{"role": "user", "content": prompt}, *lookup[: 2 * (number % 2)], {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": chat(number)}) + "\n" for number in range(CHATS)))
