"""The trainer on one device: python tools/bench/train.py [--parts update decode memory] [--json FILE --limit SECONDS]

Qwen2.5 of random parameters at 0.5B and 3B shapes, by the configurations of configs/ on one device and by the programs
that train.py runs; or any configuration by --config. Three parts:

    update   a step's phases in seconds, medians of several steps: rollout, log-prob pass, update; the update's model
             flops (bench_train_work.py says what counts) over the data sheet's rate, and over that of a large bfloat16
             product measured here. Parameters and moments in float32; where that runs out of memory, in bfloat16.
             The step counts the log-prob passes that the configuration asks for, which may be none.
    decode   tokens a second, and what part that is of the bound: bytes of parameters, and of keys and values of the
             tokens so far, over the rate of a copy measured here. Whole completions, without their first eighth.
    memory   the peak of an update of two micro-batches with full logits (head.impl=reference) and with the fused head,
             and the largest micro-batch: from the configured one on doubled or halved, then bisected to an eighth.

Each measurement is made in a process of its own (bench_train_child.py says on what data), since running out of memory
spoils a process. --json is written as it goes; the same command goes on where a limit stopped it. XLA's share of a
GPU's memory is what XLA_PYTHON_CLIENT_MEM_FRACTION says, three quarters by default. So for a device that can be
had for ten minutes at a time, this command, again until no limit stops it:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python tools/bench/train.py --json bench_train.json --limit 570

It was run on CPUs, with a tiny model; no GPU has run it.

Left out: several devices, rewards, reading data, checkpoints, evaluation.

Exit codes: 0 done, or stopped by --limit, 2 something that you can mend (one line says what), 130 interrupted.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mllm.config import load as configs
from mllm.config.schema import Config, MeshConfig
from mllm.errors import ArgumentParser, UserError

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # a script sees only its own folder
from tools import figures
from tools.bench import train_table as bench_train_table
from tools.bench.train_jobs import Jobs, Measure, OutOfTime, Result, in_process_of_its_own

GRPO = ("model.init=random", "mesh.fsdp=1", "batch_size=128", "grpo.num_generations=8", "rollout.batch_size=128")
SFT = ("model.init=random", "batch_size=32")
CASES = {
    "0.5B-sft": ("qwen25_3b_sft.yaml", (*SFT, "model.source=Qwen/Qwen2.5-0.5B", "micro_batch_size=16")),
    "0.5B-grpo": ("qwen25_0p5b_grpo.yaml", (*GRPO, "micro_batch_size=32")),
    "3B-sft": ("qwen25_3b_sft.yaml", (*SFT, "micro_batch_size=4")),
    "3B-grpo": ("qwen25_3b_grpo.yaml", (*GRPO, "micro_batch_size=8")),
}
"""A name, the configuration and what is changed in it."""
PARTS = ("update", "decode", "memory")
HEADS = ("reference", "fused")
BATCHES = (32, 128, 256)
TRIES = 6
"""Of a search, about."""


class Case(NamedTuple):
    name: str
    config: Config


class Failed(Exception):
    """A measurement came to nothing, and memory was not the reason."""


class Largest(NamedTuple):
    """What a search came to."""

    rows: int
    """Of the largest micro-batch that fits; 0: none does."""
    refused: int | None
    """Of the smallest one tried that doesn't; None: all did, up to the bound."""


