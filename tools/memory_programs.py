"""The programs that tools/memory.py compares, for the process that compiles them."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from kernels.lm_head import TokenLogprobs
from mllm.config.schema import Config
from mllm.data.batch import Batch
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
