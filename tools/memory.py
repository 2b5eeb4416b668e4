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
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from kernels.lm_head import TokenLogprobs
from mllm import errors
from mllm.config import load as configs
from mllm.config.model import LoraConfig, ModelConfig
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.errors import UserError
from mllm.parallel.mesh import bytes_on_device
from mllm.plan import memory as plan
from mllm.plan.assignment import Account
from mllm.plan.memory import Devices
from mllm.plan.programs import Program, Programs
from mllm.train.step import Forward

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
HEADS = ("full_logits", "fused", "lora")
"""The columns: the head, and with the fused one adapters. Beside these there is the head "none"."""
RANK = 32
PARTS = ("parameters", "optimizer", "gradients", "activations", "head")
GIB = 2**30
COLORS = ("#4c72b0", "#8172b3", "#55a868", "#ccb974", "#c44e52")


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
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


def row(config: Config, devices: Devices, head: str, micro: int, bare: int) -> dict[str, Any]:
    """One bar of the picture: the head's name, sequences a shard, the peak and its parts in bytes a device.

    Args:
        bare: the peak without a head.
    """
    config = with_head(config, head, micro, devices.mesh)
    shapes = Programs(config, devices.mesh)
    known = {
        "parameters": bytes_on_device(shapes.policy.params),
        "optimizer": bytes_on_device(shapes.state.opt_state),
        "gradients": bytes_on_device(shapes.gradients()),
    }
    peak = account(config, devices, head, "update").peak
    alone = account(config, devices, head, "head_of_update")
    parts = plan.phase("update", peak, known, max(peak - bare, 0)).parts
    return {
        "head": head,
        "micro_batch": micro,
        "fits": peak <= devices.memory,
        "peak": peak,
        "head_alone": alone.temporaries,
        "parts": {name: parts[name] for name in PARTS},
    }


class NoHead(Forward):
    """A loss that costs nothing, to see what everything else takes."""

    def head_loss(
        self, hidden: Float[Array, "B T D"], weight: Float[Array, "V D"], batch: Batch
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        sums = jnp.sum(hidden, axis=-1, dtype=jnp.float32)
        none = jnp.zeros_like(sums)
        return jnp.sum(batch.weights * sums), TokenLogprobs(none, none, none)


def program(mesh: Mesh, *, config: dict[str, Any], head: str, name: str) -> Program:
    """The program of `Programs` with this name; the head "none" is `NoHead`, any other one the configuration's."""
    kind = NoHead if head == "none" else Forward
    return getattr(Programs(Config.model_validate(config), mesh, kind), name)()


def with_head(config: Config, head: str, micro: int, mesh: Mesh) -> Config:
    """The configuration with this column's head and adapters, this micro-batch, and several of them in a batch."""
    shards = mesh.shape["dp"] * mesh.shape["fsdp"]
    group = 2 if config.grpo is None else config.grpo.num_generations
    changes: dict[str, Any] = {"micro_batch_size": micro * shards, "batch_size": micro * shards * group}
    if head == "full_logits":
        changes["head"] = config.head.model_copy(update={"impl": head, "workspace_mib": None})
    lora = config.model.lora or LoraConfig(rank=RANK, alpha=RANK)
    model: dict[str, Any] = {"lora": lora, "param_dtype": "float32"} if head == "lora" else {"lora": None}
    changes["model"] = ModelConfig.model_validate({**config.model.model_dump(), **model})
    return config.model_copy(update=changes)


def account(config: Config, devices: Devices, head: str, name: str) -> Account:
    """The memory of a program."""
    settings = {"config": config.model_dump(mode="json"), "head": head, "name": name}
    return plan.account_of("tools.memory:program", devices, **settings)


def table(rows: Sequence[dict[str, Any]], memory: int) -> str:
    """Peaks by micro-batch and head, as Markdown; in brackets what exceeds `memory` bytes."""
    lines = [
        f"| sequences a shard | {' | '.join(HEADS)} | {' | '.join(f'{head}, head alone' for head in HEADS)} |",
        "| ---: |" + " ---: |" * (2 * len(HEADS)),
    ]
    for micro in sorted({row["micro_batch"] for row in rows}):
        here = [row for row in rows if row["micro_batch"] == micro]
        peaks = [plan.size(row["peak"]) if row["fits"] else f"({plan.size(row['peak'])})" for row in here]
        lines.append(f"| {micro} | {' | '.join(peaks + [plan.size(row['head_alone']) for row in here])} |")
    lines.append(f"\nOn a device; a program may have {plan.size(memory)}. (...): does not fit.")
    return "\n".join(lines)


def write(rows: Sequence[dict[str, Any]], devices: Devices, options: argparse.Namespace) -> None:
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
