"""The gated delta rule on Hopper GPUs: `delta_net.chunked` and its gradient as five Pallas kernels (Triton).

XLA's program has dozens of kernels, and each reads and writes arrays of all tokens. Here `prepare` works on all chunks
side by side. `advance` takes one chunk after the other, with the memory in registers. The backward pass has three
kernels: the gradient of the memories, from the last chunk to the first; the gradient of the chunks, side by side; and
the gradient of the operands, side by side. JAX differentiates `prepare` inside the last kernel.

No GPU has run these kernels. Tests compare them with the recurrence under JAX's interpreter, and compile them for an
H100. JAX 0.11 deprecates Pallas' Triton backend. JAX 0.12 still has the backend.

Letters: as in delta_net.py; H = K G value heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32, Int

from mllm.model.delta_net import CHUNK, Precisions, Rule, differentiate_inverse, inverse, padded, unit

COLUMNS = 64
"""Columns of the memory that a program of `advance` holds; columns don't depend on each other."""
WARPS = 8
AHEAD = 2
"""Chunks in flight in a kernel that takes one chunk after the other."""


class Chunk(NamedTuple):
    """What `advance` needs of a chunk, in float32; see `prepare`."""

    writes: Float32[Array, "I E"]
    reads: Float32[Array, "I D"]
    queries: Float32[Array, "I D"]
    scores: Float32[Array, "I J"]
    keys: Float32[Array, "I D"]
    kept: Float32[Array, " I"]
    """The factor of the memory before the chunk, at each token."""


def prepare(
    precisions: Precisions,
    solve: Callable[[Float32[Array, "I J"]], Float32[Array, "I J"]],
    documents: Int[Array, " I"],
    goes_on: Float32[Array, " I"],
    queries: Float[Array, "I D"],
    keys: Float[Array, "I D"],
    values: Float[Array, "I E"],
    decay: Float32[Array, " I"],
    beta: Float32[Array, " I"],
) -> tuple[Chunk, Float32[Array, "I J"]]:
    """The work on a chunk that needs no memory, as in `delta_net.run_group`, and the solution of its system.

    `goes_on` is 1 at tokens of the document before the chunk. `solve` computes `delta_net.inverse`.
    """
    dot = partial(product, precisions.products)
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    within, later = row >= column, row > column
    # Sums by products with ones: Pallas has no gradient of a cumulative sum.
    between = product(precisions.inverse, within.astype(jnp.float32), jnp.where(later, decay[:, None], 0.0))
    same = documents[:, None] == documents[None, :]
    factor = jnp.where(same & within, jnp.exp(between), 0.0)
    kept = goes_on * jnp.exp(jnp.sum(jnp.where(within, decay[None, :], 0.0), axis=1))
    at_end = jnp.sum(jnp.where(row == CHUNK - 1, factor, 0.0), axis=0)
    queries, keys = unit(queries) * queries.shape[1] ** -0.5, unit(keys)
    solution = solve(jnp.where(later, beta[:, None] * dot(keys, keys.T) * factor, 0.0))
    chunk = Chunk(
        writes=dot(solution, beta[:, None] * values.astype(jnp.float32)),
        reads=dot(solution, (beta * kept)[:, None] * keys),
        queries=kept[:, None] * queries,
        scores=dot(queries, keys.T) * factor,
        keys=at_end[:, None] * keys,
        kept=kept,
    )
    return chunk, solution


def advance(
    precisions: Precisions, memory: Float32[Array, "D E"], chunk: Chunk
) -> tuple[Float32[Array, "D E"], Float32[Array, "I E"]]:
    """The memory after the chunk, and the outputs."""
    dot = partial(product, precisions.products)
    written = chunk.writes - dot(chunk.reads, memory)
    place = lax.broadcasted_iota(jnp.int32, (CHUNK,), 0)
    kept = jnp.sum(jnp.where(place == CHUNK - 1, chunk.kept, 0.0))
    output = dot(chunk.queries, memory) + dot(chunk.scores, written)
    return kept * memory + dot(chunk.keys.T, written), output


class Operands(NamedTuple):
    """A rule's operands, rows of tokens padded to whole chunks."""

    documents: Int[Array, "B T"]
    goes_on: Float32[Array, "B T"]
    queries: Float[Array, "B T K D"]
    keys: Float[Array, "B T K D"]
    values: Float[Array, "B T H E"]
    decay: Float32[Array, "B T H"]
    beta: Float32[Array, "B T H"]


