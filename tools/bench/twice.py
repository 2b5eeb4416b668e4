"""Trains twice and compares the bits: python tools/bench twice FOLDER --config NAME [key.sub=value ...]

The runs are FOLDER/one and FOLDER/two, each in a process of its own. Compared are metrics.jsonl and the arrays of the
newest checkpoint: the parameters and the optimizer's moments. On a GPU the command needs
XLA_FLAGS=--xla_gpu_deterministic_ops=true in its environment (docs/reliability.md says why).

Exit codes: 0 the bits are the same, 1 they aren't, 2 an error in one line.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mllm.errors import ArgumentParser, UserError
from mllm.plan import child
from mllm.store.run_store import RunStore
from tools.bench import frame


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(__doc__, prog="python tools/bench twice")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for the two runs; it may have none of these")
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or a file in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    one, two = runs = [RunStore(options.folder.absolute() / name) for name in ("one", "two")]
    for run in runs:
        if run.is_run():
            raise UserError(f"FOLDER: {run} is a run already; give another folder")
    for run in runs:
        command = [sys.executable, "train.py", "--config", options.config, *options.overrides, f"run_dir={run}"]
        if reason := child.run(command, env=frame.DEFAULTS | os.environ, cwd=frame.ROOT).reason:
            raise UserError(f"{run}: {reason.removeprefix('error: ')}")
    found = difference(one, two)
    print(f"two runs of {one.steps()[-1]} steps: {found or 'the same bits'}")
    return int(bool(found))


def difference(one: RunStore, two: RunStore) -> str:
    """Where two finished runs differ first, in metrics and in arrays of their newest checkpoints; "" if nowhere."""
    found = []
    lines, others = (run.read_log("metrics.jsonl").splitlines() for run in (one, two))
    if lines != others:
        same = [line == other for line, other in zip(lines, others, strict=False)]
        found.append(f"metrics.jsonl from line {(*same, False).index(False) + 1} on")
    arrays, other_arrays = (run.document(run.steps()[-1])["arrays"] for run in (one, two))
    if names := sorted(name for name in arrays | other_arrays if arrays.get(name) != other_arrays.get(name)):
        found.append(f"{len(names)} of {len(arrays)} arrays, as {names[0]}")
    return f"they differ in {' and '.join(found)}" if found else ""
