"""Times the trainer on one device: the phases of a step, and decoding. (tools/memory.py compares heads by memory.)

Qwen2.5 with random parameters at 0.5B and 3B shapes, by the configurations of configs/ on one device and by the
programs that train.py runs; or any configuration by --config. Two parts:

    update   seconds of a step's phases, medians of several steps: rollout, log-prob pass, update; the update's model
             flops (see train_child.py) over the data sheet's rate and over that of a large bfloat16 product measured
             here. Parameters and moments are float32 (model.param_dtype=bfloat16 halves them). A step counts as many
             log-prob passes as the configuration makes, which may be none.
    decode   tokens a second, and their share of the bound: bytes of parameters, and of keys and values of the tokens
             so far, over the rate of a copy measured here. Whole completions, without their first eighth.

Each measurement has a process of its own, since running out of memory spoils a process. --json is written as the
figures become known. XLA takes the share of a GPU's memory that XLA_PYTHON_CLIENT_MEM_FRACTION says, three quarters by
default.

It has run on CPUs with a tiny model, and on no GPU. Leaves out several devices, rewards, reading data, checkpoints and
evaluation. Exit codes: 0 done, 2 an error that one line explains, 130 interrupted.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

Result = dict[str, Any]
Measure = Callable[[dict[str, Any]], Result]
"""settings -> the figures, or {"out_of_memory": reason}, or {"error": reason}."""


@errors.command
def main(arguments: Sequence[str] | None = None, measure: Measure | None = None) -> int:
    """Run the command; `measure` makes one measurement, by default in a process of its own."""
    options = parse(arguments)
    run(load_cases(options), options, measure or measure_in_child)
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
    add("--json", type=Path, metavar="FILE", help="write the figures there too, as they become known")
    add("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    sizes = {"steps": options.steps, "matmul": options.matmul, "copy-mib": options.copy_mib}
    for name, value in (sizes | {"batches": min(options.batches)}).items():
        if value < 1:
            raise UserError(f"--{name}: {value}: expected 1 or more")
    figures.check(options.json)
    return options


def load_cases(options: argparse.Namespace) -> dict[str, "Config"]:
    """The configurations that the command line names, each on one device."""
    from mllm.config import load as configs
    from mllm.config.schema import MeshConfig

    named = {options.config: (options.config, ())} if options.config else {name: CASES[name] for name in options.cases}
    return {
        Path(name).stem: configs.load(path, [*changes, *options.overrides]).model_copy(update={"mesh": MeshConfig()})
        for name, (path, changes) in named.items()
    }


def run(cases: Mapping[str, "Config"], options: argparse.Namespace, measure: Measure) -> None:
    """Measure the device, then the cases, and print the tables.

    Raises:
        UserError: the device can't be measured.
    """
    device = measure({"what": "device", "matmul": options.matmul, "copy_mib": options.copy_mib})
    if "matmul_flops" not in device:
        raise UserError(f"the device can't be measured: {device.get('error') or device['out_of_memory']}")
    print(about(device), flush=True)
    results: dict[str, Result] = {}
    try:
        for name, settings in planned(cases, options).items():
            start = time.monotonic()
            result = measure(settings)
            said = f"failed ({result['error']})" if "error" in result else "done"
            if "out_of_memory" in result:
                said = f"out of memory ({result['out_of_memory']})"
            print(f"{name}: {said}, {time.monotonic() - start:.0f} s", flush=True)
            if "error" not in result:
                results[name] = result
            command = shlex.join(["python", *sys.argv])
            figures.write(options.json, {"command": command, "device": device, "results": results})
    finally:
        print(report(device, results))


def planned(cases: Mapping[str, "Config"], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The settings of each measurement, by its name: a part and a case."""
    jobs: dict[str, dict[str, Any]] = {}
    for name, config in cases.items() if "update" in options.parts else ():
        jobs[f"update {name}"] = {"what": "update", "config": config.model_dump(mode="json"), "steps": options.steps}
    for name, config in cases.items() if "decode" in options.parts else ():
        for rows in options.batches if config.rollout else ():
            rollout = config.rollout.model_copy(update={"batch_size": rows})
            changed = config.model_copy(update={"rollout": rollout}).model_dump(mode="json")
            jobs[f"decode {name}, {rows} rows"] = {"what": "decode", "config": changed}
    return jobs


