"""The task `arithmetic`: sums, differences and products."""

import hashlib

from mllm.config.task import ArithmeticConfig, TaskConfig
from mllm.data.tasks.task import Example, Task, content_of, messages
from mllm.errors import UserError

MOST = 2**14
"""The most problems to train on: all of them are made and tokenized at the start."""


def arithmetic(config: TaskConfig) -> Task:
    """Sums, differences and products. The last `heldout` problems of a fixed permutation are held out.

    `3+4` and `4+3` are two problems. Products come before sums, as in Python.
    """
    shape = config.arithmetic or ArithmeticConfig()
    problems = 10 ** (shape.digits * shape.operands) * len(set(shape.operators)) ** (shape.operands - 1)
    heldout = config.heldout_of(problems)
    if problems < 2 * heldout:
        fault = f"{heldout} of arithmetic's {problems} problems leave fewer to train on"
        way_out = f"set it to at most {problems // 2}, or raise task.arithmetic.digits or operands"
        raise UserError(f"task.heldout: {fault}: {way_out}")

    def make(index: int) -> Example:
        expression, answer = arithmetic_problem(permute_index(index, problems), shape)
        wrong, place = near(int(answer), permute_index(index, problems, "rejected")), f"arithmetic[{index}]"
        return Example(
            messages(config.system_prompt, f"{expression}="), answer, solution=answer, place=place, rejected=str(wrong)
        )

    train = [*map(make, range(min(problems - heldout, MOST)))]
    heldout_problems = [*map(make, range(problems - heldout, problems))]
    return Task(config.name, train, heldout_problems, content=content_of([*train, *heldout_problems]))


def permute_index(index: int, size: int, key: str = "") -> int:
    """The image of `index` under a pseudo-random permutation of range(size), keyed by `key`; nothing is stored.

    `size` has no limit; Grain's shuffle is limited to 2**63. Four Feistel rounds permute the next power of four, and
    are repeated until the result is in range. Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
    section 3.
    """
    half = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    keyed = hashlib.blake2b(key.encode(), digest_size=16)
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            mixer = keyed.copy()
            mixer.update(turn.to_bytes(1, "little") + right.to_bytes(16, "little"))
            left, right = right, left ^ (int.from_bytes(mixer.digest(), "little") & mask)
        index = left << half | right
        if index < size:
            return index


def near(number: int, choice: int) -> int:
    """A different number, off by at most 9, and negative only if `number` is negative."""
    distance = 1 + choice // 2 % 9
    return number - distance if choice % 2 and not 0 <= number < distance else number + distance


def arithmetic_problem(number: int, shape: ArithmeticConfig) -> tuple[str, str]:
    """Problem `number` and its answer; the number's digits, in mixed radix, are the operands and operators."""
    operators = "".join(dict.fromkeys(shape.operators))
    number, operand = divmod(number, 10**shape.digits)
    expression = str(operand)
    total, product = 0, operand
    for _ in range(shape.operands - 1):
        number, choice = divmod(number, len(operators))
        number, operand = divmod(number, 10**shape.digits)
        expression += f"{operators[choice]}{operand}"
        if operators[choice] == "*":
            product *= operand
        else:
            total, product = total + product, operand if operators[choice] == "+" else -operand
    return expression, str(total + product)
