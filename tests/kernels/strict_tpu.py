"""Runs Pallas TPU kernels on the CPU under JAX's interpreter, and raises for every mistake that it can find.

Mistakes are:

- a read or write outside of an array or a window;
- a block that is visited again after other blocks;
- a race: two accesses of the same memory without an order;
- a copy without a wait.

Memory that was never written is NaN: windows, scratch, outputs, and the part of a block past the end of its array.
Integers have their largest value.

JAX's interpreter (`jax._src.pallas.mosaic.interpret`) by itself is less strict than a TPU:

- At a race, jax 0.10.2 prints a message and goes on; 0.12 raises. At a copy without a wait, both only print.
- Its clocks distinguish only two copies by default.
- It keeps the contents of an output's window when the window moves to the next block; a TPU switches to another buffer.
- It pads an operand to whole blocks, and forgets the padding where a result takes the operand's place.


Left out: blocks that a TPU fetches too early. Here an input's block is fetched as its step begins.
"""

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret.utils import get_uninitialized_value
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def strict_interpreter(cores: int = 1, copies: Literal["eager", "on_wait"] = "eager") -> Iterator[None]:
    """Interprets kernels that are traced and run in this context; a mistake raises AssertionError.

    Nothing else may print meanwhile: the interpreter's complaints are recognised by being printed.

    Args:
        cores: number of cores that share the "parallel" dimensions of a grid. Each has its own scratch and windows.
        copies: whether a copy is made at its start or only at the wait for it.
    """
    strict = pltpu.InterpretParams(
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        detect_races=True,
        vector_clock_size=1024,  # a copy gets one of these at random
        num_cores_or_threads=cores,
        dma_execution_mode=copies,
    )
    printed = io.StringIO()
    one_buffer = mock.patch.object(interpreter, "get", _get_and_clear)
    unpadded = mock.patch.object(interpreter, "interpret_pallas_call", _interpret_unpadded)
    unoptimised = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    try:
        with one_buffer, unpadded, contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(strict):
            yield
            jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        raise AssertionError(f"{printed.getvalue()}{error}") from error
    finally:
        pltpu.reset_tpu_interpret_mode_state()
        jax.config.update("jax_disable_most_optimizations", unoptimised)
    assert not printed.getvalue(), printed.getvalue()


_get, _interpret = interpreter.get, interpreter.interpret_pallas_call


def _interpret_unpadded(*args: Any, out_avals: Any, **options: Any) -> list[jax.Array]:
    results = _interpret(*args, out_avals=out_avals, **options)
    return [x[tuple(map(slice, aval.shape))] for x, aval in zip(results, out_avals, strict=True)]


@functools.wraps(_get.__wrapped__)  # a copy calls it
def _get_and_clear(token: Any, *place: Any, **reader: Any) -> tuple[Any, np.ndarray]:
    """Reads memory; clears an output's window, which is read when its block is done."""
    token, value = _get(token, *place, **reader)
    transforms = place[4]
    if not reader and not transforms:  # a whole window was read, and neither by the kernel nor for an input
        cleared = np.full(value.shape, get_uninitialized_value(value.dtype, "nan"), value.dtype)
        token = interpreter.store(token, *place, cleared)
    return token, value
