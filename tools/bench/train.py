"""Times the trainer on one device: the phases of a step, and decoding. (tools/memory.py compares heads by memory.)

Qwen2.5 with random parameters at 0.5B and 3B shapes, by the configurations of configs/ on one device and by the
programs that train.py runs; or any configuration by --config. Two parts:

    update   seconds of a step's phases, medians of several steps: rollout, log-prob pass, update; the update's model
             flops (see train_child.py) over the data sheet's rate and over that of a large bfloat16 product measured
             here. Parameters and moments are float32; where that runs out of memory, bfloat16. A step counts as many
             log-prob passes as the configuration makes, which may be none.
    decode   tokens a second, and their share of the bound: bytes of parameters, and of keys and values of the tokens
             so far, over the rate of a copy measured here. Whole completions, without their first eighth.

Each measurement has a process of its own, since running out of memory spoils a process. --json is written as the
figures become known; the same command goes on where a limit stopped it. XLA takes the share of a GPU's memory that
XLA_PYTHON_CLIENT_MEM_FRACTION says, three quarters by default. For a device that can be had for ten minutes at a time,
repeat this command until no limit stops it:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python tools/bench train --json bench_train.json --limit 570

It has run on CPUs with a tiny model, and on no GPU. Leaves out several devices, rewards, reading data, checkpoints and
evaluation. Exit codes: 0 done or stopped by --limit, 2 an error that one line explains, 130 interrupted.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mllm import child_process, errors
from mllm.errors import UserError
from tools import figures, machine

if TYPE_CHECKING:
    from mllm.config.schema import Config

ROOT = Path(__file__).parent.parent.parent
GRPO = ("model.init=random", "mesh.fsdp=1", "batch_size=128", "grpo.num_generations=8", "rollout.batch_size=128")
SFT = ("model.init=random", "batch_size=32")
CASES = {
    "0.5B-sft": ("qwen25_3b_sft.yaml", (*SFT, "model.source=Qwen/Qwen2.5-0.5B", "micro_batch_size=16")),
    "0.5B-grpo": ("qwen25_0p5b_grpo.yaml", (*GRPO, "micro_batch_size=32")),
    "3B-sft": ("qwen25_3b_sft.yaml", (*SFT, "micro_batch_size=4")),
    "3B-grpo": ("qwen25_3b_grpo.yaml", (*GRPO, "micro_batch_size=8")),
}
"""The configuration of each case, and what is changed in it."""
PARTS = ("update", "decode")
SHORTEST = 15.0
"""Seconds that must be left for another measurement to begin."""

Result = dict[str, Any]
Measure = Callable[[dict[str, Any], float | None, Callable[[str], None]], Result]
"""(settings, seconds left or None, tell) -> the figures, or {"out_of_memory": reason}, or {"error": reason}."""


class OutOfTime(Exception):
    """The limit was reached, before or during a measurement."""


class Case(NamedTuple):
    name: str
    config: "Config"


@errors.command
def main(arguments: Sequence[str] | None = None, measure: Measure | None = None) -> int:
    """Run the command; `measure` makes one measurement, by default in a process of its own."""
    options = parse(arguments)
    cases = load_cases(options)
    jobs = Jobs(options.json, shlex.join(["python", *sys.argv]), options.limit, measure or measure_in_child)
    try:
        run(jobs, cases, options)
    except OutOfTime:
        print(f"--limit: {options.limit:g} s are over; with --json the same command goes on", flush=True)
    finally:
        print(report(jobs.device, jobs.recorded))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = errors.ArgumentParser(
        prog="python tools/bench train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cases", nargs="+", choices=CASES, default=tuple(CASES), help="(default: all)")
    which.add_argument("--config", metavar="NAME", help="instead: a path, or a file in configs/")
    add("--steps", type=int, default=3, help="timed, after one that isn't (default 3)")
    add("--batches", type=int, nargs="+", default=(32, 128, 256), metavar="ROWS", help="to decode (default 32 128 256)")
    add("--matmul", type=int, default=8192, metavar="N", help="size of the product that is timed (default 8192)")
    add("--copy-mib", type=int, default=1024, metavar="MIB", help="size of the copy that is timed (default 1024)")
    add("--limit", type=float, metavar="SECONDS", help="stop then, in good order")
    add("--json", type=Path, metavar="FILE", help="keep the figures there, and go on from it")
    add("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    for name in ("steps", "matmul", "copy_mib", "limit"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')}: {value}: expected more than 0")
    if min(options.batches) < 1:
        raise UserError(f"--batches: {min(options.batches)}: expected 1 or more")
    figures.check(options.json)
    return options


def load_cases(options: argparse.Namespace) -> list[Case]:
    """The configurations that the command line names, each on one device."""
    from mllm.config import load as configs
    from mllm.config.schema import MeshConfig

    named = [(name, *CASES[name]) for name in dict.fromkeys(options.cases)]
    if options.config:
        named = [(Path(options.config).stem, options.config, ())]
    loaded = [(name, configs.load(path, [*changes, *options.overrides])) for name, path, changes in named]
    return [Case(name, config.model_copy(update={"mesh": MeshConfig()})) for name, config in loaded]


def run(jobs: "Jobs", cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Raises OutOfTime at the limit."""
    jobs.measure_device({"matmul": options.matmul, "copy_mib": options.copy_mib})
    print(about(jobs.device), flush=True)
    for part in [part for part in PARTS if part in options.parts]:
        for case in cases:
            if part == "update":
                update(jobs, case, options.steps)
            elif case.config.rollout is not None:
                for rows in dict.fromkeys(options.batches):
                    decode(jobs, case, rows)


