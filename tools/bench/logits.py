"""Times a GRPO loss of logits that exist, and its gradient: lm_head.logits_logprobs beside plain JAX.

Both take log-probabilities of the labels and the clipped ratio, and give one array of gradients. A row of the table is
plain JAX, the engine in plain XLA, or, on a TPU, the kernels with so many rows ("time block") held at a time.

    ms         median of the rounds, of calls that keep the device busy          [host's clock]
    /plain     the median, over rounds, of the ratio to plain JAX in the same round
    temp MiB   memory beside arguments and results                               [the compiler's figure]

With --check nothing is timed: log-probabilities and gradients are compared with float64's, and the largest differences
are printed. With --target the programs are compiled for a TPU that isn't there, for their temporaries alone.

Exit codes: 0 done, 1 the check failed, 2 an error in one line.
"""

import argparse
from collections.abc import Sequence

from mllm import errors
from tools.bench.frame import positive

BLOCKS = (16, 64, 256, 512)


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from tools.bench.logits_programs import run  # --help must not wait for JAX

    return run(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = errors.ArgumentParser(__doc__, prog="python tools/bench logits")
    add = known.add_argument
    add("--shape", type=shape_of, metavar="N,V", help="rows, vocabulary (default on a CPU 64,4096, else 2048,151643)")
    add("--blocks", type=positive(int), nargs="+", default=BLOCKS, metavar="ROWS", help="time blocks (16 64 256 512)")
    add("--rounds", type=positive(int), default=5, help="rounds timed (default 5)")
    add("--check", action="store_true", help="compare with float64 in place of timing")
    add("--target", metavar="CHIP", help="compile for a TPU that isn't there, as v6e")
    return known.parse_args(arguments)


def shape_of(text: str) -> tuple[int, int]:
    """For argparse: N,V as numbers."""
    sizes = text.split(",")
    if len(sizes) != 2 or not all(x.isdecimal() and int(x) for x in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not N,V: two whole numbers")
    return int(sizes[0]), int(sizes[1])
