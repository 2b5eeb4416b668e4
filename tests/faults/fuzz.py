"""Feeds what nobody would write to the readers of input: tests/faults/fuzz.py [--seconds 600] [--target NAME ...]

    yaml        the text of a configuration file
    settings    a configuration that was valid, changed in some places
    overrides   key=value
    chats       JSON lines of messages, or questions and answers, up to batches of tokens
    gsm8k       the files of the task of that name, up to prompts in tokens
    model       a model's config.json, and the header and index of its safetensors
    answers     completions, to what reads the answer out of them

Each must take its input, or refuse it in one line, within two seconds of processor time; what it takes must survive
being written and read again, or equal what a dumber reader finds. Anything else is a fault, and is shown with the
smallest input that does it. The time is shared alike; the same seed tries the same inputs.

Exit codes: 0 no fault, 1 faults, 2 something that you can mend (one line says what).
"""

import argparse
import importlib.util
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # a script sees only its own folder
from mllm.errors import ArgumentParser, UserError

if importlib.util.find_spec("hypothesis"):
    import fuzz_targets
    from fuzz_engine import Tally, fuzz


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="in total (default 600)")
    parser.add_argument("--target", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default 0)")
    parser.add_argument("--messages", action="store_true", help="list what was said of the inputs that were refused")
    try:
        options = parser.parse_args(arguments)
        if importlib.util.find_spec("hypothesis") is None:
            raise UserError("fuzzing needs the package hypothesis: pip install -e '.[dev]'")
        if not 0 < options.seconds < float("inf"):
            raise UserError(f"--seconds: {options.seconds:g}: expected a number above 0")
        names = options.target or list(fuzz_targets.TARGETS)
        if unknown := [name for name in names if name not in fuzz_targets.TARGETS]:
            raise UserError(f"--target: there is no {unknown[0]!r}; there are {', '.join(fuzz_targets.TARGETS)}")
        tallies = run(names, options.seconds, options.seed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(tallies, options.messages)))
    return 1 if any(tally.faults for tally in tallies) else 0


def run(names: Sequence[str], seconds: float, seed: int) -> "list[Tally]":
    begin, tallies = time.monotonic(), []
    with tqdm(total=round(seconds), unit="s", dynamic_ncols=True, leave=False) as bar:

        def tell() -> None:
            bar.update(int(min(time.monotonic() - begin, seconds)) - bar.n)

        for name in names:
            bar.set_description(name)
            tallies.append(fuzz(fuzz_targets.TARGETS[name], seconds / len(names), seed, tell))
    return tallies


def table(tallies: "Sequence[Tally]", messages: bool = False) -> Iterator[str]:
    yield f"{'target':10} {'inputs':>9} {'accepted':>9} {'refused':>9} {'messages':>9} {'faults':>7}"
    for tally in tallies:
        refused = tally.refused.total()
        figures = f"{tally.tried:9,} {tally.accepted:9,} {refused:9,} {len(tally.refused):9} {len(tally.faults):7}"
        yield f"{tally.target:10} {figures}"
    for tally in tallies:
        for fault, (said, smallest) in tally.faults.items():
            yield f"\nFAULT in {tally.target}: {fault}: {said:.300}\n    input: {smallest:.1000}"
        if messages:
            yield f"\n{tally.target}"
            yield from (f"{count:9,} {said}" for said, count in tally.refused.most_common())


if __name__ == "__main__":
    logging.getLogger("mllm").setLevel(logging.ERROR)  # readers warn of what they skip
    sys.exit(main())