def update(jobs: "Jobs", case: Case, steps: int) -> None:
    """Time a step with the parameters as configured; if float32 ones run out of memory, with bfloat16."""

    def measured(config: "Config") -> Result:
        settings = {"what": "update", "config": config.model_dump(mode="json"), "steps": steps}
        return jobs.result(f"update {case.name}, {config.model.param_dtype} parameters", settings)

    model = case.config.model
    if "out_of_memory" in measured(case.config) and model.param_dtype == "float32":
        narrow = model.model_copy(update={"param_dtype": "bfloat16"})
        measured(case.config.model_copy(update={"model": narrow}))


def decode(jobs: "Jobs", case: Case, rows: int) -> None:
    assert case.config.rollout is not None
    rollout = case.config.rollout.model_copy(update={"batch_size": rows})
    config = case.config.model_copy(update={"rollout": rollout})
    jobs.result(f"decode {case.name}, {rows} rows", {"what": "decode", "config": config.model_dump(mode="json")})


# --- measurements and their record


def measure_in_child(settings: dict[str, Any], seconds: float | None, tell: Callable[[str], None]) -> Result:
    """Raises OutOfTime when the process had to be killed."""

    def hear(answer: Result) -> None:
        if "progress" in answer:
            tell(answer["progress"])

    command = [sys.executable, "-m", "tools.bench.train_child", json.dumps(settings)]
    ended = child_process.run(command, seconds=seconds, cwd=ROOT, tell=hear)
    if ended.late:
        raise OutOfTime
    if ended.code == 0 and ended.answer is not None:
        return ended.answer
    return {"out_of_memory" if machine.is_out_of_memory(ended.reason) else "error": ended.reason}


class Jobs:
    """The measurements of this run and of those before it, by name.

    Nothing is measured twice: what the file of an earlier run holds, with the same settings on the same device, is
    taken from there. Failures are tried again; that a program ran out of memory is a result.
    """

    def __init__(self, path: Path | None, command: str, limit: float | None, measure: Measure) -> None:
        """Raises UserError where `path` holds something else."""
        self.path = path
        self.command = command
        self.deadline = None if limit is None else time.monotonic() + limit
        self.measure = measure
        self.device: Result = {}
        self.recorded: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            from mllm.model.json_file import read_json

            before = read_json(path)
            if not isinstance(before.get("jobs"), dict) or not isinstance(before.get("device"), dict):
                raise UserError(f"--json: {path} was not written by this tool: give another file")
            self.device, self.recorded = before["device"], before["jobs"]

    def measure_device(self, settings: dict[str, Any]) -> None:
        """Measure the device's rates, and compare the device with that of the file."""
        found = self.run("device", {"what": "device", **settings})
        if "matmul_flops" not in found:
            raise UserError(f"the device can't be measured: {found.get('error') or found['out_of_memory']}")
        for key, what in (("kind", "on"), ("jax", "with JAX")):
            if self.device and self.device[key] != found[key]:
                raise UserError(
                    f"--json: {self.path} was measured {what} {self.device[key]}, and this is {found[key]}: "
                    "give another file"
                )
        self.device = found
        self.write()

    def result(self, name: str, settings: dict[str, Any]) -> Result:
        """The result of a measurement, made in this run or before it.

        Raises:
            OutOfTime: the limit came first.
            UserError: the file has it with other settings.
        """
        before = self.recorded.get(name)
        if before is not None:
            if before["settings"] != settings:
                raise UserError(f"--json: {self.path} has {name} with other settings: give another file")
            return before["result"]
        start = time.monotonic()
        result = self.run(name, settings)
        said = f"failed ({result['error']})" if "error" in result else "done"
        if "out_of_memory" in result:
            said = f"out of memory ({result['out_of_memory']})"
        print(f"{name}: {said}, {time.monotonic() - start:.0f} s", flush=True)
        if "error" not in result:  # keep it, with the rates of the device at this time
            rates = {rate: self.device[rate] for rate in ("matmul_flops", "copy_bytes")}
            date = datetime.now(UTC).isoformat(timespec="seconds")
            self.recorded[name] = {"date": date, "rates": rates, "settings": settings, "result": result}
            self.write()
        return result

    def run(self, name: str, settings: dict[str, Any]) -> Result:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left < SHORTEST:
            raise OutOfTime
        return self.measure(settings, left, lambda text: print(f"  {name}: {text}", flush=True))

    def write(self) -> None:
        figures.write(self.path, {"command": self.command, "device": self.device, "jobs": self.recorded})


