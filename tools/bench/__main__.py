"""Benchmarks: python tools/bench COMMAND [options]

    head      the LM head beside the bare matrix products and other implementations
    logits    a loss of logits that exist beside plain JAX
    rollout   the rollout engine beside google-tunix's sampler
    step      an update by part, and a decode step

`python tools/bench COMMAND --help` describes a command's figures and options.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # `python tools/bench`: the checkout's root in place of this folder
    root = Path(__file__).resolve().parent.parent.parent
    sys.path[:1] = [str(root), str(root / "kernels")]
from mllm import errors

COMMANDS = ("head", "logits", "rollout", "step")


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__, prog="python tools/bench")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="the command's own")
    options = parser.parse_args(arguments)
    return importlib.import_module(f"tools.bench.{options.command}").main(options.options)


if __name__ == "__main__":
    errors.run_main(main)
