"""Memory of an update with the fused head and without it: python tools/memory.py --config NAME [--target v6e:2x4]

Three heads, everything else the same: the reference (full logits, log_softmax, entropy), optax's loss on full logits
under the same sharding and without entropy, and the fused head. For micro-batches of 1 to 64 sequences a shard (a
device or, with tp, those that share its rows), what a device holds at its peak, and what holds it:

    parameters, optimizer, gradients   by shapes
    activations   the rest of the peak of an update that has no head: its loss is a sum of hidden states
    head          what the peak is above that
    head alone    temporaries of the head with its gradients, compiled by itself: at the peak they may be gone

With --target by the compiler for TPUs or H100s that aren't there, else by that of the devices at hand; --measure runs
the update on them instead, on zeros: peak_bytes_in_use where a device counts them, on CPUs by how much the process
grew. Each in a process of its own. Writes FILE.json and FILE.png beside the table (--out FILE).
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parent.parent))  # the process that compiles starts in any folder
from kernels.lm_head import TokenLogprobs
from mllm.config import load as configs
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.errors import ArgumentParser, UserError
from mllm.parallel.mesh import make_mesh
from mllm.plan import assignment
from mllm.plan import memory as plan
from mllm.plan.assignment import Account
from mllm.plan.programs import Program, Programs
from mllm.train import objectives
from mllm.train.step import Forward

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
HEADS = ("reference", "optax", "fused")
"""Beside these there is "none"."""
PARTS = ("parameters", "optimizer", "gradients", "activations", "head")
COLOURS = ("#4c72b0", "#8172b3", "#55a868", "#ccb974", "#c44e52")


class NoHead(Forward):
    """A loss that costs nothing, to see what all else takes."""

    def head_loss(
        self, hidden: Float[Array, "B T D"], weight: Float[Array, "V D"], batch: Batch
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        sums = jnp.sum(hidden, axis=-1, dtype=jnp.float32)
        none = jnp.zeros_like(sums)
        return jnp.sum(batch.weights * sums), TokenLogprobs(none, none, none)


class OptaxOnLogits(Forward):
    """The head as one writes it with optax. Its loss has no entropy, so an entropy bonus is left out."""

    def head_loss(
        self, hidden: Float[Array, "B T D"], weight: Float[Array, "V D"], batch: Batch
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        in_use = jax.lax.with_sharding_constraint(
            weight.astype(self.dtype), NamedSharding(self.sharding.mesh, PartitionSpec(self.sharding.vocabulary, None))
        )
        logits = jnp.einsum("btd,vd->btv", hidden, in_use, preferred_element_type=jnp.float32) / self.temperature
        spread = NamedSharding(self.sharding.mesh, PartitionSpec(self.sharding.tokens, None, self.sharding.vocabulary))
        logits = jax.lax.with_sharding_constraint(logits, spread)
        logprob = -optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        none = jnp.zeros_like(logprob)
        losses = (self.objective or objectives.sft)(logprob, none, *self.operands(batch))
        tokens = TokenLogprobs(jax.lax.stop_gradient(logprob), none, none)
        return jnp.sum(jnp.where(batch.weights != 0, batch.weights * losses, 0)), tokens


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="NAME", help="a path, or a file in configs/")
    parser.add_argument("--target", metavar="SLICE", help="devices that aren't there, as in v6e:2x4 or h100:8")
    parser.add_argument("--measure", action="store_true", help="run the update on the devices at hand")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="without its ending; none: no files")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    try:
        options = parser.parse_intermixed_args(arguments)
        if options.measure and options.target:
            raise UserError("--measure: is for the devices at hand, --target for those that aren't there")
        if min(options.micro_batches) < 1:
            raise UserError(f"--micro-batches: {min(options.micro_batches)}: expected 1 or more")
        if options.out:
            check_out(options.out)
        config = configs.load(options.config, options.overrides)
        devices = plan.find_devices(config.mesh, options.target)
        how = "measured" if options.measure else "compiler"
        sizes = sorted(set(options.micro_batches))
        bare = {
            micro: account(at(config, "none", micro, devices.mesh), devices, "none", "update", how).peak
            for micro in sizes
        }
        rows = [row(config, devices, head, micro, how, bare[micro]) for head in HEADS for micro in sizes]
        print(table(rows, devices))
        if devices.caveat:
            print(f"{devices.name}: {devices.caveat}.")
        if options.out:
            write(rows, devices, options, how)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def check_out(out: Path) -> None:
    """Raise UserError where the files can't be written: better before the work than after it."""
    there = next((path for path in (out.parent, *out.parent.parents) if os.path.lexists(path)), Path("."))
    if not out.name or any(os.path.isdir(out.with_suffix(ending)) for ending in (".json", ".png")):
        raise UserError(f"--out: {out} names no file")
    if not os.path.isdir(there):
        raise UserError(f"--out: {out} can't be written: {there} is a file")


