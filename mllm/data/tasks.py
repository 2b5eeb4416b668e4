"""A task: problems to train on, problems held out for evaluation, and how a completion states its answer.

`arithmetic` is built in, `gsm8k` (arXiv:2110.14168) comes from a folder or the hub, `reasoning_gym:<name>` from that
package (arXiv:2505.24760). Held-out problems are the same in every run, and no training problem asks the same question.
This file does not import JAX: rewards must start fast.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from mllm.config.task import ArithmeticConfig, TaskConfig
from mllm.data.records import Record, Records, hub_rows, json_lines, text
from mllm.errors import UserError

MAX_LENGTH = 2**62
"""The length of the longest sequence: `len()` is limited to sys.maxsize, and Grain counts batches in floating point."""

HASHES = re.compile(r"#### (-?[0-9.,]+)")
"""GSM8K's own pattern of an answer (grade_school_math/dataset.py)."""
OPEN, CLOSE = "<answer>", "</answer>"

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""verl's prompt for GSM8K (examples/data_preprocess/gsm8k.py)."""
TAGS_INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>."


@dataclass(frozen=True)
class Example:
    """A problem, with what rewards and SFT need to know about it."""

    prompt: list[dict[str, str]]
    """Messages; the last is the user's."""
    answer: str
    solution: str | None
    """The completion that SFT from the task learns; None: the task has none."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`form`: how a completion states its answer, see `final_answer`; `entry`: reasoning_gym's own record."""


Scorer = Callable[[str, str, Example], float]
"""(the user's message, completion, example) -> reward. It is sent to another process, so it must pickle."""


@dataclass(frozen=True)
class Task:
    """Problems with their split, and perhaps a reward of its own."""

    name: str
    train: Sequence[Example]
    heldout: Sequence[Example]
    scorer: Scorer | None = None
    """The reward called `task`."""


class Problems(Sequence[Example]):
    """A sequence of examples that are made on demand, by `make(index)` for the indices of a range."""

    def __init__(self, make: Callable[[int], Example], indices: range) -> None:
        self.make = make
        self.indices = indices

    def __getitem__(self, index: Any) -> Any:
        chosen = self.indices[index]
        return Problems(self.make, chosen) if isinstance(chosen, range) else self.make(chosen)

    def __len__(self) -> int:
        return len(self.indices)


def load(config: TaskConfig, seed: int) -> Task:
    """The task that `config` names. `seed` only determines which problems reasoning_gym makes for training.

    UserError is raised if the data or package isn't there, a line of it is bad, or there are too few problems for
    `heldout`.
    """
    if config.name == "arithmetic":
        return arithmetic(config)
    if config.name == "gsm8k":
        return gsm8k(config)
    return reasoning_gym(config, config.name.partition(":")[2], seed)


def final_answer(completion: str, example: Example) -> str | None:
    """The answer that a completion states in the form that its task asks for; None where it states none.

    Forms: `whole`, the completion without the space around it; `hashes`, the last `#### N` as in GSM8K, without
    thousands' commas; `tags`, the content of the last <answer> element, or everything where there is none.
    """
    match example.extra.get("form", "whole"):
        case "hashes":
            found = HASHES.findall(completion)
            return found[-1].replace(",", "").rstrip(".") if found else None
        case "tags":
            return last_element(completion).strip()
        case _:
            return completion.strip()


def last_element(completion: str) -> str:
    """The content of the last <answer> element, or everything where there is none.

    A regular expression would search the rest of the text once for every <answer> that is not closed.
    """
    end, found = 0, completion
    while (start := completion.find(OPEN, end)) >= 0 and (end := completion.find(CLOSE, start)) >= 0:
        found = completion[start + len(OPEN) : end]
    return found


def arithmetic(config: TaskConfig) -> Task:
    """Sums, differences and products. The last `heldout` problems of a fixed permutation of all are held out.

    `3+4` and `4+3` are two problems. Products come before sums, as in Python.
    """
    shape = config.arithmetic or ArithmeticConfig()
    problems = 10 ** (shape.digits * shape.operands) * len(set(shape.operators)) ** (shape.operands - 1)
    if problems < 2 * config.heldout:
        raise UserError(
            f"task.heldout: {config.heldout} of arithmetic's {problems} problems leave fewer to train on: "
            f"set it to at most {problems // 2}, or raise task.arithmetic.digits or operands"
        )

    def make(index: int) -> Example:
        expression, answer = arithmetic_problem(permute_index(index, problems), shape)
        return Example(messages(config, f"{expression}="), answer, solution=answer)

    train = min(problems - config.heldout, MAX_LENGTH)
    return Task(config.name, Problems(make, range(train)), Problems(make, range(problems - config.heldout, problems)))


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


