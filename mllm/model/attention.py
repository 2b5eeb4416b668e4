"""Causal attention of whole sequences, within the documents packed in a row, by kernels that don't make all scores.

XLA's `jax.nn.dot_product_attention` makes all T x T scores of a head. Two kernels make a block of them at a time, and
leave out the blocks in which no query may see a key: JAX's splash attention, in Pallas, on TPUs; and cuDNN's, by
`jax.nn.dot_product_attention(implementation="cudnn")`, on NVIDIA GPUs. This file says where each can run, and brings
its conventions in line with the model's.

Splash attention knows segments. cuDNN's, as far as JAX makes it public, knows lengths and masks:

- One document a row, padding behind it (GRPO, and SFT without packing): causality alone is enough, since padding
  comes too late to be seen. No lengths are given: what comes out for padding must be finite.
- Packed rows need a mask: B T T numbers of the compute dtype, one for all heads, and in JAX 0.10.2 a gradient of as
  many that nobody uses. That is 2 N times less than XLA's float32 scores, but the blocks between two documents are
  computed. JAX has offsets of documents, too, in a private function, which until jax-ml/jax pull request 39521 read
  the wrong keys where query heads share them, as Qwen2.5's do.

The cuDNN path was lowered for GPUs, and its conventions were held against the masked attention on CPUs; no GPU has run
it. Left out: attention through a KV cache, which is XLA's everywhere.

Both compute as FlashAttention does (arXiv:2205.14135, section 3.1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from mllm.errors import UserError
from mllm.model.architecture import Qwen2Config
from mllm.parallel.mesh import RULES, sharding

Kernel = Literal["splash", "cudnn"]

HEAD_DIMS = (64, 128)
"""Those of Qwen2.5, with which splash attention is tested; the kernel pads others."""

BLOCKS = (512, 256, 128)
"""Queries, or keys, in a block of splash attention: the largest that divides the sequence.

Rows are padded to a multiple of the last. Splash attention asks for it; cuDNN with a mask refuses odd lengths, and has
given gradients that are not finite where a length is 64 more than such a multiple (pytorch/pytorch issue 196678).
"""

AMPERE = 8.0
"""The compute capability that cuDNN's attention needs."""


@dataclass(frozen=True)
class Attention:
    """A kernel, and what it has to know beforehand."""

    kernel: Kernel
    mesh: Mesh
    """Must divide rows and heads by its axes for them."""
    packed: bool = True
    """Whether a row may hold several documents. If not, it begins with its only one; else documents would mix."""

    def __call__(
        self,
        queries: Float[jax.Array, "B T N H"],
        keys: Float[jax.Array, "B T K H"],
        values: Float[jax.Array, "B T K H"],
        segments: Int[jax.Array, "B T"],
    ) -> Float[jax.Array, "B T N H"]:
        """softmax(q k^T / sqrt(H)) v over the keys of the query's segment up to the query, in the dtype of the queries.

        Scores, softmax and sums are float32. Each device computes its own rows and heads: XLA can't divide a kernel
        by itself. Padding, which is segment 0, sees padding or what stands before it: a query that saw nothing would
        divide by zero. So what comes out there is finite, differs from what the masked attention gives, and reaches no
        other token.

        Off its own devices splash attention is interpreted, slowly, and XLA stands in for cuDNN, both for tests.
        """
        time = queries.shape[1]
        missing = -time % BLOCKS[-1]
        padded = [
            jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) for x in (queries, keys, values, segments)
        ]
        heads, kv_heads = (
            sharding(self.mesh, ("batch", "time", axis, "head_dim")).spec for axis in ("heads", "kv_heads")
        )
        local: Callable[..., jax.Array]
        if self.kernel == "splash":
            local = partial(splash_attention, interpret=not on_tpu(self.mesh))
        else:
            local = partial(cudnn_attention, packed=self.packed, stand_in=not on_gpu(self.mesh))
        attend = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(heads, kv_heads, kv_heads, sharding(self.mesh, ("batch", "time")).spec),
            out_specs=heads,
            check_vma=False,  # a Pallas kernel does not say over which axes its results vary
        )
        return attend(*padded)[:, :time]


