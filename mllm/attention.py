"""Causal attention of whole sequences, within the documents packed in a row, by JAX's splash attention on TPUs.

`jax.nn.dot_product_attention` makes all T x T scores of a head. Splash attention is JAX's own Pallas kernel for TPUs:
it makes a block of scores at a time, and leaves out the blocks in which no query may see a key. This file says where it
can run, and brings its conventions in line with the model's. Left out: attention through a KV cache, and the backends
for which JAX has no such kernel; there the model calls `jax.nn.dot_product_attention`.

Uses `jax.experimental.pallas.ops.tpu.splash_attention`, which computes as FlashAttention does (arXiv:2205.14135,
section 3.1).
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh
from jaxtyping import Float, Int

from mllm.architecture import Qwen2Config
from mllm.errors import UserError
from mllm.mesh import RULES, sharding

HEAD_DIMS = (64, 128)
"""Those of Qwen2.5, with which it is tested; the kernel pads others."""

BLOCKS = (512, 256, 128)
"""Queries, or keys, in a block: the largest that divides the sequence. The kernel asks for multiples of 128."""


def splash_mesh(asked: Literal["xla", "splash"] | None, config: Qwen2Config, mesh: Mesh) -> Mesh | None:
    """The mesh for splash attention to run on, or None where `jax.nn.dot_product_attention` is to be used.

    Args:
        asked: the setting `model.attention`; None takes splash attention wherever it can run.

    Raises:
        UserError: splash attention is asked for and can't run.
    """
    reason = None if asked == "xla" else obstacle(config, mesh)
    if asked == "splash" and reason:
        raise UserError(f"model.attention: splash can't be used: {reason}; remove the setting, or set it to xla")
    return None if asked == "xla" or reason else mesh


def obstacle(config: Qwen2Config, mesh: Mesh) -> str | None:
    """Why splash attention can't run, if it can't."""
    if not on_tpu(mesh):
        return f"it needs a TPU, and the devices here are of the kind {mesh.devices.flat[0].platform}"
    if config.head_dim not in HEAD_DIMS:
        return f"its heads have {' or '.join(map(str, HEAD_DIMS))} dimensions, and the model's {config.head_dim}"
    for axis, heads in (("heads", config.num_attention_heads), ("kv_heads", config.num_key_value_heads)):
        name = RULES[axis]
        if heads % mesh.shape[name]:
            return f"mesh.{name} = {mesh.shape[name]} does not divide the model's {heads} {axis}"
    return None


def on_tpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "tpu"


def splash_attention(
    queries: Float[jax.Array, "B T N H"],
    keys: Float[jax.Array, "B T K H"],
    values: Float[jax.Array, "B T K H"],
    segments: Int[jax.Array, "B T"],
    mesh: Mesh,
) -> Float[jax.Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v over the keys of the query's segment up to the query, in the dtype of the queries.

    Scores, softmax and sums are float32. Each device computes its own rows and heads: XLA can't divide a Pallas kernel
    by itself. Padding, which is segment 0, sees padding: a query that saw nothing would divide by zero. So what comes
    out there is finite, differs from what the masked attention gives, and reaches no other token.

    Args:
        mesh: must divide B, N and K by its axes for them. Off TPUs the kernel is interpreted, slowly, for tests.
    """
    time = queries.shape[1]
    missing = -time % BLOCKS[-1]
    padded = [jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) for x in (queries, keys, values, segments)]
    heads, kv_heads = (sharding(mesh, ("batch", "time", axis, "head_dim")).spec for axis in ("heads", "kv_heads"))
    attend = jax.shard_map(
        partial(local_attention, interpret=not on_tpu(mesh)),
        mesh=mesh,
        in_specs=(heads, kv_heads, kv_heads, sharding(mesh, ("batch", "time")).spec),
        out_specs=heads,
        check_vma=False,  # a Pallas kernel does not say over which axes its results vary
    )
    return attend(*padded)[:, :time]


def local_attention(
    queries: Float[jax.Array, "B T N H"],
    keys: Float[jax.Array, "B T K H"],
    values: Float[jax.Array, "B T K H"],
    segments: Int[jax.Array, "B T"],
    interpret: bool,
) -> Float[jax.Array, "B T N H"]:
    """Of one device's rows and heads, T a multiple of 128."""
    _, time, heads, head_dim = queries.shape
    block = next(size for size in BLOCKS if time % size == 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((time, time))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )
    # The kernel leaves the scaling to its caller. In bfloat16 a factor like 128^-1/2 would itself be rounded, the same
    # way for every score.
    scaled = (queries.astype(jnp.float32) * head_dim**-0.5).astype(queries.dtype)
    by_head = (x.swapaxes(1, 2) for x in (scaled, keys, values))
    return jax.vmap(kernel)(*by_head, splash.SegmentIds(segments, segments)).swapaxes(1, 2)
