"""Finds tile sizes for the head's kernels by timing them on this machine's TPU or Hopper GPU.

    python tools/tune.py --shape 8192,2048,151936           print a table
    python tools/tune.py --shape 8192,2048,151936 --write   and note the best in kernels/lm_head/tpu or gpu/tiles.json

Each tiling is tried as it will run once it is noted: programs of the head are compiled with it, their results on random
data are compared with the xla engine's, and they are timed. The programs are the cross-entropy's value ("value"), its
value and gradients without a workspace ("no workspace") and with 640 MiB ("workspace"), and the same with an entropy
bonus ("entropy"). A tiling that is wrong, fails or hangs is listed with the reason and never noted.

On a TPU an entry is for a chip, a kernel, a dtype and a hidden size, and each kernel has one program that decides. On a
GPU an entry is for a device and a hidden size: tiles first, then, with the fastest tiles, chunks of the vocabulary
smaller than the kernels' rule takes. "no workspace" and "value" together decide.

The trials have a process of their own (tune_child.py), which is started anew after a kernel that crashed or hung. Not
tried are several devices, rows that don't count, and weights of another dtype than the hidden states.

Exit codes: 0 done, 2 an error that one line explains, such as no TPU or Hopper GPU.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from mllm import child_process, errors
from mllm.errors import UserError
from tools.bench.head import shape_of

KINDS = {
    "statistics": ("forward", False, False, "value"),
    "forward": ("forward", True, False, "no workspace"),
    "wave": ("forward", True, True, "workspace"),
    "hidden": ("hidden", False, False, "entropy"),
    "weight": ("weight", False, False, "no workspace"),
}
"""For each kind of kernel on TPUs: its name, whether it sums p W, whether it keeps probabilities, the program that
decides."""
ON_GPU = ("no workspace", "value", "workspace")
"""The programs of a trial on a GPU; the first two decide."""
SUBJECT = ("engine", "device", "kernel", "mean", "keep", "dtype", "features")
"""The keys of an entry that say what it is for."""
CLEARLY = 0.015
"""The share of the time that a chunk must save to be noted."""
PATIENCE = 180.0
"""Seconds that a trial may take, with compiling."""
Entry = dict[str, Any]
"""An entry of a table: what it is for, and its tiles."""
Trial = dict[str, Any]
"""An entry, and either seconds and errors or a `refusal`."""


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    deadline = time.monotonic() + (options.limit or math.inf)
    shape, kinds = list(options.shape), options.kernel or list(KINDS)
    settings = {"shape": shape, "dtype": options.dtype, "kinds": kinds, "most": options.most}
    found = ask({"task": "plan", **settings})
    table = options.table or Path(found["table"])
    noted = read_table(table)
    print(f"{found['device']}, jax {found['jax']}, {options.dtype}, N,D,V = {','.join(map(str, shape))}", flush=True)
    best: list[Trial] = []
    for kind, entries in found["entries"].items():
        trials = timed(settings, kind, entries, deadline)
        right = [trial for trial in trials if "refusal" not in trial]
        if kind == "gpu" and right:
            tiles = min(right, key=seconds)["entry"]["tiles"]
            chunks = ask({"task": "plan", **settings, "tiles": tiles})["entries"]["gpu"]
            smaller = [t for t in timed(settings, kind, chunks, deadline) if "refusal" not in t]
            fastest = min(seconds(trial) for trial in right)
            right += [trial for trial in smaller if seconds(trial) < (1 - CLEARLY) * fastest]
        best += [min(right, key=seconds)] if right else []
    if not best:
        raise UserError("no tiling was right, so none is noted")
    if options.write:
        write_table(table, merged(noted, [as_noted(trial, settings, found["jax"]) for trial in best]))
        print(f"\nnoted in {table}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = "8192,2048,151936"
    parser.add_argument(
        "--shape", type=shape_of, default=shape, metavar="N,D,V", help=f"tokens, hidden size, vocabulary ({shape})"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default bfloat16)")
    parser.add_argument("--kernel", nargs="+", choices=KINDS, metavar="X", help=f"on TPUs; of {', '.join(KINDS)}")
    parser.add_argument("--most", type=int, metavar="K", help="tilings to try of each kernel (default 8, on GPUs all)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end the trials by then")
    parser.add_argument("--write", action="store_true", help="note the best in the table")
    parser.add_argument("--table", type=Path, metavar="FILE", help="default: that which the kernels read")
    options = parser.parse_args(arguments)
    if options.most is not None and options.most < 1:
        raise UserError(f"--most: {options.most} tilings are none")
    if options.limit is not None and not 0 < options.limit < math.inf:
        raise UserError(f"--limit: {options.limit} is no number of seconds above 0")
    if options.table and not options.table.parent.is_dir():
        raise UserError(f"--table: there is no folder {options.table.parent}")
    return options


# --- the trials' process, as the command sees it


def start(task: dict[str, Any], **limits: Any) -> child_process.Ended:
    command = [sys.executable, "-m", "tools.tune_child", json.dumps(task)]
    return child_process.run(command, cwd=Path(__file__).parent.parent, **limits)


def ask(task: dict[str, Any]) -> dict[str, Any]:
    """The process's answer. Raises UserError where it gives none."""
    ended = start(task)
    if ended.code or ended.answer is None:
        raise UserError(ended.reason.removeprefix("error: "))
    return ended.answer


