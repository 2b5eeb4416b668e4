"""Shows what a GRPO run's completions earned: python tools/samples.py RUN

Writes RUN/samples.html, one page without anything from the network: filtered by step, reward and text, sorted, and a
prompt's completions side by side between steps. With --print the newest go to the terminal instead.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path

from pydantic import BaseModel, FiniteFloat, ValidationError

from mllm import errors
from mllm.errors import UserError
from mllm.store.run_store import RunStore, tool_run

LARGEST = 16 * 2**20
"""The most bytes of samples that a page holds; a browser opens it at once."""


class Turn(BaseModel):
    """A message after the prompt of a conversation; the reward is None where it has none of its own."""

    role: str
    content: str
    reward: FiniteFloat | None = None
    tool_errors: int = 0


class Sample(BaseModel):
    """A line of samples.jsonl; None for a reward that failed or does not apply, and for what an older run lacks."""

    step: int
    prompt: str
    completion: str
    rewards: dict[str, FiniteFloat | None]
    reward: FiniteFloat | None = None
    advantage: FiniteFloat | None
    length: int | None = None
    truncated: bool = False
    turns: list[Turn] = []


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a run_dir")
    parser.add_argument("--print", action="store_true", help="to the terminal, instead of a page")
    parser.add_argument("--step", type=int, help="with --print: only this step's")
    parser.add_argument("--prompt", metavar="TEXT", help="with --print: only prompts that contain the text")
    parser.add_argument("--limit", type=int, help="with --print: at most so many, the newest; default: 10")
    options = parser.parse_args(arguments)
    for name in () if options.print else ("step", "prompt", "limit"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name}: is for --print; the page has filters of its own")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit: {options.limit}: expected 1 or more")
    run = tool_run(options.run)
    samples = read(run)
    if options.print:
        print_newest(samples, options.step, options.prompt or "", options.limit or 10)
    else:
        write_page(samples, run)
    return 0


def read(run: RunStore) -> list[Sample]:
    """The complete lines of a run's samples.jsonl; UserError where there are none, or one is damaged."""
    if not (lines := run.read_log("samples.jsonl").split(b"\n")[:-1]):
        way_out = "give the run_dir of a GRPO run whose log.samples is not 0"
        raise UserError(f"{run}: no samples.jsonl with a line in it; {way_out}")
    samples = []
    for number, line in enumerate(lines, 1):
        try:
            samples.append(Sample.model_validate_json(line))
        except ValidationError as error:
            reason = error.errors()[0]
            fault = ": ".join(filter(None, (".".join(map(str, reason["loc"])), reason["msg"])))
            raise UserError(f"{run}/samples.jsonl: damaged: line {number}: {fault}") from None
    return samples


def write_page(samples: list[Sample], run: RunStore) -> None:
    """Write RUN/samples.html with the newest samples that fit, at least one, and say where it is and what it lacks."""
    ends = accumulate(len(embedded(sample.model_dump())) for sample in reversed(samples))
    held = samples[-max(1, sum(end <= LARGEST for end in ends)) :]
    left_out = len(samples) - len(held)
    data = {"run": str(run), "left_out": left_out, "samples": [sample.model_dump() for sample in held]}
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8").replace("DATA", embedded(data))
    path = run.folder / "samples.html"
    try:
        path.unlink(missing_ok=True)  # in another's run it may be a link that leads anywhere
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written ({error})") from None
    print(f"{'samples':<18} {path} ({len(held):,} completions" + f", {left_out:,} left out" * bool(left_out) + ")")


def embedded(data: object) -> str:
    """The JSON of data as a page's script element may hold it: ASCII, and without the "<" that could end the script."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def print_newest(samples: list[Sample], step: int | None, prompt: str, limit: int) -> None:
    """Print samples of a step, or of all, whose prompt contains a text: the newest, of which the last is the last."""
    found = [sample for sample in samples if step in (None, sample.step) and prompt in sample.prompt]
    if not found:
        raise UserError(f"no sample of {len(samples):,} has this --step and --prompt")
    for sample in found[-limit:]:
        numbers = {"reward": sample.reward, **sample.rewards, "advantage": sample.advantage}
        shown = [f"{name} {'null' if x is None else f'{x:.3f}'}" for name, x in numbers.items()]
        shown += [f"length {sample.length}"] * (sample.length is not None) + ["cut off"] * sample.truncated
        print(errors.printable(f"step {sample.step}  {'  '.join(shown)}"))
        texts = [*chain(*map(lines_of, sample.turns))] or [("completion", sample.completion)]
        for name, text in [("prompt", sample.prompt), *texts]:
            for number, line in enumerate(text.split("\n")):
                print(errors.printable(f"  {'' if number else name:<10}  {line}"))
        print()
    print(f"{min(limit, len(found)):,} of {len(found):,}")


def lines_of(turn: Turn) -> Iterator[tuple[str, str]]:
    """The text of a turn, its reward and the number of its tool errors, where it has them, with their names."""
    yield turn.role, turn.content
    if turn.reward is not None:
        yield "reward", f"{turn.reward:.3f}"
    if turn.tool_errors:
        yield "errors", str(turn.tool_errors)


if __name__ == "__main__":
    errors.run_main(main)
