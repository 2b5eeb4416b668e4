"""The gated delta rule and its short convolution, the token mixing of three in four of Qwen3.5's layers.

A head has a memory S [D, E] (Yang et al. 2024, arXiv:2412.06464, equation 10). Each token updates it by
S <- exp(decay) S, then S <- S + beta k (v - S^T k)^T; the output is S^T q. `recurrent` computes this token by token.
`chunked` takes 64 tokens at a time (section 3.3 there; Yang et al. 2024, arXiv:2406.06484, section 3). The updates of a
chunk are the solution of a triangular system, and only the memory passes from one chunk to the next.

Documents packed in a row are separated exactly: no decay, product or convolution input crosses a border.

float32 products at the highest precision don't use a GPU's matrix units, and take six passes on a TPU. If the model
computes in bfloat16, `chunked` takes cheaper `Precisions`, which are still finer than the rounding of its operands.

Letters: B rows, T tokens, S taps before the last, C channels; K key heads, G value heads of each, D and E the sizes of
a key and a value; N chunks, I and J tokens of a chunk.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from lm_head.precision import precision_of
from lm_head.target import why_not_hopper
from mllm.model.architecture import DeltaNet

CHUNK = 64
GROUP = 16
"""The number of chunks that solve their systems at once."""
EPSILON = 1e-6
"""Added to the square of a length."""
SHORT_SEQUENCE = 8
"""Up to this number of tokens the recurrence is faster."""

Precision = jax.lax.Precision | jax.lax.DotAlgorithmPreset


class Precisions(NamedTuple):
    """How products of float32 operands are computed; sums are float32."""

    products: Precision = precision_of(jnp.float32)
    inverse: Precision = precision_of(jnp.float32)
    """The precision of the triangular systems' inverse, which needs full float32."""

    @classmethod
    def of(cls, dtype: DTypeLike, platform: str) -> "Precisions":
        """The precisions for a compute dtype and a platform, such as "tpu" or "gpu"."""
        if jnp.dtype(dtype) != jnp.bfloat16 or platform not in ("gpu", "tpu"):
            return EXACT
        if platform == "tpu":
            return cls(jax.lax.Precision.HIGH)  # three passes
        # Eleven bits of each operand; bfloat16's eight would take trainer and sampler further apart (docs/log.md). Six
        # products of bfloat16 parts are as exact as float32.
        algorithms = jax.lax.DotAlgorithmPreset
        return cls(algorithms.TF32_TF32_F32, algorithms.BF16_BF16_F32_X6)


EXACT = Precisions()


class DeltaState(NamedTuple):
    """The state that a delta net keeps of each row's tokens."""

    inputs: Any
    """The last inputs of the convolution, [B, S, C], in the compute dtype; zeros before a document's first."""
    memory: Any
    """[B, K G, D, E], float32."""


def kernels_can_run(net: DeltaNet, dtype: DTypeLike, mesh: Mesh | None) -> bool:
    """Whether the kernels of delta_kernel.py support the sizes, the compute dtype and the devices."""
    fit = {net.key_dim, net.value_dim} <= {64, 128} and dtype == jnp.bfloat16
    return fit and mesh is not None and why_not_hopper(mesh) is None


def empty_state(rows: int, net: DeltaNet, dtype: DTypeLike) -> DeltaState:
    """The state before the first token of each row; `dtype` is the compute dtype."""
    inputs = jnp.zeros((rows, net.taps - 1, 2 * net.keys + net.values), dtype)
    return DeltaState(inputs, jnp.zeros((rows, net.value_heads, net.key_dim, net.value_dim), jnp.float32))


class Rule(NamedTuple):
    """The operands of the delta rule; a padding token has decay 0 and beta 0."""

    queries: Float[jax.Array, "B T K D"]
    """Queries and keys of any norm: the rule scales queries to norm 1/sqrt(D), and keys to norm 1."""
    keys: Float[jax.Array, "B T K D"]
    values: Float[jax.Array, "B T K G E"]
    decay: Float32[jax.Array, "B T K G"]
    """The logarithm of the factor."""
    beta: Float32[jax.Array, "B T K G"]
    documents: Int[jax.Array, "B T"]
    """The number of borders up to the token. A row begins in document 0, which continues from the given memory."""

    @property
    def normalized(self) -> "Rule":
        """The rule with vectors in float32, and the lengths of queries and keys as they are read."""

        queries = unit(self.queries) * self.queries.shape[-1] ** -0.5
        return self._replace(queries=queries, keys=unit(self.keys), values=self.values.astype(jnp.float32))


