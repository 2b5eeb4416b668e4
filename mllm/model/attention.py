"""Causal attention over whole sequences, within the documents packed in a row, by kernels that never store all scores.

JAX's splash attention on TPUs, cuDNN's on NVIDIA GPUs, and the kernels of packed_attention.py on Hopper GPUs compute a
block of scores at a time (FlashAttention, arXiv:2205.14135, section 3.1). cuDNN's needs a mask, B T T numbers, for
packed rows. JAX can also pass document offsets to cuDNN. Until jax-ml/jax pull request 39521, cuDNN then reads the
wrong keys if several query heads share a key head. No test of the paths for GPUs has run on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from lm_head.precision import precision_of
from lm_head.target import why_not_hopper
from mllm.model.architecture import Architecture
from mllm.model.layout import KEYS, QUERIES
from mllm.parallel.mesh import RULES, sharding

AttentionKernel = Literal["splash", "cudnn", "mosaic_gpu"]
HEAD_DIMS: dict[AttentionKernel, tuple[int, ...]] = {
    "splash": (64, 128, 256),
    "cudnn": (64, 128),
    "mosaic_gpu": (64, 128, 256),
}
"""Head sizes of published models that each kernel supports; cuDNN on all GPUs from compute capability 8.0 on."""

BLOCKS = (512, 256, 128)
"""Queries, or keys, in a block of splash attention; the largest that divides the sequence is taken.

Rows are padded to a multiple of the smallest, which splash attention needs. cuDNN with a mask refuses odd lengths. Its
gradients were not finite for a length of 64 more than such a multiple (pytorch/pytorch issue 196678).
"""
BLOCK_SIZES = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
"""Splash attention's names for the size of a block, in its forward and its two backward kernels."""


@dataclass(frozen=True)
class Attention:
    """An attention kernel, bound to a mesh that must divide the rows, the query heads and the key heads."""

    kernel: AttentionKernel
    mesh: Mesh
    packed: bool
    """Whether a row may hold several documents. If False, a row must begin with its only document."""
    window: int | None = None
    """The number of keys of a query with a sliding window; None: the model has no window."""

    def __call__(
        self,
        queries: Float[jax.Array, "B T N H"],
        keys: Float[jax.Array, "B T K H"],
        values: Float[jax.Array, "B T K H"],
        segments: Int[jax.Array, "B T"],
        window: Int[jax.Array, ""] | None = None,
    ) -> Float[jax.Array, "B T N H"]:
        """softmax(q k^T / sqrt(H)) v over the keys of the query's segment up to the query, in the dtype of the queries.

        If `window` is `self.window`, only the last `window` keys count. Scores, softmax and sums are float32. Each
        device computes its own rows and heads. Outputs at padding, segment 0, are finite and affect no other token. On
        other devices, as in tests, splash attention is interpreted and XLA replaces cuDNN.
        """
        time = queries.shape[1]
        missing = -time % BLOCKS[-1]
        padded = [
            jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) for x in (queries, keys, values, segments)
        ]
        heads, kv_heads = sharding(self.mesh, QUERIES).spec, sharding(self.mesh, KEYS).spec
        rows = sharding(self.mesh, ("batch", "time")).spec
        local: Callable[..., jax.Array]
        if self.kernel == "mosaic_gpu":
            from mllm.model import packed_attention  # Mosaic takes 0.3 s to import, and few runs have a Hopper GPU

            *padded, ids = padded
            padded += packed_attention.reach(ids, window)
            local, window = packed_attention.attend, None
        elif self.kernel == "splash":
            local = partial(splash_attention, interpret=platform(self.mesh) != "tpu")
        else:
            implementation: Literal["xla", "cudnn"] = "cudnn" if platform(self.mesh) == "gpu" else "xla"
            local = partial(cudnn_attention, packed=self.packed, implementation=implementation)
        sharded = partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=(heads, kv_heads, kv_heads, *[rows] * (len(padded) - 3)),
            out_specs=heads,
            check_vma=False,  # a Pallas kernel does not say over which axes its results vary
        )
        if window is None or self.window is None:
            return sharded(local)(*padded)[:, :time]
        limited = partial(local, window=self.window)
        return jax.lax.cond(window == self.window, sharded(limited), sharded(local), *padded)[:, :time]