def row(config: Config, devices: plan.Devices, head: str, micro: int, how: str, bare: int) -> dict[str, Any]:
    """One bar of the picture: the head's name, sequences a shard, the peak and its parts in bytes a device.

    Args:
        bare: the peak without a head.
    """
    config = at(config, head, micro, devices.mesh)
    shapes = Programs(config, devices.mesh, kind(head))
    known = {
        "parameters": plan.on_device(shapes.state.params),
        "optimizer": plan.on_device(shapes.state.opt_state),
        "gradients": plan.on_device(shapes.gradients()),
    }
    update = account(config, devices, head, "update", how)
    alone = account(config, devices, head, "head_of_update", "compiler")
    parts = plan.phase("update", update.peak, known, max(update.peak - bare, 0)).parts
    fits = update.peak <= devices.memory
    print(f"{head:9} {micro:3}: {plan.size(update.peak):>10}{'' if fits else ', does not fit'}", flush=True)
    return {
        "head": head,
        "micro_batch": micro,
        "fits": fits,
        "peak": update.peak,
        "head_alone": alone.temporaries,
        "parts": {name: parts[name] for name in PARTS},
    }


def at(config: Config, head: str, micro: int, mesh: Mesh) -> Config:
    """The configuration with this head and micro-batch, and several of these in a batch."""
    shards = mesh.shape["dp"] * mesh.shape["fsdp"]
    group = 2 if config.grpo is None else config.grpo.num_generations
    sizes = {"micro_batch_size": micro * shards, "batch_size": micro * shards * group}
    if head == "reference":
        sizes["head"] = config.head.model_copy(update={"impl": "reference", "workspace_mib": None})
    return config.model_copy(update=sizes)


def kind(head: str) -> type[Forward]:
    return {"optax": OptaxOnLogits, "none": NoHead}.get(head, Forward)


def program(mesh: Mesh, *, config: dict[str, Any], head: str, name: str) -> Program:
    """For `mllm.plan.assignment`: a program of `Programs` with one of the heads."""
    return getattr(Programs(Config.model_validate(config), mesh, kind(head)), name)()


def account(config: Config, devices: plan.Devices, head: str, name: str, how: str) -> Account:
    """A program's memory, found out in a process of its own."""
    settings = {"config": config.model_dump(mode="json"), "head": head, "name": name}
    if devices.target:
        try:
            return assignment.read(devices.target, f"{__file__}:program", devices.mesh.shape, **settings)
        except ValueError as error:
            raise UserError(f"--target: {error}") from None
    code = "import json, sys; from tools import memory; print(json.dumps(memory.at_hand(**json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps({**settings, "measured": how == "measured"})]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{head}, {config.micro_batch_size} rows: {assignment.reason(done.stderr)}")
    return Account(*json.loads(done.stdout.splitlines()[-1]))


def at_hand(config: dict[str, Any], head: str, name: str, measured: bool) -> Account:
    """The account of a program for the devices at hand; its peak measured, if wanted."""
    mesh = make_mesh(Config.model_validate(config).mesh)
    function, arguments = program(mesh, config=config, head=head, name=name)
    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    executable = jitted.trace(*arguments).lower().compile()
    known = plan.here(executable)
    return known._replace(peak=run(executable, arguments)) if measured else known