def chunked(
    rule: Rule, memory: Float32[Array, "B K G D E"], precisions: Precisions, interpret: bool = False
) -> tuple[Float32[Array, "B T K G E"], Float32[Array, "B K G D E"]]:
    """The results of `delta_net.chunked`; D and E are 64 or 128. `interpret` is for other devices, as in tests."""
    batch, time = rule.documents.shape
    heads = (batch, -1, memory.shape[1] * memory.shape[2])

    queries, keys, values, decay, beta, documents = (padded(x, -time % CHUNK) for x in rule)
    before = jnp.pad(documents, ((0, 0), (1, 0)))[:, :-1:CHUNK]
    goes_on = (documents == jnp.repeat(before, CHUNK, axis=1)).astype(jnp.float32)
    by_head = values.reshape(*heads, values.shape[-1]), decay.reshape(heads), beta.reshape(heads)
    operands = Operands(documents, goes_on, queries, keys, *by_head)
    outputs, after = run(Kernels(precisions, interpret), operands, memory.reshape(batch, -1, *memory.shape[3:]))
    return outputs[:, :time].reshape(*rule.values.shape), after.reshape(memory.shape)


class Kernels(NamedTuple):
    """The five kernels."""

    precisions: Precisions
    interpret: bool

    def prepare(self, operands: Operands) -> tuple[Chunk, Float32[Array, "B H T J"]]:
        """The chunks of all rows and heads, [B, H, T, ...] each, and the solutions of their systems."""
        (batch, time, heads, columns), size = operands.values.shape, operands.keys.shape[3]

        def body(*refs: Any) -> None:
            solve = partial(inverse, precision=self.precisions.inverse)
            chunk, solution = prepare(self.precisions, solve, *(ref[...] for ref in refs[:7]))
            store(refs[7:], (*chunk, solution))

        widths = [(columns,), (size,), (size,), (CHUNK,), (size,), (), (CHUNK,)]
        outs = [jax.ShapeDtypeStruct((batch, heads, time, *width), jnp.float32) for width in widths]
        grid = batch, heads, time // CHUNK
        *chunk, solutions = self.call("prepare", body, grid, of_tokens(operands, heads), of_chunk(outs))
        return Chunk(*chunk), solutions

    def advance(self, chunks: Chunk, memory: Float32[Array, "B H D E"], keep: bool) -> tuple[Array, ...]:
        """The outputs [B, T, H, E] and the memory after the last chunk [B, H, D, E].

        With `keep` also the memory before each chunk, [B, H, N, D, E].
        """
        batch, heads, time, columns = chunks.writes.shape
        number = time // CHUNK

        def body(*refs: Any) -> None:
            of_chunks, (first, outputs, last, *kept) = Chunk(*refs[:6]), refs[6:]

            def run(n: Array, memory: Array) -> Array:
                for memories in kept:
                    memories[n] = memory
                memory, outputs[pl.ds(n * CHUNK, CHUNK)] = advance(self.precisions, memory, at(of_chunks, n))
                return memory

            last[...] = lax.fori_loop(0, number, run, first[...])

        shapes = [(batch, time, heads, columns), memory.shape, (batch, heads, number, *memory.shape[2:])]
        outputs, *memories = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes[: 2 + keep])
        outs = [*outputs_of_row(outputs), *of_row(memories, COLUMNS)]
        ins = [*chunks_of_row(chunks), *of_row([memory], COLUMNS)]
        return self.call("advance", body, (columns // COLUMNS, batch, heads), ins, outs, AHEAD)

    def memories_gradient(
        self, chunks: Chunk, of_outputs: Float32[Array, "B T H E"], of_last: Float32[Array, "B H D E"]
    ) -> tuple[Array, ...]:
        """The slopes of the memory after each chunk, [B, H, N, D, E], and before the first, [B, H, D, E]."""
        batch, heads, size, columns = of_last.shape
        number = chunks.writes.shape[2] // CHUNK

        def body(*refs: Any) -> None:
            of_chunks, (of_outputs, of_last, of_memories, of_first) = Chunk(*refs[:6]), refs[6:]

            def run(i: Array, slope: Array) -> Array:
                n = number - 1 - i
                of_memories[n] = slope
                linear = partial(advance, self.precisions, chunk=at(of_chunks, n))
                _, pull = jax.vjp(linear, jnp.zeros_like(slope))  # the gradient is the same at any memory
                return pull((slope, of_outputs[pl.ds(n * CHUNK, CHUNK)]))[0]

            of_first[...] = lax.fori_loop(0, number, run, of_last[...])

        shapes = (batch, heads, number, size, columns), of_last.shape
        outs = of_row([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], COLUMNS)
        ins = [*chunks_of_row(chunks), *outputs_of_row(of_outputs), *of_row([of_last], COLUMNS)]
        return self.call("memories_gradient", body, (columns // COLUMNS, batch, heads), ins, outs, AHEAD)

    def chunks_gradient(
        self,
        chunks: Chunk,
        memories: Float32[Array, "B H N D E"],
        of_outputs: Float32[Array, "B T H E"],
        of_memories: Float32[Array, "B H N D E"],
    ) -> Chunk:
        """The slopes of the chunks, from the memory before each chunk and the slope of the memory after each chunk."""

        def body(*refs: Any) -> None:
            # JAX's gradient would hold all operands and slopes at once, and spill four times as many registers.
            chunk, (memory, of_memory, of_output), slopes = Chunk(*refs[:6]), refs[6:9], Chunk(*refs[9:])
            dot = partial(product, self.precisions.products)
            written = chunk.writes[...] - dot(chunk.reads[...], memory[...])
            slopes.scores[...] = dot(of_output[...], written.T)
            slopes.keys[...] = dot(written, of_memory[...].T)
            of_written = dot(chunk.scores[...].T, of_output[...]) + dot(chunk.keys[...], of_memory[...])
            slopes.writes[...] = of_written
            slopes.reads[...] = -dot(of_written, memory[...].T)
            slopes.queries[...] = dot(of_output[...], memory[...].T)
            of_kept = jnp.sum(memory[...] * of_memory[...])
            slopes.kept[...] = jnp.where(lax.broadcasted_iota(jnp.int32, (CHUNK,), 0) == CHUNK - 1, of_kept, 0.0)

        ins = [*of_chunk([*chunks, memories, of_memories]), *of_tokens([of_outputs], memories.shape[1])]
        outs = of_chunk([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in chunks])
        return Chunk(*self.call("chunks_gradient", body, memories.shape[:3], ins, outs))

    def operands_gradient(self, operands: Operands, solutions: Float32[Array, "B H T J"], of_chunks: Chunk) -> Operands:
        """The slopes of the operands, from the slopes of the chunks."""
        batch, time, heads, _ = operands.values.shape

        def body(*refs: Any) -> None:
            documents, goes_on, *inputs, solution = (ref[...] for ref in refs[:8])
            solve = jax.custom_vjp(lambda below: solution)
            slope_of = partial(differentiate_inverse, self.precisions.inverse)
            solve.defvjp(lambda below: (solution, solution), slope_of)
            _, pull = jax.vjp(lambda *x: prepare(self.precisions, solve, documents, goes_on, *x)[0], *inputs)
            store(refs[14:], pull(Chunk(*(ref[...] for ref in refs[8:14]))))

        # XLA sums the slopes of a key head over the value heads that share the key head.
        outs = [
            jax.ShapeDtypeStruct((batch, time, heads, *x.shape[3:]), x.dtype if x.shape[2] == heads else jnp.float32)
            for x in operands[2:]
        ]
        ins = [*of_tokens(operands, heads), *of_chunk([solutions, *of_chunks])]
        slopes = self.call("operands_gradient", body, (batch, heads, time // CHUNK), ins, of_tokens(outs, heads))
        grouped = (x.reshape(*y.shape[:3], -1, *y.shape[3:]) for x, y in zip(slopes, operands[2:], strict=True))
        none: Any = None
        return Operands(
            none, none, *(jnp.sum(x, axis=3, dtype=y.dtype) for x, y in zip(grouped, operands[2:], strict=True))
        )

    def call(
        self,
        name: str,
        body: Callable[..., None],
        grid: tuple[int, ...],
        ins: list[Any],
        outs: list[Any],
        stages: int = 1,
    ) -> Any:
        """Runs a kernel on pairs of an array, or the shape of a result, and its block."""
        arrays, in_blocks = zip(*ins, strict=True)
        shapes, out_blocks = zip(*outs, strict=True)
        return pl.pallas_call(
            body,
            grid=grid,
            in_specs=in_blocks,
            out_specs=out_blocks,
            out_shape=shapes,
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=stages),
            interpret=self.interpret,
            name=f"delta_{name}",
        )(*arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
    kernels: Kernels, operands: Operands, memory: Float32[Array, "B H D E"]
) -> tuple[Float32[Array, "B T H E"], Float32[Array, "B H D E"]]:
    """The outputs, and the memory after the last token."""
    outputs, last = kernels.advance(kernels.prepare(operands)[0], memory, keep=False)
    return outputs, last


def keep(kernels: Kernels, operands: Operands, memory: Array) -> tuple[Any, Any]:
    chunks, solutions = kernels.prepare(operands)
    outputs, last, memories = kernels.advance(chunks, memory, keep=True)
    return (outputs, last), (operands, chunks, solutions, memories)


def pull_back(kernels: Kernels, kept: Any, slopes: tuple[Array, Array]) -> tuple[Operands, Array]:
    operands, chunks, solutions, memories = kept
    of_memories, of_first = kernels.memories_gradient(chunks, *slopes)
    of_chunks = kernels.chunks_gradient(chunks, memories, slopes[0], of_memories)
    return kernels.operands_gradient(operands, solutions, of_chunks), of_first


run.defvjp(keep, pull_back, optimize_remat=True)  # else a pass that is computed again writes all memories


# --- blocks -------------------------------------------------------------------------------------------------------
# A program has a row of tokens, a value head and a chunk; or some columns of the memory, a row and a head. Programs
# that differ only in the columns read the same chunks, and follow each other.


def of_tokens(arrays: Any, heads: int) -> list[Any]:
    """A chunk's tokens of arrays [B, T, ...]; a third dim is of heads, or of heads that several value heads share."""

    def block(x: Any) -> pl.BlockSpec:
        each = heads // x.shape[2] if x.ndim > 2 else 1
        return pl.BlockSpec((None, CHUNK, None, *x.shape[3:])[: x.ndim], lambda b, h, n: (b, n, h // each, 0)[: x.ndim])

    return [(x, block(x)) for x in arrays]


def of_chunk(arrays: Any) -> list[Any]:
    """A chunk's part of arrays [B, H, T, ...] or [B, H, N, D, E]."""

    def block(x: Any) -> pl.BlockSpec:
        chunk = CHUNK if x.ndim < 5 else None
        return pl.BlockSpec((None, None, chunk, *x.shape[3:]), lambda b, h, n: (b, h, n, 0, 0)[: x.ndim])

    return [(x, block(x)) for x in arrays]


def of_row(arrays: Any, columns: int | None = None) -> list[Any]:
    """All of a row and a head of arrays [B, H, ...], or the program's `columns` of the last dim."""

    def block(x: Any) -> pl.BlockSpec:
        sizes = x.shape[2:] if columns is None else (*x.shape[2:-1], columns)
        index = (0,) * (x.ndim - 3)
        return pl.BlockSpec((None, None, *sizes), lambda e, b, h: (b, h, *index, 0 if columns is None else e))

    return [(x, block(x)) for x in arrays]


def outputs_of_row(x: Any) -> list[Any]:
    """The program's columns of a row and a head of an array [B, T, H, E]."""
    return [(x, pl.BlockSpec((None, x.shape[1], None, COLUMNS), lambda e, b, h: (b, 0, h, e)))]


def chunks_of_row(chunks: Chunk) -> list[Any]:
    """A row's chunks, with the program's columns of the writes."""
    return [*of_row(chunks[:1], COLUMNS), *of_row(chunks[1:])]


def at(chunks: Chunk, n: Array) -> Chunk:
    return Chunk(*(ref[pl.ds(n * CHUNK, CHUNK)] for ref in chunks))


def store(refs: Any, arrays: Any) -> None:
    for ref, array in zip(refs, arrays, strict=True):
        ref[...] = array.astype(ref.dtype)


def product(precision: Any, a: Float32[Array, "_ _"], b: Float32[Array, "_ _"]) -> Float32[Array, "_ _"]:
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