def permute_index(index: int, size: int, key: str = "") -> int:
    """The image of `index` under the pseudo-random permutation of range(size) that `key` names; nothing is stored.

    Four Feistel rounds permute the next power of four, and repeating them until the result is in range restricts the
    permutation to `size` (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 3).
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


def gsm8k(config: TaskConfig) -> Task:
    """GSM8K's own splits; the first `heldout` of its test split are held out."""
    heldout = [gsm8k_example(config, *row) for row in islice(gsm8k_rows(config, "test"), config.heldout)]
    if len(heldout) < config.heldout:
        raise UserError(f"task.heldout: gsm8k's test split has {len(heldout)} problems: set it to at most that")
    heldout_questions = {example.prompt[-1]["content"] for example in heldout}
    train = [gsm8k_example(config, *row) for row in gsm8k_rows(config, "train")]
    train = [example for example in train if example.prompt[-1]["content"] not in heldout_questions]
    if not train:
        raise UserError("task.path: gsm8k's train split has no problem that isn't held out")
    return Task(config.name, train, heldout)


def gsm8k_rows(config: TaskConfig, split: str) -> Records:
    if config.path is None:
        return hub_rows("openai/gsm8k", "main", split, key="task.path")
    return json_lines(Path(config.path) / f"{split}.jsonl", key="task.path")


def gsm8k_example(config: TaskConfig, place: str, row: Record | UserError) -> Example:
    if isinstance(row, UserError):
        raise row
    question, solution = text(place, row, "question"), text(place, row, "answer")
    prompt = messages(config, question, GSM8K_INSTRUCTION)
    example = Example(prompt, "", solution, {"form": "hashes"})
    answer = final_answer(solution, example)
    if answer is None or not re.search("[0-9]", answer):
        raise UserError(f"{place}: answer has no line '#### N' with the result")
    return replace(example, answer=answer)


def reasoning_gym(config: TaskConfig, name: str, seed: int) -> Task:
    """Problem i is made from the random number seed + i, so disjoint ranges of that sum are disjoint problems.

    The held-out problems come first; the `train_examples` of each seed follow. Where a small generator repeats a
    held-out question, its next problem is taken instead.
    """
    heldout_problems = gym(name, 0, config.heldout)
    heldout = [gym_example(config, heldout_problems[index]) for index in range(config.heldout)]
    heldout_questions = {example.prompt[-1]["content"] for example in heldout}
    count = config.train_examples
    train_problems = gym(name, config.heldout + seed * count, count)

    def make(index: int) -> Example:
        for step in range(min(count, 1000)):
            example = gym_example(config, train_problems[(index + step) % count])
            if example.prompt[-1]["content"] not in heldout_questions:
                return example
        raise UserError(f"task.heldout: {config.name} makes too few problems beside the {config.heldout}")

    return Task(config.name, Problems(make, range(count)), heldout, GymScorer(name))


@cache
def gym(name: str, seed: int, size: int) -> Any:
    """A sequence of `size` problems by reasoning_gym's generator `name`; its indices must be plain ints."""
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(
            f"task.name: reasoning_gym:{name} needs the package reasoning-gym: pip install -e '.[reasoning]'"
        ) from None
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size)
    except ValueError as error:
        raise UserError(f"task.name: reasoning_gym:{name}: {error}") from None


def gym_example(config: TaskConfig, entry: dict[str, Any]) -> Example:
    answer = str(entry["answer"])
    prompt = messages(config, entry["question"], TAGS_INSTRUCTION)
    return Example(prompt, answer, f"<answer>{answer}</answer>", {"form": "tags", "entry": entry})


@dataclass(frozen=True)
class GymScorer:
    """The generator's own score in 0 to 1, which accepts several right answers and gives part marks for near ones."""

    name: str

    def __reduce__(self) -> tuple[type["GymScorer"], tuple[str]]:
        return GymScorer, (self.name,)

    def __post_init__(self) -> None:
        gym(self.name, 0, 1)  # also where it's unpickled, so that no completion's time limit pays for the import

    def __call__(self, prompt: str, completion: str, example: Example) -> float:
        answer = final_answer(completion, example)
        return float(gym(self.name, 0, 1).score_answer(answer, entry=example.extra["entry"]))


def messages(config: TaskConfig, question: str, instruction: str | None = None) -> list[dict[str, str]]:
    """The messages of a prompt; `task.system_prompt` replaces the task's instruction."""
    if config.system_prompt is not None:
        return [{"role": "system", "content": config.system_prompt}, {"role": "user", "content": question}]
    return [{"role": "user", "content": f"{question} {instruction}" if instruction else question}]
