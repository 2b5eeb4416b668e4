"""Runs Pallas Mosaic GPU kernels on the CPU under JAX's interpreter (jax 0.12), and raises for each mistake.

Mistakes are:

- a read outside of an array, except by TMA, which fills with zeros;
- a race: two accesses of the same memory without an order;
- a barrier that is never completed.

Memory that was never written is NaN; integers have their largest value. Changes to the interpreter's internals:

- A warpgroup's product is computed at the wait for it: operands that were overwritten until then give other numbers.
- TMA stores that add: the sum is written to the copy's source ahead of the copy.
- Speed: threads share compiled programs, and callbacks get NumPy arrays.

Left out:

- meshes: jax 0.12 reports races on them where there are none;
- layouts of registers and shared memory, fences, and reordering by the hardware, which only a GPU can test;
- multicast: each block makes its own copy;
- concurrent clusters: they run one after the other.
"""

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback as jax_callback
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret
from jax.experimental.pallas import mosaic_gpu as plgpu

from lm_head import target


@contextlib.contextmanager
def strict_interpreter(multiprocessors: int = 4) -> Iterator[None]:
    """Interprets kernels that are traced and run in this context; a mistake raises AssertionError."""
    params = plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    primitives = jaxpr_interpret.gpu_primitives
    # The interpreter ignores waits for products; here they replace a primitive that only Blackwell has.
    waits = SimpleNamespace(**vars(primitives) | {"wait_load_tmem_p": primitives.wgmma_wait_p})
    places = [  # replacements are functions of this module: programs keep those they were traced with
        (target, "multiprocessors", lambda: multiprocessors),
        (lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)),
        (callbacks, "wgmma", _begin_product),
        (callbacks, "wgmma_accumulator_deref", _read_accumulator),
        (callbacks, "copy_smem_to_gmem", _copy_or_add),
        (jaxpr_interpret, "gpu_primitives", waits),
        (jaxpr_interpret.JaxprInterpreter, "_interpret_wait_load_tmem_p", _interpret_wait),
        (thread_map, "_run_jaxpr", _run_compiled_once),
        (jax_callback, "api", SimpleNamespace(**vars(jax_callback.api) | {"device_put": _on_the_host})),
    ]
    unoptimised = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    try:
        with contextlib.ExitStack() as patches:
            for place in places:
                patches.enter_context(mock.patch.object(*place))
            patches.enter_context(plgpu.force_gpu_interpret_mode(params))
            yield
            jax.effects_barrier()
        assert callbacks._races is None or not callbacks.get_races().races_found  # None where no kernel ran
        assert not any(_in_flight.values()), "a product was never waited for"
    except jax.errors.JaxRuntimeError as error:
        raise AssertionError(str(error)) from error
    finally:
        _in_flight.clear()
        callbacks.reset_gpu_interpret_mode_state()
        jax.config.update("jax_disable_most_optimizations", unoptimised)


# --- products ---

_in_flight: defaultdict[Any, deque[dict[str, Any]]] = defaultdict(deque)
"""The arguments of each warpgroup's products that it has not waited for, oldest first."""
_multiply, _dereference = callbacks.wgmma, callbacks.wgmma_accumulator_deref


def _begin_product(*, token: Any, **arguments: Any) -> Any:
    _in_flight[arguments["thread"]].append({"token": token, **arguments})
    return token


@callbacks.fail_on_exception
def _wait(*, token: Any, thread: Any, n: int) -> Any:
    """Computes all but the last `n` products."""
    while len(_in_flight[thread]) > n:
        arguments = _in_flight[thread].popleft()
        memory = callbacks._get_shared_memory()
        with memory.lock:  # a read by an asynchronous unit is an event of its own
            memory.clocks[thread].async_smem_clock.inc(memory.thread_to_vc_position(thread))
            clock = memory.clocks[thread].copy().async_smem_clock
        in_registers = np.ndim(arguments["a_allocation_key_as_array"]) == 2  # the operand itself, in place of a key
        for operand in "b" if in_registers else "ab":
            key, access = _place(arguments, operand)
            callbacks.get_races().check_read(thread, clock, key, access, source_info=arguments["source_info"])
        (_multiply_registers if in_registers else _multiply)(**arguments)
    return token


def _multiply_registers(*, a_allocation_key_as_array: Any, thread: Any, **arguments: Any) -> None:
    memory = callbacks._get_shared_memory()
    b, sums = (memory.get_buffer_content(*_place(arguments, name), thread)[0] for name in ("b", "acc"))
    sums += np.matmul(a_allocation_key_as_array, b, dtype=sums.dtype)
    memory.store_buffer_content(*_place(arguments, "acc"), sums, thread)


def _interpret_wait(self: Any, eqn: Any, token: Any, invals: Any) -> Any:
    n, shape = int(eqn.params["n"]), callbacks.TOKEN_SHAPE_DTYPE
    wait = lambda token, thread: _wait(token=token, thread=thread, n=n)  # noqa: E731
    return jax_callback.io_callback(wait, shape, token=token, thread=self.thread), []


def _read_accumulator(*, token: Any, thread: Any, wait_n: int | None, **arguments: Any) -> Any:
    if wait_n is not None:
        _wait(token=token, thread=thread, n=wait_n)
    return _dereference(token=token, thread=thread, wait_n=wait_n, **arguments)


def _place(arguments: dict[str, Any], name: str) -> tuple[Any, Any]:
    key = callbacks.HostAllocationKey.from_array(arguments[f"{name}_allocation_key_as_array"])
    transforms = callbacks._remove_noop_transforms(arguments[f"{name}_transforms"])
    return key, callbacks._get_shared_memory().access(key, jax.tree.map(int, transforms))


# --- adding stores ---

_copy = callbacks.copy_smem_to_gmem
_adding = threading.Lock()


def _copy_or_add(*, reduction_op: Any, **arguments: Any) -> Any:
    with _adding:
        if reduction_op is not None:
            assert reduction_op == "add"
            memory, thread = callbacks._get_shared_memory(), arguments["thread"]
            (key, access), there = _place(arguments, "src"), _place(arguments, "dst")
            new = memory.get_buffer_content(key, access, thread)[0]
            old, (_, dtype), _ = memory.get_buffer_content(*there, thread)
            old = callbacks._pad_to_requested(old, there[1].shape, dtype, 0)
            memory.store_buffer_content(key, access, np.asarray(old + new, new.dtype), thread)
        return _copy(reduction_op=None, **arguments)


# --- speed ---

_compiling = threading.Lock()


def _run_compiled_once(jaxpr: Any, consts: Any, *args: Any) -> None:
    """Runs a thread of a kernel; without the lock each thread would compile the same program."""
    with _compiling:
        program = jax.jit(thread_map._run, static_argnums=(0,)).trace(jaxpr, consts, *args).lower().compile()
    program(consts, *args)


def _on_the_host(arguments: Any, device: Any) -> tuple[Any, ...]:
    """A callback's arguments; converting them to JAX arrays took a third of the time."""
    return tuple(np.asarray(x) if np.shape(x) else np.asarray(x).item() for x in arguments)
