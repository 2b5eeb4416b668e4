"""Sweeps tile sizes of the head's kernels on this machine's TPU or Hopper GPU, and prints a table for each kernel.

    python tools/tune.py --shape 8192,2048,151936

A row is what `tools/bench head` says of a way through the head that runs the kernel with these tiles, in a process of
its own: its time beside the bare products', and its errors. It goes to stderr as soon as it is there, with the best so
far; tables come at the end. One that fails is named with the reason; after one that hangs, none is tried. On a TPU the
other kernels keep their tiles; on a GPU all kernels have the same tiles, and then chunks of the vocabulary of
several sizes are tried. Nothing is noted: sizes that win belong into kernels/lm_head/tpu/tiles.py or gpu/tiles.py, with
the table beside the change.

bfloat16 only; not tried are several devices, and rows that don't count. Exit codes: 0 done, 2 an error in one line.
"""

import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.errors import UserError
from tools.bench.frame import LATE, line, positive, shape_of, start, table
from tools.bench.head import CHILD, COLUMNS, LARGE, LEAST, cells

PATIENCE = 180.0
"""Seconds that a process may take, with compiling."""


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    add, shape = parser.add_argument, ",".join(map(str, LARGE))
    add("--shape", type=shape_of, default=shape, metavar="N,D,V", help=f"tokens, hidden size, vocabulary ({shape})")
    add("--most", type=positive(int), default=8, metavar="K", help="tilings of each of a TPU's kernels (default 8)")
    add("--limit", type=positive(float), default=math.inf, metavar="SECONDS", help="begin no tiling that may end later")
    options = parser.parse_args(arguments)
    deadline, last, stopped = time.monotonic() + options.limit, 0.0, ""
    with tempfile.TemporaryDirectory() as cache:
        # Processes of their own: one that has looked at a TPU keeps it from all others.
        listed, failure = start(CHILD, {"shape": options.shape, "most": options.most}, PATIENCE, cache)
        if failure or not listed:
            raise UserError(failure or "there is no TPU or Hopper GPU here, and tile sizes are found by timing them")
        for kernel in listed:
            rows, refused, left_out = list[list[str]](), [], 0
            task = {"shape": options.shape, "dtype": "bfloat16", "lives": [1.0], "rounds": 5, "least": LEAST}
            for tiles in kernel["tilings"]:
                begin = time.monotonic()
                if stopped := stopped or ("--limit" if begin + last > deadline else ""):
                    left_out += 1
                    continue
                name = ", ".join(f"{name}={size}" for name, size in tiles.items() if name != "kernel")
                case = {**task, "method": f"{kernel['impl']}, {kernel['way']}", "tiles": tiles}
                print(f"{kernel['kernel']}: {name}", file=sys.stderr)
                measured, failure = start(CHILD, case, PATIENCE, cache)
                last = time.monotonic() - begin
                if failure:
                    refused.append(f"refused: {name}: {failure}")
                    stopped = "a device that hangs once isn't trusted" if failure == LATE else ""
                else:
                    row = [name, *cells(measured[0])]
                    rows = sorted([*rows, row], key=lambda row: float(row[1]))
                    print(line([*row, f"best so far: {rows[0][0]}"]), file=sys.stderr)
            print(f"\n{kernel['impl']}, {kernel['kernel']}, by {kernel['way']}")
            if left_out:
                refused.append(f"{stopped}: {left_out} tilings were left out")
            print("\n".join([table(["tiles", *COLUMNS[1:]], rows), *refused]), flush=True)
    return 0


if __name__ == "__main__":
    errors.run_main(main)
