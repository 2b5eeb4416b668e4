"""Tries a configuration's rewards without a model: python tools/rewards.py CONFIG [SAMPLES.jsonl]

The first problems are answered twice: as their task wants it, and with nothing. SAMPLES.jsonl gives other completions:
a run's samples.jsonl, or any lines with `prompt`, which is a problem's of the task, and `completion`.

Exit codes: 0 every reward gave its numbers, 1 one failed, 2 an error that one line explains.
"""

import logging
import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from mllm import errors
from mllm.config import load as configs
from mllm.config.model import ModelConfig
from mllm.config.task import ChatTemplate
from mllm.data.formats import text
from mllm.data.prompts import prompt_of
from mllm.data.records import Origin, Record, read_records, sound_records
from mllm.data.tasks.answers import STATED
from mllm.data.tasks.load import load as load_task
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError, printable
from mllm.model.tokenizer import Renderer, Tokenizer, bytes_tokenizer, encode
from mllm.rewards.calls import Sample
from mllm.rewards.runner import RewardRunner
from mllm.rewards.scores import FAILURES, reward_metrics, totals

log = logging.getLogger(__name__)

PROBLEMS, MOST_SEARCHED, SHOWN = 4, 10**6, 8
"""How many training problems are answered without samples, and searched for their prompts; completions shown."""


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or its name in configs/")
    more = "completions (else right and empty ones), and settings that replace the file's"
    parser.add_argument("more", metavar="SAMPLES.jsonl | key.sub=value", nargs="*", help=more)
    options = parser.parse_args(arguments)
    overrides = [word for word in options.more if "=" in word and not Path(word).exists()]
    file, *others = [word for word in options.more if word not in overrides] or [None]
    if others:
        raise UserError(f"{others[0]}: give one file of samples")
    config = configs.load(options.config, overrides)
    if config.task is None or config.rollout is None:
        raise UserError(f"{options.config}: no sections task and rollout: give the configuration of a run with rewards")
    if config.task.environment and not config.task.rewards:
        play = f"tools/generate.py --environment {config.task.environment} plays one"
        raise UserError(f"task.environment: its reward is given in a conversation, and no function gives one; {play}")
    task = load_task(config.task.of_run(config.eval is not None))
    most = config.rollout.sampled_length
    pairs = completed(task, file) if file else answered(task.train[:PROBLEMS])
    tokenizer = tokenizer_of(config.model)
    rule: ChatTemplate = "always" if tokenizer.chat_template and config.chat_template != "never" else "never"
    renderer = Renderer(tokenizer, rule, config.task.template_args or {})
    samples = []
    for example, completion in pairs:
        ids = [*encode(tokenizer, completion), tokenizer.eos_token_id or 0]
        thinks = rule == "always" and prompt_of(renderer, example).thinks
        samples.append(Sample(example, completion, array("i", ids[:most]), len(ids) > most, thinks))
    with RewardRunner(config.task, task, most, lambda: None) as rewards:
        answers = rewards.score(samples)
    failed = any(kind in FAILURES for row in answers for kind, *_ in row)
    for sample, row, total in zip(samples[:SHOWN], answers, totals(answers, rewards.weights)[0], strict=False):
        lines = [("prompt", sample.example.question), ("completion", sample.completion)]
        for name, (kind, result, *logged) in zip(rewards.names, row, strict=True):
            shown = f"{result:.3f}" if kind == "value" else f"{kind} {result}"
            lines.append((name, "  ".join([shown, *(f"{column}: {value}" for _, column, value in logged)])))
        for name, value in (*lines, ("reward", f"{total:.3f}")):
            print(f"{name:<20} {printable(value)}")
        print()
    if len(samples) > SHOWN:
        print(f"the first {SHOWN} of {len(samples)} completions; of all:")
    for metric, number in reward_metrics(rewards.names, answers).items():
        if number or metric.rpartition("/")[2] not in FAILURES:
            print(f"{printable(metric):<40} {number:.3g}")
    return int(failed)


def answered(problems: Sequence[Example]) -> list[tuple[Example, str]]:
    """Each problem with its solution, or its answer in the form that the task wants, and with an empty completion."""
    right = [problem.solution or STATED[problem.answer_form].format(problem.answer or "") for problem in problems]
    return [(problem, completion) for problem, good in zip(problems, right, strict=True) for completion in (good, "")]


def completed(task: Task, file: str) -> list[tuple[Example, str]]:
    """The samples in a file, each with the first problem of its prompt; UserError for a bad sample, or one without."""

    def read(record: Record) -> tuple[str, str]:
        if not isinstance(record.get("completion"), str):
            raise UserError("completion must be a string")
        return text(record, "prompt"), record["completion"]

    lines = read_records(Origin("SAMPLES.jsonl", file).records(), read)
    samples = [pair for _, pair in sound_records(lines, "SAMPLES.jsonl")]
    if not samples:
        raise UserError(f"{file}: there is no sample in it")
    wanted, examples = {prompt for prompt, _ in samples}, dict[str, Example]()
    for example in chain(task.heldout, task.test or (), task.train[:MOST_SEARCHED]):
        if example.question in wanted:
            examples.setdefault(example.question, example)
        if len(examples) == len(wanted):
            break
    if unknown := wanted - examples.keys():
        raise UserError(f"{file}: task {task.name} has no problem with the prompt {min(unknown)!r}: remove it")
    return [(examples[prompt], completion) for prompt, completion in samples]


def tokenizer_of(model: ModelConfig) -> Tokenizer:
    """The model's tokenizer; bytes where the model isn't there yet."""
    from mllm.model.load import find_model, find_tokenizer

    try:
        folder, _ = find_model(model)
        return find_tokenizer(model, folder)
    except UserError as error:
        log.warning("length and completion_ids are those of the text's bytes: %s", error)
        return bytes_tokenizer()


if __name__ == "__main__":
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]  # its rewards.py would hide a user's own
    errors.run_main(main)
