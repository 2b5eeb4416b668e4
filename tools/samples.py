"""Shows the examples that a run will learn from, and the rewards of its completions.

    python tools/samples.py --config NAME [key.sub=value ...]
    python tools/samples.py RUN

With --config the first examples are printed before any training, with learned tokens between ⟦ and ⟧. SFT and
distillation have whole examples, DPO pairs, and GRPO prompts without the additions of environments and tools.

For a GRPO run RUN/samples.html is written, one page without anything from the network. Completions can be filtered by
step, reward and text, sorted, and compared side by side between steps.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm import errors
from mllm.errors import UserError
from mllm.run.store import RunStore, tool_run

if TYPE_CHECKING:
    from mllm.model.tokenizer import Renderer

EXAMPLES, SEARCHED = 3, 100
"""The number of examples shown of a source, and searched for: some may have nothing to learn."""
LARGEST = 16 * 2**20
"""The most bytes of samples that a page holds; a browser opens it at once."""


WRITTEN = {"step", "prompt", "completion", "rewards", "reward", "advantage"}
"""The fields of every line of samples.jsonl; a conversation has `turns` as well."""
Sample = dict[str, Any]


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run_dir; with --config a setting")
    parser.add_argument("--config", metavar="NAME", help="a path, or a file in configs/: prints its first examples")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="with --config: settings that replace the file's"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.config:
        for line in examples(options.config, [*filter(None, [options.run]), *options.overrides]):
            print(line)
        return 0
    if options.run is None or options.overrides:
        raise UserError("RUN: give one run_dir, or --config with a configuration's name")
    run = tool_run(options.run)
    write_page(read(run), run)
    return 0


def examples(name: str, overrides: Sequence[str]) -> Iterator[str]:
    """Lines on the first examples that a configuration trains on; UserError for a bad example."""
    from mllm.algorithms.documents import load_documents, origin_of
    from mllm.config import load as configs
    from mllm.data.prompts import task_renderer
    from mllm.data.records import sound_records
    from mllm.data.tasks.load import load as load_task
    from mllm.data.tokenizing import Document, Skipped, encode_records
    from mllm.model import peft
    from mllm.model.load import find_learned, find_model, find_tokenizer
    from mllm.model.tokenizer import Renderer, encode_prompt

    config = configs.load(name, overrides)
    folder, _ = find_model(config.model)
    renderer = Renderer(find_tokenizer(config.model, folder), config.chat_template)
    task = load_task(config.task.of_run(config.eval is not None)) if config.task else None
    if config.task and task and (config.examples is None or config.examples.source == "task"):
        adapters = peft.chosen(config.model.lora, ())[1] if config.model.lora else None
        learned = find_learned(config.model, folder, adapters, renderer.tokenizer)
        renderer = task_renderer(config.task, task, renderer, learned)
    if config.examples is None:
        for example in task.train[:EXAMPLES] if task else ():
            prompt = encode_prompt(renderer, example.prompt)
            yield from described(renderer, "prompt", prompt, [False] * len(prompt))
        return
    pairs = config.algorithm == "dpo"
    if config.examples.source == "task":
        documents = load_documents(config.examples.model_copy(update={"validation": None}), renderer, task, pairs)[0]
        first = [documents[index] for index in range(min(EXAMPLES, len(documents)))]
    else:
        first = []
        for entry in config.examples.mix or (config.examples,):
            origin = origin_of("data.source", entry.source, entry.subset, entry.split)
            records, columns = islice(origin.records(), SEARCHED), entry.columns or config.examples.columns
            encoded = encode_records(renderer, config.examples.max_length, records, pairs, columns)
            sound = (result for _, result in sound_records(encoded, "data.source") if not isinstance(result, Skipped))
            first += [document for document, *_ in islice(sound, EXAMPLES)]
    if not first:
        raise UserError(f"data.max_length: nothing to learn of the first {SEARCHED} examples is within it: raise it")
    for document in first:
        if isinstance(document, Document):
            yield from described(renderer, "example", document.tokens.tolist(), document.counts.tolist())
            continue
        for name, part in document._asdict().items():
            yield from described(renderer, name, part.tokens.tolist(), part.counts.tolist())


def described(renderer: "Renderer", name: str, tokens: Sequence[int], learned: Sequence[bool]) -> Iterator[str]:
    """A line of a sequence's numbers, then its text with learned parts marked."""
    yield f"{name}: {len(tokens)} tokens, {sum(learned)} learned"
    text = ""
    for is_learned, group in groupby(zip(tokens, learned, strict=True), lambda pair: pair[1]):
        decoded = str(renderer.tokenizer.decode([token for token, _ in group]))
        text += f"⟦{decoded}⟧" if is_learned else decoded
    yield from (f"  {errors.printable(line)}" for line in text.split("\n"))
    yield ""


def read(run: RunStore) -> list[Sample]:
    """The complete lines of a run's samples.jsonl; UserError if there are no lines."""
    if samples := [{"turns": [], **line} for line in run.records("samples.jsonl") if line.keys() >= WRITTEN]:
        return samples
    way_out = "give the run_dir of a GRPO run with log.samples above 0"
    raise UserError(f"{run}: no samples.jsonl with a sample in it; {way_out}")


def write_page(samples: list[Sample], run: RunStore) -> None:
    """Write RUN/samples.html with the newest samples that fit, at least one; print its path and the omissions."""
    ends = accumulate(len(embedded(sample)) for sample in reversed(samples))
    newest = samples[-max(1, sum(end <= LARGEST for end in ends)) :]
    left_out = len(samples) - len(newest)
    data = {"run": str(run), "left_out": left_out, "samples": newest}
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8").replace("DATA", embedded(data))
    path = run.folder / "samples.html"
    try:
        path.unlink(missing_ok=True)  # in another's run it may be a link that leads anywhere
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written ({error})") from None
    print(f"{'samples':<18} {path} ({len(newest):,} completions" + f", {left_out:,} left out" * bool(left_out) + ")")


def embedded(data: object) -> str:
    """The JSON of data as a page's script element may hold it: ASCII, and without the "<" that could end the script."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


if __name__ == "__main__":
    errors.run_main(main)
