"""The tasks `reasoning_gym:<name>`: problems and scorers of that package (arXiv:2505.24760)."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from mllm.config.task import TaskConfig
from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.task import Example, OnDemand, Task, messages
from mllm.errors import UserError, brief, need

TRAIN_EXAMPLES = 10_000
"""Problems to train on that a seed makes."""
INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>."


def reasoning_gym(config: TaskConfig, seed: int) -> Task:
    """Problem i is made from the random number seed + i, so disjoint ranges of that sum are disjoint problems.

    The held-out problems come first; the `TRAIN_EXAMPLES` of each seed follow. Where a small generator repeats a
    held-out question, its next problem is taken instead.
    """
    name, count = config.name.partition(":")[2], TRAIN_EXAMPLES
    heldout_count = config.heldout_of(count)
    heldout_problems = gym(name, 0, max(1, heldout_count))
    heldout = [gym_example(config, heldout_problems, index) for index in range(heldout_count)]
    heldout_questions = {example.question for example in heldout}
    train_problems = gym(name, heldout_count + seed * count, count)

    def make(index: int) -> Example:
        for step in range(min(count, 1000)):
            example = gym_example(config, train_problems, (index + step) % count)
            if example.question not in heldout_questions:
                return example
        raise UserError(f"task.heldout: {config.name} makes too few problems beside the {heldout_count}")

    return Task(config.name, OnDemand(make, range(count)), heldout, scorer=GymScorer(name))


@cache
def gym(name: str, seed: int, size: int) -> Any:
    """A sequence of `size` problems by reasoning_gym's generator `name`; its indices must be plain ints."""
    need("reasoning_gym", "reasoning", f"task.name: reasoning_gym:{name}")
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size)
    except ValueError as error:
        raise UserError(f"task.name: reasoning_gym:{name}: {error}") from None


def gym_example(config: TaskConfig, problems: Any, index: int) -> Example:
    """Problem `index` of a sequence that `gym` gave; UserError where the generator fails."""
    location = f"{config.name}[{index}]"
    try:
        entry = problems[index]
        question, answer = str(entry["question"]), str(entry["answer"])
    except Exception as error:  # each generator is a program of its own
        raise UserError(f"{location}: can't be made: {type(error).__name__}: {brief(error)}") from None
    prompt = messages(config.system_prompt, question, INSTRUCTION)
    return Example(prompt, answer, f"<answer>{answer}</answer>", "tags", {"entry": entry}, place=location)


@dataclass(frozen=True)
class GymScorer:
    """The generator's own score in 0 to 1, which accepts several right answers and gives part marks for near ones."""

    name: str

    def __reduce__(self) -> tuple[type["GymScorer"], tuple[str]]:
        return GymScorer, (self.name,)

    def __post_init__(self) -> None:
        gym(self.name, 0, 1)  # also where it's unpickled, so that no completion's time limit pays for the import

    def __call__(self, prompt: str, completion: str, example: Example) -> float:
        answer = final_answer(completion, example.answer_form)
        return float(gym(self.name, 0, 1).score_answer(answer, entry=example.fields["entry"]))