def unit(x: Float[jax.Array, "*B D"]) -> Float32[jax.Array, "*B D"]:
    """Vectors of length 1."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + EPSILON)


def documents_of(segments: Int[jax.Array, "B T"]) -> Int[jax.Array, "B T"]:
    """The number of borders up to each token. A border is a change of the segment; padding is no border."""
    before = jnp.pad(segments, ((0, 0), (1, 0)), mode="edge")[:, :-1]
    return jnp.cumsum((segments != before) & (segments != 0), axis=1)


def convolve(
    x: Float[jax.Array, "B T C"],
    taps: Float[jax.Array, "C _"],
    segments: Int[jax.Array, "B T"],
    before: Float[jax.Array, "B S C"],
) -> tuple[Float32[jax.Array, "B T C"], Float[jax.Array, "B S C"]]:
    """Each channel's causal convolution within its document, float32; and the inputs after each row's last token.

    The last tap is the token's own. The row's first document continues from the inputs `before`.
    """
    count, time = before.shape[1], x.shape[1]
    documents = documents_of(segments)
    inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    input_documents = jnp.pad(documents, ((0, 0), (count, 0)))
    wide, y = inputs.astype(jnp.float32), jnp.zeros((), jnp.float32)  # so the gradient's sum is rounded once
    for tap in range(count + 1):
        same = input_documents[:, tap : tap + time] == documents
        y += same[..., None] * (wide[:, tap : tap + time] * taps[:, tap].astype(jnp.float32))
    length = jnp.max(jnp.where(segments != 0, jnp.arange(1, time + 1), 0), axis=1, keepdims=True)
    positions = length + jnp.arange(count)
    last_document = jnp.take_along_axis(input_documents, length + count - 1, axis=1)
    same_document = jnp.take_along_axis(input_documents, positions, axis=1) == last_document
    return y, jnp.where(same_document[..., None], jnp.take_along_axis(inputs, positions[..., None], axis=1), 0)


def recurrent(
    rule: Rule, memory: Float32[jax.Array, "B K G D E"]
) -> tuple[Float32[jax.Array, "B T K G E"], Float32[jax.Array, "B K G D E"]]:
    """The outputs, and the memory after the last token, one token after the other."""

    def step(carry: tuple[jax.Array, jax.Array], token: Rule) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        memory, document = carry
        factor = jnp.exp(token.decay) * (token.documents == document)[:, None, None]
        # Sums instead of matrix products: XLA for CPUs would transpose the memory for matrix products.
        query, key = (x[:, :, None, :, None] for x in (token.queries, token.keys))
        memory = memory * factor[..., None, None]
        error = token.values - jnp.sum(memory * key, axis=-2)
        memory += key * (token.beta[..., None] * error)[..., None, :]
        memory = jax.lax.platform_dependent(memory, cuda=row_major, default=lambda x: x)
        return (memory, token.documents), jnp.sum(memory * query, axis=-2)

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), rule.normalized)
    first = jnp.zeros_like(rule.documents[:, 0])
    (memory, _), outputs = jax.lax.scan(step, (memory, first), tokens, unroll=tokens[0].shape[0] == 1)
    return outputs.swapaxes(0, 1), memory


def row_major(memory: Float32[jax.Array, "B K G D E"]) -> Float32[jax.Array, "B K G D E"]:
    """The memory with a pinned layout on a GPU: else XLA transposes all states before and after a decode chunk."""
    return with_layout_constraint(memory, Layout(major_to_minor=(0, 1, 2, 3, 4)))


def chunked(
    rule: Rule, memory: Float32[jax.Array, "B K G D E"], precisions: Precisions = EXACT
) -> tuple[Float32[jax.Array, "B T K G E"], Float32[jax.Array, "B K G D E"]]:
    """The results of `recurrent`, computed chunk by chunk."""
    batch, time = rule.documents.shape
    chunks = -(-time // CHUNK)
    groups = -(-chunks // GROUP)
    chunks_each = -(-chunks // groups)
    missing = groups * chunks_each * CHUNK - time

    def grouped(x: jax.Array) -> jax.Array:
        whole = padded(x, missing)
        return jnp.moveaxis(whole.reshape(batch, groups, chunks_each, CHUNK, *x.shape[2:]), 0, 2)  # groups N B I ...

    parts = jax.tree.map(grouped, rule)
    ends = parts.documents[..., -1].reshape(-1, batch)
    entering = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]).reshape(groups, chunks_each, batch)
    memory, outputs = jax.lax.scan(partial(run_group, precisions), memory, (parts, entering))
    outputs = outputs.transpose(2, 0, 1, 5, 3, 4, 6)  # from groups N B K G I E
    return outputs.reshape(batch, -1, *rule.values.shape[2:])[:, :time], memory


def padded(x: Float[jax.Array, "B T *_"] | Int[jax.Array, "B T"], missing: int) -> jax.Array:
    """The array with more tokens: zeros, or numbers of the last document."""
    mode = "edge" if jnp.issubdtype(x.dtype, jnp.integer) else "constant"
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=mode)


def run_group(
    precisions: Precisions,
    memory: Float32[jax.Array, "B K G D E"],
    group: tuple[Rule, Int[jax.Array, "N B"]],
) -> tuple[Float32[jax.Array, "B K G D E"], Float32[jax.Array, "N B K G I E"]]:
    """The memory after some chunks, [N, B, I, ...] each, and their outputs; `entering` is the document before each."""
    rule, entering = group
    einsum = partial(jnp.einsum, precision=precisions.products)
    queries, keys, values, decay, beta, documents = rule.normalized
    decay, beta = (jnp.moveaxis(x, 2, -1) for x in (decay, beta))  # N B K G I
    index = jnp.arange(CHUNK)
    later = index[:, None] > index
    same = (documents[..., :, None] == documents[..., None, :])[:, :, None, None]
    # Sums of the decays between two tokens, each by itself: a difference of two sums from the chunk's begin would lose
    # small terms.
    between = jnp.cumsum(later * decay[..., :, None], axis=-2)
    factor = same * (later | jnp.eye(CHUNK, dtype=bool)) * jnp.exp(between)  # from J to I
    goes_on = (documents == entering[..., None])[:, :, None, None]
    memory_factor = goes_on * jnp.exp(jnp.cumsum(decay, axis=-1))
    end_factor = factor[..., -1, :]
    similarity = einsum("nbikd,nbjkd->nbkij", keys, keys)[:, :, :, None]
    solve = invert(later * beta[..., None] * similarity * factor, precisions.inverse)
    head_keys = jnp.moveaxis(keys, 2, 3)[:, :, :, None]  # N B K 1 I D
    writes = einsum("nbkgij,nbjkge->nbkgie", solve * beta[..., None, :], values)
    reads = einsum("nbkgij,nbkgjd->nbkgid", solve, (beta * memory_factor)[..., None] * head_keys)
    scores = einsum("nbikd,nbjkd->nbkij", queries, keys)[:, :, :, None] * factor
    memory_queries = memory_factor[..., None] * jnp.moveaxis(queries, 2, 3)[:, :, :, None]
    end_keys = end_factor[..., None] * head_keys

    def run_chunk(memory: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        writes, reads, queries, scores, keys, kept = chunk
        written = writes - einsum("bkgid,bkgde->bkgie", reads, memory)
        output = einsum("bkgid,bkgde->bkgie", queries, memory) + einsum("bkgij,bkgje->bkgie", scores, written)
        return kept[..., None, None] * memory + einsum("bkgid,bkgie->bkgde", keys, written), output

    return jax.lax.scan(run_chunk, memory, (writes, reads, memory_queries, scores, end_keys, memory_factor[..., -1]))


def inverse(below: Float32[jax.Array, "*N I I"], precision: Precision = EXACT.inverse) -> Float32[jax.Array, "*N I I"]:
    """(1 + below)^-1 for strictly lower triangular matrices.

    Diagonal blocks of 1, 2, 4, ... rows are inverted and merged in pairs. The sum of powers of `below` takes fewer
    products, but loses all digits if neighbouring keys are alike.
    """
    size = below.shape[-1]
    index = jnp.arange(size)
    product = partial(jnp.matmul, precision=precision)
    found, width = jnp.eye(size), 1
    while width < size:
        block = index // width
        corner = (block[:, None] == block + 1) * (block % 2 == 0) * below
        found -= corner if width == 1 else product(product(found, corner), found)
        width *= 2
    return found


def differentiate_inverse(precision: Precision, inverse: jax.Array, slope: jax.Array) -> tuple[jax.Array]:
    product = partial(jnp.matmul, precision=precision)
    transposed = inverse.swapaxes(-1, -2)
    return (-jnp.tril(product(product(transposed, slope), transposed), -1),)


invert = jax.custom_vjp(inverse, nondiff_argnums=(1,))
invert.defvjp(lambda below, precision: (inverse(below, precision),) * 2, differentiate_inverse)