def measure_in_child(settings: dict[str, Any]) -> Result:
    ended = child_process.run([sys.executable, "-m", "tools.bench.train_child", json.dumps(settings)], cwd=ROOT)
    if ended.code == 0 and ended.answer is not None:
        return ended.answer
    return {"out_of_memory" if machine.is_out_of_memory(ended.reason) else "error": ended.reason}


# --- the tables

GIB = 2**30
NONE = "-"


def report(device: Result, results: Mapping[str, Result]) -> str:
    """Tables in Markdown of all that was measured; a part without measurements is left out."""
    columns = "rows x tokens|micro|attention|rollout s|log-prob s|update s|step s|tokens/s of a step|of the update|"
    columns += "TFLOP/s|MFU, data sheet|MFU, measured product|peak GiB"
    updates = table("update", columns, results, update_row, device)
    columns = "prompt + completion|prefill s|ms a step|tokens/s|bound, tokens/s|of the bound|peak GiB"
    decoding = table("decode", columns, results, decode_row, device)
    return "\n\n".join(["", about(device), *filter(None, (updates, decoding))])


def about(device: Result) -> str:
    peak = f", {device['peak_flops'] / 1e12:.0f} TFLOP/s by the data sheet" if device["peak_flops"] else ""
    product = f"{device['matmul_flops'] / 1e12:.3g} TFLOP/s by a bfloat16 product of {device['matmul']} cubed"
    copy = f"{device['copy_bytes'] / 1e12:.3g} TB/s by a copy, read and written"
    memory = f"a program may have {device['memory'] / GIB:.1f} GiB"
    return f"{device['kind']}, jax {device['jax']}{peak}; measured: {product}, {copy}; {memory}"


def update_row(device: Result, result: Result) -> Sequence[str]:
    seconds, tokens = result["seconds"], result["rows"] * result["length"]
    step = seconds["update"] + seconds.get("rollout", 0) + result["logprob_passes"] * seconds.get("logprob", 0)
    rate = result["flops"] / seconds["update"]
    return [
        f"{result['rows']} x {result['length']}",
        str(result["micro"]),
        result["attention"],
        *(f"{seconds[phase]:.3f}" if phase in seconds else NONE for phase in ("rollout", "logprob", "update")),
        f"{step:.3f}",
        f"{tokens / step:,.0f}",
        f"{tokens / seconds['update']:,.0f}",
        f"{rate / 1e12:.3g}",
        f"{rate / device['peak_flops']:.1%}" if device["peak_flops"] else NONE,
        f"{rate / device['matmul_flops']:.1%}",
        gib(result["peak_bytes"]),
    ]


def decode_row(device: Result, result: Result) -> Sequence[str]:
    turns = result["turns"]
    bounds = [turn["bytes"] / device["copy_bytes"] for turn in turns]
    share = statistics.median(bound / turn["seconds"] for bound, turn in zip(bounds, turns, strict=True))
    steps, seconds = sum(turn["steps"] for turn in turns), sum(turn["seconds"] for turn in turns)
    return [
        f"{result['prompt']} + {result['completion']}",
        f"{result['prefill_seconds']:.3f}",
        f"{1e3 * seconds / steps:.2f}",
        f"{result['rows'] * steps / seconds:,.0f}",
        f"{result['rows'] * steps / sum(bounds):,.0f}",
        f"{share:.1%}",
        gib(result["peak_bytes"]),
    ]


def table(
    part: str,
    header: str,
    results: Mapping[str, Result],
    cells: Callable[[Result, Result], Iterable[str]],
    device: Result,
) -> str:
    """The results of a part as a table in Markdown; "" if there are none."""
    columns = [part, *header.split("|")]
    found = {name.removeprefix(f"{part} "): x for name, x in results.items() if name.startswith(f"{part} ")}
    lines = [" | ".join(columns), " | ".join(["---"] + ["---:"] * (len(columns) - 1))]
    for name, result in found.items():
        short = ["out of memory", *[NONE] * (len(columns) - 2)]
        lines.append(" | ".join([name, *(short if "out_of_memory" in result else cells(device, result))]))
    return "\n".join(f"| {line} |" for line in lines) if found else ""


def gib(count: int | None) -> str:
    return NONE if count is None else f"{count / GIB:.2f}"


if __name__ == "__main__":
    errors.run_main(main)