def main(arguments: Sequence[str] | None = None, measure: Measure = in_process_of_its_own) -> int:
    """`measure`: how one measurement is made."""
    try:
        options = parse(arguments)
        cases = [one_device(name, path, changes) for name, path, changes in chosen(options)]
        jobs = Jobs(options.json, shlex.join(["python", *sys.argv]), options.limit, measure)
        try:
            run(jobs, cases, options)
        except OutOfTime:
            print(f"--limit: {options.limit:g} s are over; with --json the same command goes on", flush=True)
        except KeyboardInterrupt:
            return 130
        finally:
            print(bench_train_table.show(jobs.device, jobs.recorded))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cases", nargs="+", choices=CASES, default=tuple(CASES), help="(default: all)")
    which.add_argument("--config", metavar="NAME", help="instead: a path, or a file in configs/")
    parser.add_argument("--steps", type=int, default=3, help="timed, after one that isn't (default 3)")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=BATCHES, metavar="ROWS", help="to decode (default 32 128 256)"
    )
    parser.add_argument(
        "--most-rows", type=int, default=1024, metavar="ROWS", help="largest micro-batch to try (default 1024)"
    )
    parser.add_argument("--matmul", type=int, default=8192, metavar="N", help="N x N x N, to measure (default 8192)")
    parser.add_argument("--copy-mib", type=int, default=1024, metavar="MIB", help="to copy (default 1024)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop then, in good order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there, and go on from it")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    for name in ("steps", "most_rows", "matmul", "copy_mib", "limit"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')}: {value}: expected more than 0")
    if min(options.batches) < 1:
        raise UserError(f"--batches: {min(options.batches)}: expected 1 or more")
    figures.check(options.json)
    return options


def chosen(options: argparse.Namespace) -> list[tuple[str, str, tuple[str, ...]]]:
    """Name, configuration and changes of each case."""
    own = tuple(options.overrides)
    if options.config:
        return [(Path(options.config).stem, options.config, own)]
    return [(name, CASES[name][0], (*CASES[name][1], *own)) for name in dict.fromkeys(options.cases)]


def one_device(name: str, path: str, changes: Sequence[str]) -> Case:
    config = configs.load(path, changes)
    return Case(name, config.model_copy(update={"mesh": MeshConfig()}))


def run(jobs: Jobs, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Raises OutOfTime at the limit."""
    sampled = [case for case in cases if case.config.rollout is not None]
    expected = {"update": len(cases), "decode": len(sampled) * len(options.batches), "memory": len(cases) * 2 * TRIES}
    jobs.expected = sum(expected[part] for part in options.parts)
    jobs.find_device({"matmul": options.matmul, "copy_mib": options.copy_mib})
    print(bench_train_table.about(jobs.device), flush=True)
    for part in PARTS:
        if part not in options.parts:
            continue
        for case in cases if part != "decode" else sampled:
            if part == "update":
                update(jobs, case, options.steps)
            elif part == "decode":
                for rows in dict.fromkeys(options.batches):
                    decode(jobs, case, rows)
            else:
                for head in HEADS:
                    search(jobs, case, head, options.most_rows)


def update(jobs: Jobs, case: Case, steps: int) -> None:
    """With the parameters as configured; if that is too much and they are in float32, in bfloat16."""

    def measured(config: Config) -> Result:
        settings = {"what": "update", "config": config.model_dump(mode="json"), "steps": steps}
        return jobs.result(f"update {case.name}, {config.model.param_dtype} masters", settings)

    model = case.config.model
    if "out_of_memory" in measured(case.config) and model.param_dtype == "float32":
        narrow = model.model_copy(update={"param_dtype": "bfloat16"})
        measured(case.config.model_copy(update={"model": narrow}))


def decode(jobs: Jobs, case: Case, rows: int) -> None:
    assert case.config.rollout is not None
    rollout = case.config.rollout.model_copy(update={"batch_size": rows})
    config = case.config.model_copy(update={"rollout": rollout})
    settings = {"what": "decode", "config": config.model_dump(mode="json")}
    jobs.result(f"decode {case.name}, {rows} rows", settings)


def search(jobs: Jobs, case: Case, head: str, most: int) -> None:
    """Find the largest micro-batch that fits with this head; a try that fails for another reason ends it."""
    expected = jobs.expected

    def fits(rows: int) -> bool:
        settings = {"what": "fits", "config": two_of(case.config, rows, head).model_dump(mode="json"), "head": head}
        result = jobs.result(f"memory {case.name}, {head}, {rows} rows", settings)
        if "error" in result:
            raise Failed
        return "peak_bytes" in result

    try:
        found = largest(fits, case.config.micro_batch_size or case.config.batch_size, most)
    except Failed:
        pass
    else:
        jobs.record(f"largest {case.name}, {head}", {"most": most}, found._asdict())
    jobs.expected = max(expected - TRIES, 0)


def two_of(config: Config, rows: int, head: str) -> Config:
    """The configuration with micro-batches of so many rows, two in a batch, and this head."""
    changes: dict[str, Any] = {"batch_size": 2 * rows, "micro_batch_size": rows}
    if head == "reference":
        changes["head"] = config.head.model_copy(update={"impl": "reference", "workspace_mib": None})
    if config.grpo is not None:  # a group must divide the batch
        changes["grpo"] = config.grpo.model_copy(update={"num_generations": 2})
    return config.model_copy(update=changes)


def largest(fits: Callable[[int], bool], start: int, most: int) -> Largest:
    """The largest number of rows that fits: doubled or halved from `start` on, then bisected to an eighth."""
    low, high, rows = 0, None, min(start, most)
    while rows and not (low and high):
        if fits(rows):
            low, rows = rows, min(2 * rows, most)
            if low == most:
                break
        else:
            high, rows = rows, rows // 2
    while high and high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Largest(low, high)


if __name__ == "__main__":
    sys.exit(main())
