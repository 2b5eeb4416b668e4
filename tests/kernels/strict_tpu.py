"""Runs Pallas TPU kernels on the CPU under JAX's interpreter and makes a failure of all that it finds wrong.

What fails is a read or write outside of an array or a window, a block that is visited again after others, two accesses
of the same memory that nothing orders (a race), a copy that nobody waited for. What was never written is NaN: windows,
scratch, outputs, and the part of a block past the end of its array; integers have their largest value.

JAX's interpreter (`jax._src.pallas.mosaic.interpret`) is less strict than that by itself, and than a TPU:

- Of a race, jax 0.10.2 prints a message and goes on; 0.12 raises. Of a copy that nobody waited for, both only print.
- Its clocks tell copies apart only if there are more of them than the default, of 2.
- It keeps what an output's window holds when the window moves to the next block. A TPU takes the window's other buffer.

Left out: what a TPU has fetched too early. An input's block is fetched, here, as its step begins.
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
    """Kernels that are traced and run in this context are interpreted; AssertionError tells what they did wrong.

    Nothing else should print meanwhile: what is printed is taken for a complaint.

    Args:
        cores: that share the "parallel" dimensions of a grid, each with scratch and windows of its own.
        copies: made as soon as they start, or as late as something waits for them.
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
    forgetful = mock.patch.object(interpreter, "get", _get_and_forget)
    unoptimised = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    try:
        with forgetful, contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(strict):
            yield
            jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        raise AssertionError(f"{printed.getvalue()}{error}") from error
    finally:
        pltpu.reset_tpu_interpret_mode_state()
        jax.config.update("jax_disable_most_optimizations", unoptimised)
    assert not printed.getvalue(), printed.getvalue()


_get = interpreter.get


@functools.wraps(_get.__wrapped__)  # which is what a copy calls
def _get_and_forget(token: Any, *place: Any, **reader: Any) -> tuple[Any, np.ndarray]:
    """Reads memory; an output's window, which is read when its block is done, then holds nothing any more."""
    token, value = _get(token, *place, **reader)
    transforms = place[4]
    if not reader and not transforms:  # it was read whole, and not by the kernel nor for an input
        nothing = np.full(value.shape, get_uninitialized_value(value.dtype, "nan"), value.dtype)
        token = interpreter.store(token, *place, nothing)
    return token, value