def splash_attention(
    queries: Float[jax.Array, "B T N H"],
    keys: Float[jax.Array, "B T K H"],
    values: Float[jax.Array, "B T K H"],
    segments: Int[jax.Array, "B T"],
    interpret: bool,
    window: int | None = None,
) -> Float[jax.Array, "B T N H"]:
    """Splash attention over one device's rows and heads; T is a multiple of 128."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, time, heads, head_dim = queries.shape
    sizes: dict[str, Any] = dict.fromkeys(BLOCK_SIZES, next(size for size in BLOCKS if time % size == 0))
    shape = (time, time)
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads), block_sizes=splash.BlockSizes(**sizes), interpret=interpret
    )
    # The kernel leaves the scaling to its caller. In float32: a factor like 128^-1/2 would itself be rounded in
    # bfloat16, the same way for every score.
    scaled = (queries.astype(jnp.float32) * head_dim**-0.5).astype(queries.dtype)
    by_head = (x.swapaxes(1, 2) for x in (scaled, keys, values))
    ids = splash.SegmentIds(segments, segments)
    attend = at_set_precision(lambda kernel, *operands: jax.vmap(kernel)(*operands), queries.dtype)
    return attend(kernel, *by_head, ids).swapaxes(1, 2)


def cudnn_attention(
    queries: Float[jax.Array, "B T N H"],
    keys: Float[jax.Array, "B T K H"],
    values: Float[jax.Array, "B T K H"],
    segments: Int[jax.Array, "B T"],
    packed: bool,
    implementation: Literal["xla", "cudnn"] = "cudnn",
    window: int | None = None,
) -> Float[jax.Array, "B T N H"]:
    """cuDNN's attention over one device's rows and heads, with a mask only where rows are packed."""
    same_segment = segments[:, None, :, None] == segments[:, None, None, :] if packed else None
    limit = None if window is None else (window - 1, 0)
    options: Any = {"is_causal": True, "local_window_size": limit, "implementation": implementation}
    with set_precision(queries.dtype):
        return jax.nn.dot_product_attention(queries, keys, values, mask=same_segment, **options)


def set_precision(dtype: DTypeLike) -> Any:
    """A context that gives `precision_of(dtype)` to products without a precision of their own."""
    return jax.default_matmul_precision(precision_of(dtype).name.lower())


def at_set_precision(attend: Callable[..., jax.Array], dtype: DTypeLike) -> Callable[..., jax.Array]:
    """`attend` and its gradient, both traced in the context of `set_precision`; the gradient is traced later."""

    def forward(*operands: Any) -> tuple[jax.Array, Any]:
        with set_precision(dtype):
            return jax.vjp(attend, *operands)

    def backward(pull: Any, slope: jax.Array) -> Any:
        with set_precision(dtype):
            return pull(slope)

    run = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    run.defvjp(forward, backward)
    return run


class AttentionChoice(NamedTuple):
    """A run's attention over whole sequences."""

    attention: Attention | None
    """The kernel; None: `jax.nn.dot_product_attention` by XLA."""
    reason: str
    """Why no faster attention is used, in a clause; empty for the fastest."""


def choose(
    setting: Literal["xla"] | None, config: Architecture, mesh: Mesh, dtype: DTypeLike, packed: bool
) -> AttentionChoice:
    """The fastest attention that can run on these devices, for these sizes and this dtype, or XLA's by the `setting`.

    `packed` says whether a row may hold several documents.
    """
    device, axis, kv_heads = mesh.devices.flat[0], RULES["kv_heads"], config.num_key_value_heads
    kernel = kernel_for(config, mesh, packed)
    if setting == "xla":
        return AttentionChoice(None, "model.attention asks for it")
    if kernel is None:
        return AttentionChoice(None, f"no kernel for {platform(mesh)} devices")
    if kv_heads % mesh.shape[axis]:
        obstacle = f"mesh.{axis} = {mesh.shape[axis]} does not divide the model's {kv_heads} kv_heads"
    elif config.head_dim not in HEAD_DIMS[kernel]:
        sizes = ", ".join(map(str, HEAD_DIMS[kernel][:-1])) + f" or {HEAD_DIMS[kernel][-1]}"
        obstacle = f"it needs heads of size {sizes}, and the model's have {config.head_dim}"
    elif kernel == "cudnn" and device not in jax.devices():
        obstacle = "cuDNN picks its kernel on the GPU, which is not here"  # so --plan assumes XLA's attention
    elif kernel == "cudnn" and float(getattr(device, "compute_capability", 8)) < 8:
        obstacle = "it needs a GPU of compute capability 8.0"
    elif kernel != "splash" and jnp.dtype(dtype) != jnp.bfloat16:
        obstacle = f"it computes in bfloat16, and model.dtype is {jnp.dtype(dtype)}"
    else:
        return AttentionChoice(Attention(kernel, mesh, packed, config.sliding_window), "")
    return AttentionChoice(None, f"{kernel} can't be used: {obstacle}")


def kernel_for(config: Architecture, mesh: Mesh, packed: bool) -> AttentionKernel | None:
    """The fastest kernel for the kind of devices: cuDNN's for heads and rows that need no mask and no other kernel."""
    if platform(mesh) == "tpu":
        return "splash"
    if platform(mesh) != "gpu":
        return None
    hopper = why_not_hopper(mesh) is None
    return "mosaic_gpu" if hopper and (packed or config.head_dim not in HEAD_DIMS["cudnn"]) else "cudnn"


def platform(mesh: Mesh) -> str:
    """The kind of the mesh's devices, as "tpu" or "gpu"."""
    return mesh.devices.flat[0].platform.replace("cuda", "gpu")
