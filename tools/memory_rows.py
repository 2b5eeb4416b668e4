"""The rows of tools/memory.py, and the programs that they are figures of, for the process that compiles them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from kernels.lm_head import TokenLogprobs
from mllm.config.model import LoraConfig, ModelConfig
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.parallel.mesh import bytes_on_device
from mllm.plan import memory as plan
from mllm.plan.assignment import Account
from mllm.plan.memory import Devices
from mllm.plan.programs import Program, Programs
from mllm.train.step import Forward

HEADS = ("full_logits", "fused", "lora")
"""The columns: the head, and with the fused one adapters. Beside these there is the head "none"."""
PARTS = ("parameters", "optimizer", "gradients", "activations", "head")
RANK = 32
"""The rank of adapters where the configuration has none."""


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
    return plan.account_of("tools.memory_rows:program", devices, **settings)


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
