"""The programs that tools/memory.py compares, and their memory; both for the processes that it starts.

    python -m tools.memory_programs '{"config": ..., "head": ..., "name": ..., "measured": ...}'

answers with a program's account on the devices at hand. A CPU doesn't count the memory of programs; there the peak that
is measured is by how much the process grew.
"""

import ctypes
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

sys.path.insert(0, str(Path(__file__).parent.parent))  # the process that compiles starts in any folder
from kernels.lm_head import TokenLogprobs
from mllm import child_process
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.errors import UserError
from mllm.parallel.mesh import make_mesh
from mllm.plan import memory as plan
from mllm.plan.assignment import Account
from mllm.plan.programs import Program, Programs
from mllm.train.step import Forward


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


def at_hand(config: dict[str, Any], head: str, name: str, measured: bool) -> Account:
    """The account of a program for the devices at hand; its peak measured, if wanted."""
    mesh = make_mesh(Config.model_validate(config).mesh)
    function, arguments = program(mesh, config=config, head=head, name=name)
    jitted: Any = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    executable = jitted.trace(*arguments).lower().compile()
    known = plan.here(executable)
    return known._replace(peak=measured_peak(executable, arguments)) if measured else known


def measured_peak(program: jax.stages.Compiled, arguments: Any) -> int:
    """The most bytes that a device, or on CPUs the process, held more than before, while the program ran on ones."""
    peak = count_peak()
    # An update of zeros would be over at once: no token would have a weight.
    ones = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), arguments),
        out_shardings=jax.tree.map(lambda x: x.sharding, arguments),
    )()
    jax.block_until_ready(program(*ones))
    return peak()


def count_peak() -> Callable[[], int]:
    """A function that says how many bytes more than now a device, or on CPUs the process, has held at most since."""
    device = jax.local_devices()[0]
    if device.memory_stats() is not None:
        return lambda: device.memory_stats()["peak_bytes_in_use"]
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    return lambda: resident("VmHWM") - before


def resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    child_process.end_with_parent()
    try:
        child_process.answer(at_hand(**json.loads(sys.argv[1])))
    except UserError as error:
        sys.exit(str(error))