def timed(settings: dict[str, Any], kind: str, entries: Sequence[Entry], deadline: float) -> list[Trial]:
    """Try the entries and print a line for each; what there is no time for is left out."""
    trials: list[Trial] = []
    print(f"\n{kind}: milliseconds of each program; largest errors")

    def keep(entry: Entry, answer: dict[str, Any]) -> None:
        trials.append({"entry": entry, "kind": kind, **answer})
        print(line(trials[-1]), flush=True)

    rest = list(entries)
    while rest and time.monotonic() < deadline:
        heard = [time.monotonic()]
        ended = start(
            {"task": "time", "shape": settings["shape"], "dtype": settings["dtype"], "kind": kind, "entries": rest},
            seconds=None if deadline == math.inf else deadline - time.monotonic(),
            tell=lambda _, heard=heard: heard.append(time.monotonic()),
            until=lambda heard=heard: time.monotonic() - heard[-1] > PATIENCE,
        )
        for answer in ended.answers:
            keep(rest.pop(0), answer)
        if not ended.answers and ended.code == 0:
            raise UserError("the trials' process ended without an answer")
        if rest and ended.code != 0 and not ended.late:  # the last one hung, or ended the process
            reason = f"stopped after {PATIENCE:g} s" if ended.code is None else ended.reason
            keep(rest.pop(0), {"refusal": reason})
    if rest:
        print(f"--limit: {len(rest)} tilings were left out")
    return trials


def deciding(kind: str) -> tuple[str, ...]:
    """The programs whose seconds decide."""
    return ON_GPU[:2] if kind == "gpu" else (KINDS[kind][3],)


def seconds(trial: Trial) -> float:
    return sum(trial["seconds"][name] for name in deciding(trial["kind"]))


def line(trial: Trial) -> str:
    entry = trial["entry"]
    tiles = ", ".join(f"{key} {size}" for key, size in entry["tiles"].items())
    name = tiles + (f", chunk {entry['chunk']}" if "chunk" in entry else "")
    if "refusal" in trial:
        return f"{name:60}  {trial['refusal']}"
    times = ", ".join(f"{key} {1e3 * trial['seconds'][key]:.2f}" for key in trial["seconds"])
    others = ", ".join(f"{1e3 * x:.2f}" for x in trial["xla_seconds"].values())
    return f"{name:60}  {times} (xla {others}); " + ", ".join(f"{key} {x:.1e}" for key, x in trial["errors"].items())


# --- the table


def as_noted(trial: Trial, settings: dict[str, Any], jax_version: str) -> Entry:
    """The trial's entry as the kernels read it, with the times to compare, and how they were found."""
    each, others = trial["seconds"], trial["xla_seconds"]
    return {
        **trial["entry"],
        "seconds": round(seconds(trial), 6),
        "xla_seconds": round(sum(others[name] for name in deciding(trial["kind"])), 6),
        "by": "time",
        "shape": settings["shape"],
        "each": {name: round(x, 6) for name, x in each.items()},
        "jax": jax_version,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def subject(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry.get(key) for key in SUBJECT)


def merged(noted: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """New entries replace those for the same subject."""
    result = {subject(entry): entry for entry in [*noted, *new]}
    return sorted(result.values(), key=lambda entry: tuple(map(str, subject(entry))))


def read_table(path: Path) -> list[Entry]:
    """The entries of a table; none where there is no file.

    Raises:
        UserError: it is no table.
    """
    try:
        noted = json.loads(path.read_text(encoding="utf-8")) if os.path.lexists(path) else []
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"--table: {path} is not JSON: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--table: {path} can't be read: {error}") from None
    if not (isinstance(noted, list) and all(isinstance(entry, dict) and "tiles" in entry for entry in noted)):
        raise UserError(f"--table: {path} holds no list of tilings, as the tables in kernels/lm_head do")
    return noted


def write_table(path: Path, entries: Sequence[Entry]) -> None:
    """Write an entry a line; the whole file or none of it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")
        draft.replace(path)
    except OSError as error:
        raise UserError(f"--table: {error}") from None


if __name__ == "__main__":
    errors.run_main(main)