def run(program: jax.stages.Compiled, arguments: Any) -> int:
    """The most bytes that a device, or on CPUs the process, held more than before, while the program ran on zeros."""
    device = jax.local_devices()[0]
    counted = device.memory_stats() is not None
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    zeros = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arguments),
        out_shardings=jax.tree.map(lambda x: x.sharding, arguments),
    )()
    jax.block_until_ready(zeros)
    if not counted:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    jax.block_until_ready(program(*zeros))
    return device.memory_stats()["peak_bytes_in_use"] if counted else resident("VmHWM") - before


def resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def table(rows: Sequence[dict[str, Any]], devices: plan.Devices) -> str:
    """Peaks by micro-batch and head, as Markdown; in brackets what does not fit."""
    unit, name = (2**30, "GiB") if max(row["peak"] for row in rows) >= 2**30 else (2**20, "MiB")
    found = {(row["head"], row["micro_batch"]): row for row in rows}
    lines = [
        f"| sequences a shard | {' | '.join(HEADS)} | {' | '.join(f'{head}, head alone' for head in HEADS)} |",
        "| ---: |" + " ---: |" * (2 * len(HEADS)),
    ]
    for micro in sorted({row["micro_batch"] for row in rows}):
        here = [found[head, micro] for head in HEADS]
        peaks = [f"{row['peak'] / unit:.1f}" if row["fits"] else f"({row['peak'] / unit:.1f})" for row in here]
        alone = [f"{row['head_alone'] / unit:.1f}" for row in here]
        lines.append(f"| {micro} | {' | '.join(peaks + alone)} |")
    lines.append(f"\n{name} a device; a program may have {devices.memory / unit:.2f}. (...): does not fit.")
    return "\n".join(lines)


def write(rows: Sequence[dict[str, Any]], devices: plan.Devices, options: argparse.Namespace, how: str) -> None:
    settings = {"config": options.config, "overrides": options.overrides, "devices": devices.name, "how": how}
    about = {**settings, "mesh": dict(devices.mesh.shape), "memory": devices.memory, "jax": jax.__version__}
    about |= {"caveat": devices.caveat} if devices.caveat else {}
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        draw(rows, devices, options.out.with_suffix(".png"))
    except OSError as error:
        raise UserError(f"--out: {options.out} can't be written: {error}") from None


def draw(rows: Sequence[dict[str, Any]], devices: plan.Devices, out: Path) -> None:
    """A panel a head, a bar a micro-batch, stacked by what holds the memory."""
    unit, name = (2**30, "GiB") if max(row["peak"] for row in rows) >= 2**30 else (2**20, "MiB")
    figure, axes = plt.subplots(1, len(HEADS), figsize=(12, 4), sharey=True, layout="constrained")
    for axis, head in zip(axes, HEADS, strict=True):
        shown = [row for row in rows if row["head"] == head]
        floor = [0.0] * len(shown)
        for part, colour in zip(PARTS, COLOURS, strict=True):
            heights = [row["parts"][part] / unit for row in shown]
            bars = axis.bar([str(row["micro_batch"]) for row in shown], heights, bottom=floor, color=colour, label=part)
            for bar, row in zip(bars, shown, strict=True):
                bar.set_alpha(1.0 if row["fits"] else 0.45)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        if devices.memory / unit < 3 * max(row["peak"] for row in rows) / unit:
            axis.axhline(devices.memory / unit, color="black", linestyle="--", linewidth=1)
        axis.set_title(head, fontsize=11, loc="left")
        axis.set_xlabel("sequences a shard")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    axes[0].set_ylabel(f"{name} a device")
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"Peak of an update on {devices.name}; pale: does not fit", fontsize=11, x=0.01, ha="left")
    # Else one bar beyond all bounds would flatten those that matter.
    axes[0].set_ylim(0, min(max(row["peak"] for row in rows), 2 * devices.memory) / unit * 1.05)
    figure.savefig(out, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