def splash_attention(
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


def cudnn_attention(
    queries: Float[jax.Array, "B T N H"],
    keys: Float[jax.Array, "B T K H"],
    values: Float[jax.Array, "B T K H"],
    segments: Int[jax.Array, "B T"],
    packed: bool,
    stand_in: bool = False,
) -> Float[jax.Array, "B T N H"]:
    """Of one device's rows and heads; `stand_in` is XLA's with the same arguments."""
    same = segments[:, None, :, None] == segments[:, None, None, :] if packed else None
    implementation: Literal["xla", "cudnn"] = "xla" if stand_in else "cudnn"
    return jax.nn.dot_product_attention(queries, keys, values, mask=same, is_causal=True, implementation=implementation)


def choose(
    asked: Literal["xla", "splash", "cudnn"] | None, config: Qwen2Config, mesh: Mesh, dtype: DTypeLike, packed: bool
) -> Attention | None:
    """What whole sequences are given to, or None where that is XLA's `jax.nn.dot_product_attention`.

    Args:
        asked: the setting `model.attention`; None takes the kernel of the devices wherever it can run.
        dtype: of the computation.
        packed: as for `Attention`.

    Raises:
        UserError: a kernel is asked for and can't run.
    """
    if asked == "xla":
        return None
    kernel: Kernel = asked or ("splash" if on_tpu(mesh) else "cudnn")
    reason = obstacle(kernel, config, mesh, dtype)
    if asked and reason:
        raise UserError(f"model.attention: {asked} can't be used: {reason}; remove the setting, or set it to xla")
    return None if reason else Attention(kernel, mesh, packed)


def obstacle(kernel: Kernel, config: Qwen2Config, mesh: Mesh, dtype: DTypeLike) -> str | None:
    """Why the kernel can't run, if it can't."""
    reason = splash_obstacle(config, mesh) if kernel == "splash" else cudnn_obstacle(config, mesh, dtype)
    if reason:
        return reason
    for axis, heads in (("heads", config.num_attention_heads), ("kv_heads", config.num_key_value_heads)):
        name = RULES[axis]
        if heads % mesh.shape[name]:
            return f"mesh.{name} = {mesh.shape[name]} does not divide the model's {heads} {axis}"
    return None


def splash_obstacle(config: Qwen2Config, mesh: Mesh) -> str | None:
    if not on_tpu(mesh):
        return f"it needs a TPU, and the devices here are of the kind {mesh.devices.flat[0].platform}"
    if config.head_dim not in HEAD_DIMS:
        return f"its heads have {' or '.join(map(str, HEAD_DIMS))} dimensions, and the model's {config.head_dim}"
    return None


def cudnn_obstacle(config: Qwen2Config, mesh: Mesh, dtype: DTypeLike) -> str | None:
    if not on_gpu(mesh):
        return f"it needs an NVIDIA GPU, and the devices here are of the kind {mesh.devices.flat[0].platform}"
    if mesh.devices.flat[0] not in jax.devices():  # so a plan for GPUs that aren't there has XLA's attention
        return "cuDNN picks its kernel on the GPU, and that is not here"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16, and model.dtype is {jnp.dtype(dtype)}"
    # Whether the library is there, and has kernels for such heads, JAX knows and says as it traces.
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    operands = [jax.ShapeDtypeStruct((1, BLOCKS[-1], size, config.head_dim), dtype) for size in sizes]
    segments = jax.ShapeDtypeStruct((1, BLOCKS[-1]), jnp.int32)
    try:
        jax.eval_shape(lambda *qkv: jax.vjp(partial(cudnn_attention, packed=True), *qkv)[0], *operands, segments)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "cuDNN is not detected" not in str(error):
            raise  # a fault, which XLA's attention in its place would hide
        return f"JAX says: {str(error).splitlines()[0].rstrip('.')}"
    if capability(mesh) < AMPERE:
        return f"it needs a GPU of compute capability {AMPERE}, and this one has {capability(mesh)}"
    return None


def on_tpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "tpu"


def on_gpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def capability(mesh: Mesh) -> float:
    return float(mesh.devices.flat[0].compute_capability)
