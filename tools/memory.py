"""Compares the memory of an update with full logits, with the fused head, and with the fused head and LoRA.

    python tools/memory.py --config NAME [--target v6e:2x4] [--out FILE]

The first two columns are the same update of all parameters but for the head: full logits (head.impl=full_logits), and
the fused head. In the third, adapters are trained: those of model.lora, without it of rank 32. For micro-batches of 1
to 64 sequences a shard (a device or, with tp, those that share its rows), the table says what a device holds at its
peak; the picture and the JSON also say what holds it:

    parameters, optimizer, gradients   by shapes
    activations   the rest of the peak of an update without a head, whose loss is a sum of hidden states
    head          the peak above that
    head alone    temporaries of the head with its gradients, compiled by itself: at the peak they may be gone

The figures are those of the compiler for the devices at hand or, with --target, for TPUs or H100s that aren't there:
nothing runs. --out FILE writes FILE.json and FILE.png.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.errors import UserError

if TYPE_CHECKING:
    from mllm.plan.memory import Devices

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
GIB = 2**30
COLORS = ("#4c72b0", "#8172b3", "#55a868", "#ccb974", "#c44e52")


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from mllm.config import load as configs
    from mllm.plan import memory as plan
    from tools.memory_rows import HEADS, account, row, table, with_head

    config = configs.load(options.config, options.overrides)
    devices = plan.find_devices(config.mesh, options.target)
    sizes = sorted(set(options.micro_batches))
    bare = {}
    for kind in HEADS[1:]:  # what the model takes does not depend on the head
        for micro in sizes:
            without = with_head(config, kind, micro, devices.mesh)
            bare[kind, micro] = account(without, devices, "none", "update").peak
    rows = []
    for head in HEADS:
        for micro in sizes:
            without_head = bare["lora" if head == "lora" else "fused", micro]
            rows.append(row(config, devices, head, micro, without_head))
            fits = "" if rows[-1]["fits"] else ", does not fit"
            print(f"{head:11} {micro:3}: {plan.size(rows[-1]['peak']):>10}{fits}", flush=True)
    print(table(rows, devices.memory))
    if devices.caveat:
        print(f"{devices.name}: {devices.caveat}.")
    if options.out:
        write(rows, devices, options)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or a file in configs/")
    parser.add_argument("--target", metavar="SLICE", help="devices that aren't there, as in v6e:2x4 or h100:8")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="without its ending; none: no files")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    if min(options.micro_batches) < 1:
        raise UserError(f"--micro-batches: {min(options.micro_batches)}: expected 1 or more")
    if options.out is not None and not options.out.name:
        raise UserError(f"--out: {options.out} names no file")
    for ending in (".json", ".png") if options.out else ():
        if not os.path.isdir(options.out.parent):
            raise UserError(f"--out: there is no folder {options.out.parent}")
        if os.path.isdir(options.out.with_suffix(ending)):
            raise UserError(f"--out: {options.out.with_suffix(ending)} is a folder; give a file")
    return options


def write(rows: Sequence[dict[str, Any]], devices: "Devices", options: argparse.Namespace) -> None:
    import jax

    content = {
        "config": options.config,
        "overrides": options.overrides,
        "devices": devices.name,
        "mesh": dict(devices.mesh.shape),
        "memory": devices.memory,
        "jax": jax.__version__,
        **({"caveat": devices.caveat} if devices.caveat else {}),
        "rows": list(rows),
    }
    try:
        options.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draw(rows, devices.name, devices.memory, options.out.with_suffix(".png"))
    except OSError as error:
        raise UserError(f"--out: {options.out} can't be written: {error}") from None


def draw(rows: Sequence[dict[str, Any]], name: str, memory: int, out: Path) -> None:
    """A panel for each head with a bar for each micro-batch, stacked by what holds the memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from tools.memory_rows import HEADS, PARTS

    most = max(row["peak"] for row in rows)
    figure, axes = plt.subplots(1, len(HEADS), figsize=(4.5 * len(HEADS), 4), sharey=True, layout="constrained")
    for axis, head in zip(axes, HEADS, strict=True):
        shown = [row for row in rows if row["head"] == head]
        floor = [0.0] * len(shown)
        for part, color in zip(PARTS, COLORS, strict=True):
            heights = [row["parts"][part] / GIB for row in shown]
            bars = axis.bar([str(row["micro_batch"]) for row in shown], heights, bottom=floor, color=color, label=part)
            for bar, row in zip(bars, shown, strict=True):
                bar.set_alpha(1.0 if row["fits"] else 0.45)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        if memory < 3 * most:
            axis.axhline(memory / GIB, color="black", linestyle="--", linewidth=1)
        axis.set_title(head, fontsize=11, loc="left")
        axis.set_xlabel("sequences a shard")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    axes[0].set_ylabel("GiB a device")
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"Peak of an update on {name}; pale: does not fit", fontsize=11, x=0.01, ha="left")
    # Else one bar beyond all bounds would flatten those that matter.
    axes[0].set_ylim(0, min(most, 2 * memory) / GIB * 1.05)
    figure.savefig(out, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    errors.run_main(main)