# --- the tables

GIB = 2**30
NONE = "-"

Results = Mapping[str, Mapping[str, Any]]
"""The results by name, each with the rates of the device at its time."""


def report(device: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables in Markdown of all that was measured; a part without measurements is left out."""
    if not device:
        return "nothing was measured"
    results = {name: job["result"] | job["rates"] for name, job in jobs.items()}
    columns = "rows x tokens|micro|attention|rollout s|log-prob s|update s|step s|tokens/s of a step|of the update|"
    columns += "TFLOP/s|MFU, data sheet|MFU, measured product|peak GiB"
    updates = table(f"update|{columns}", (update_row(device, *named) for named in part_of("update", results)))
    columns = "prompt + completion|prefill s|ms a step|tokens/s|bound, tokens/s|of the bound|peak GiB"
    decoding = table(f"decode|{columns}", (decode_row(*named) for named in part_of("decode", results)))
    return "\n\n".join(["", about(device), *filter(None, (updates, decoding))])


def about(device: Mapping[str, Any]) -> str:
    peak = f", {device['peak_flops'] / 1e12:.0f} TFLOP/s by the data sheet" if device["peak_flops"] else ""
    product = f"{device['matmul_flops'] / 1e12:.3g} TFLOP/s by a bfloat16 product of {device['matmul']} cubed"
    copy = f"{device['copy_bytes'] / 1e12:.3g} TB/s by a copy, read and written"
    memory = f"a program may have {device['memory'] / GIB:.1f} GiB"
    return f"{device['kind']}, jax {device['jax']}{peak}; measured: {product}, {copy}; {memory}"


def update_row(device: Mapping[str, Any], name: str, result: Mapping[str, Any]) -> Sequence[str]:
    if "out_of_memory" in result:
        return [name, "out of memory"]
    seconds, tokens = result["seconds"], result["rows"] * result["length"]
    step = seconds["update"] + seconds.get("rollout", 0) + result["logprob_passes"] * seconds.get("logprob", 0)
    rate = result["flops"] / seconds["update"]
    return [
        name,
        f"{result['rows']} x {result['length']}",
        str(result["micro"]),
        result["attention"],
        *(f"{seconds[phase]:.3f}" if phase in seconds else NONE for phase in ("rollout", "logprob", "update")),
        f"{step:.3f}",
        f"{tokens / step:,.0f}",
        f"{tokens / seconds['update']:,.0f}",
        f"{rate / 1e12:.3g}",
        f"{rate / device['peak_flops']:.1%}" if device["peak_flops"] else NONE,
        f"{rate / result['matmul_flops']:.1%}",
        gib(result["peak_bytes"]),
    ]


def decode_row(name: str, result: Mapping[str, Any]) -> Sequence[str]:
    if "out_of_memory" in result:
        return [name, "out of memory"]
    turns = result["turns"]
    bounds = [turn["bytes"] / result["copy_bytes"] for turn in turns]
    share = statistics.median(bound / turn["seconds"] for bound, turn in zip(bounds, turns, strict=True))
    steps, seconds = sum(turn["steps"] for turn in turns), sum(turn["seconds"] for turn in turns)
    return [
        name,
        f"{result['prompt']} + {result['completion']}",
        f"{result['prefill_seconds']:.3f}",
        f"{1e3 * seconds / steps:.2f}",
        f"{result['rows'] * steps / seconds:,.0f}",
        f"{result['rows'] * steps / sum(bounds):,.0f}",
        f"{share:.1%}",
        gib(result["peak_bytes"]),
    ]


def part_of(part: str, results: Results) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The results of a part, by their names without the part's."""
    return [(name.removeprefix(f"{part} "), result) for name, result in results.items() if name.startswith(f"{part} ")]


def table(header: str, rows: Iterable[Sequence[str]]) -> str:
    columns = header.split("|")
    lines = [f"| {' | '.join([*row, *[NONE] * (len(columns) - len(row))])} |" for row in rows]
    return (
        "\n".join([f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}", *lines]) if lines else ""
    )


def gib(count: int | None) -> str:
    return NONE if count is None else f"{count / GIB:.2f}"


if __name__ == "__main__":
    errors.run_main(main)
