"""A program of the head for `mllm/plan/resources.py`, with what `mllm/plan/head_programs.py` doesn't vary."""

from typing import Any

import jax
from jax.sharding import Mesh

from kernels.lm_head import token_loss
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.tiles import Sizes, Tiles
from mllm.plan import head_programs as head


def variant(
    mesh: Mesh,
    *,
    softcap: float | None = None,
    cluster: int | None = None,
    entropy: bool = False,
    workspace: int = 0,
    **sizes: Any,
) -> head.Program:
    """A loss and its gradients; with a cluster's size given, of tiles that go with it."""
    same, arguments = head.options_and_shapes(mesh, impl="mosaic_gpu", **sizes)
    options = same | {"workspace": workspace, "softcap": softcap}

    def objective(logprob: jax.Array, tokens_entropy: jax.Array) -> jax.Array:
        return -logprob - 0.01 * tokens_entropy if entropy else -logprob

    def step(hidden: Any, weight: Any, labels: Any, weights: Any, *_: Any) -> Any:
        run = jax.value_and_grad(
            lambda h, w: token_loss(h, w, labels, objective, weights=weights, **options), (0, 1), has_aux=True
        )
        if cluster is None:
            return run(hidden, weight)
        with gpu_tiles.override(Sizes(Tiles(cluster=cluster), chunk=2048)):
            return run(hidden, weight)

    return step, arguments
