"""Compares the memory of updates: with full logits, chunks of logits, the fused head, and the fused head with LoRA.

    python tools/memory.py --config NAME [--target v6e:2x4] [--out FILE]

The first three columns update all parameters, and differ only in the head: full logits (head.impl=full_logits), chunks
that are computed again for the gradients (head.impl=chunked_logits), and the fused head. In the last column the
adapters of model.lora are trained, or adapters of rank 32. Micro-batches have 1 to 64 sequences a shard: a device or,
with tp, the devices that share its rows. The table and the picture show a device's peak by part, as --plan does, in
brackets if it does not fit.

The compiler for the devices at hand or, with --target, for TPUs or H100s that aren't there gives the figures:
nothing runs. --out FILE writes the picture FILE.png.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from mllm import errors
from mllm.algorithms.recipes import recipe_of
from mllm.config import load as configs
from mllm.config.model import LoraConfig, ModelConfig
from mllm.config.run import RunConfig
from mllm.errors import UserError
from mllm.plan import memory as plan
from mllm.plan.programs import Programs
from mllm.plan.targets import find_devices
from tools.bench.frame import positive, table

HEADS = ("full_logits", "chunked_logits", "fused", "lora")
"""The columns: the head, and with the fused one adapters."""
PARTS = ("parameters", "optimizer", "gradients", "activations", "head")
RANK = 32
"""The rank of adapters where the configuration has none."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
GIB = 2**30


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    config = configs.load(options.config, options.overrides)
    if recipe_of(config).demands.teacher_in_update:
        raise UserError("--config: heads of two models are not compared: --plan says what the update takes")
    config, devices = find_devices(config, options.target)
    bars: dict[tuple[str, int], plan.Phase] = {}
    for head in HEADS:
        for micro in sorted(set(options.micro_batches)):
            shapes = Programs(with_head(config, head, micro, devices.mesh), devices.mesh)
            bars[head, micro] = plan.update_phase(shapes, devices)
            print(f"{head} {micro}: {plan.size(bars[head, micro].peak)}", file=sys.stderr)
    print(f"{devices.name}, jax {jax.__version__}; a program may have {plan.size(devices.memory)} on a device\n")
    rows = []
    for (head, micro), update in bars.items():
        peak = plan.size(update.peak) if update.peak <= devices.memory else f"({plan.size(update.peak)})"
        rows.append([head, str(micro), *(plan.size(update.parts[part]) for part in PARTS), peak])
    print(table(["column", "sequences a shard", *PARTS, "peak"], rows))
    if devices.caveat:
        print(f"{devices.name}: {devices.caveat}.")
    if options.out:
        try:
            draw(bars, devices.name, devices.memory, options.out.with_suffix(".png"))
        except OSError as error:
            raise UserError(f"--out: {options.out} can't be written: {error}") from None
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or a file in configs/")
    parser.add_argument("--target", metavar="SLICE", help="devices that aren't there, as in v6e:2x4 or h100:8")
    parser.add_argument("--micro-batches", type=positive(int), nargs="+", default=MICRO_BATCHES, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the picture's, without .png; default: none")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    if options.out is not None and (not options.out.name or not options.out.parent.is_dir()):
        raise UserError(f"--out: {options.out} names no file in a folder that is there")
    return options


def with_head(config: RunConfig, head: str, micro: int, mesh: Mesh) -> RunConfig:
    """The configuration with this column's head and adapters, this micro-batch, and several of them in a batch."""
    shards = mesh.shape["dp"] * mesh.shape["fsdp"]
    group = max(2, recipe_of(config).demands.group)
    changes: dict[str, Any] = {"micro_batch_size": micro * shards, "batch_size": micro * shards * group}
    if head in HEADS[:2]:
        changes["head"] = config.head.model_copy(update={"impl": head, "workspace_mib": None})
    lora = config.model.lora or LoraConfig(rank=RANK, alpha=RANK)
    model: dict[str, Any] = {"lora": lora, "param_dtype": "float32"} if head == "lora" else {"lora": None}
    changes["model"] = ModelConfig.model_validate({**config.model.model_dump(), **model})
    return config.model_copy(update=changes)


def draw(bars: Mapping[tuple[str, int], plan.Phase], name: str, memory: int, out: Path) -> None:
    """A panel for each column with a bar for each micro-batch, stacked by part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(HEADS), 4), layout="constrained")
    axes = figure.subplots(1, len(HEADS), sharey=True)
    for axis, column in zip(axes, HEADS, strict=True):
        shown = {str(micro): bar for (head, micro), bar in bars.items() if head == column}
        floor = [0.0] * len(shown)
        for index, part in enumerate(PARTS):
            heights = [bar.parts[part] / GIB for bar in shown.values()]
            colors = [(f"C{index}", 1.0 if bar.peak <= memory else 0.45) for bar in shown.values()]
            axis.bar(list(shown), heights, bottom=floor, color=colors, label=part)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        axis.axhline(memory / GIB, color="black", linestyle="--")
        axis.set_title(column)
        axis.set_xlabel("sequences a shard")
    axes[0].set_ylabel("GiB a device")
    axes[0].legend()
    figure.suptitle(f"Peak of an update on {name}; pale: does not fit")
    # Else one bar beyond all bounds, or the line far above them, would flatten the bars that matter.
    axes[0].set_ylim(0, min(max(bar.peak for bar in bars.values()), 2 * memory) / GIB * 1.05)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    errors.run_main(main)
