"""Additions to JAX's interpreter of Pallas Mosaic GPU kernels, for strict_gpu.py.

- A warpgroup's product reads its operands until it was waited for, and its accumulator has no value before that.
- TMA stores that add: the sum is written to the copy's source ahead of the copy.
- Speed: threads share compiled programs, and callbacks get NumPy arrays.

They replace internals of jax 0.12 (`jax._src.pallas.mosaic_gpu.interpret`).
"""

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret


@contextlib.contextmanager
def patched() -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for place, name, value in _patches():
            patches.enter_context(mock.patch.object(place, name, value))
        yield


def check_all() -> None:
    assert not callbacks.get_races().races_found
    assert not any(_in_flight.values()), "a product was never waited for"


def reset() -> None:
    _in_flight.clear()
    callbacks.reset_gpu_interpret_mode_state()


def _patches() -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement), each a function of this module: programs keep those they were traced with."""
    primitives = jaxpr_interpret.gpu_primitives
    # The interpreter ignores waits for products; here they replace a primitive that only Blackwell has.
    waits = SimpleNamespace(**vars(primitives) | {"wait_load_tmem_p": primitives.wgmma_wait_p})
    return [
        (callbacks, "wgmma", _multiply),
        (callbacks, "wgmma_accumulator_deref", _read_accumulator),
        (jaxpr_interpret, "gpu_primitives", waits),
        (jaxpr_interpret.JaxprInterpreter, "_interpret_wait_load_tmem_p", _interpret_wait),
        (callbacks, "copy_smem_to_gmem", _copy_or_add),
        (thread_map, "_run_jaxpr", _run_compiled_once),
        (jax_callback, "api", SimpleNamespace(**vars(jax_callback.api) | {"device_put": _on_the_host})),
    ]


# --- products in flight ---


class Product(NamedTuple):
    accumulator: Any
    operands: list[tuple[Any, Any]]
    contents: list[np.ndarray]
    source_info: Any


_in_flight: defaultdict[Any, deque[Product]] = defaultdict(deque)
"""Each warpgroup's products that it has not waited for, oldest first."""
_deref = callbacks.wgmma_accumulator_deref


@callbacks.fail_on_exception
def _multiply(*, token: Any, mesh_location: Any, thread: Any, source_info: Any = None, **arguments: Any) -> Any:
    """Like JAX's callback, but in float32, in which NumPy is fast, and with operands that the race detector sees."""
    memory = callbacks._get_shared_memory()

    def named(operand: str) -> tuple[Any, Any]:
        key = callbacks.HostAllocationKey.from_array(arguments[f"{operand}_allocation_key_as_array"])
        transforms = callbacks._remove_noop_transforms(arguments[f"{operand}_transforms"])
        return key, memory.access(key, jax.tree.map(int, transforms))

    accumulator, *operands = map(named, ("acc", "a", "b"))
    a, b = contents = _read_operands(operands, thread, source_info)
    acc, _, _ = memory.get_buffer_content(*accumulator, thread)
    memory.store_buffer_content(*accumulator, acc + a.astype(np.float32) @ b.astype(np.float32), thread)
    _in_flight[thread].append(Product(accumulator[0], operands, contents, source_info))
    return token


def _read_operands(operands: list[tuple[Any, Any]], thread: Any, source_info: Any) -> list[np.ndarray]:
    memory = callbacks._get_shared_memory()
    with memory.lock:  # a read by an asynchronous unit is an event of its own
        memory.clocks[thread].async_smem_clock.inc(memory.thread_to_vc_position(thread))
        clock = memory.clocks[thread].copy()
    for key, access in operands:
        callbacks.get_races().check_read(thread, clock.async_smem_clock, key, access, source_info=source_info)
    return [np.array(memory.get_buffer_content(key, access, thread)[0]) for key, access in operands]


def _wait(thread: Any, n: int) -> None:
    """Ends all but the last `n` products; operands may be read at any time up to then."""
    while len(_in_flight[thread]) > n:
        product = _in_flight[thread].popleft()
        now = _read_operands(product.operands, thread, product.source_info)
        same = all(x.tobytes() == y.tobytes() for x, y in zip(now, product.contents, strict=True))
        assert same, "RACE DETECTED: an operand was overwritten while a product read it"


@callbacks.fail_on_exception
def _wait_for_products(*, token: Any, thread: Any, n: int) -> Any:
    _wait(thread, n)
    return token


def _interpret_wait(self: Any, eqn: Any, token: Any, invals: Any) -> Any:
    shape, n = callbacks.TOKEN_SHAPE_DTYPE, int(eqn.params["n"])
    wait: Callable[..., Any] = lambda token, thread: _wait_for_products(token=token, thread=thread, n=n)  # noqa: E731
    return jax_callback.io_callback(wait, shape, token=token, thread=self.thread), []


@callbacks.fail_on_exception
def _read_accumulator(*, thread: Any, wait_n: int | None, **arguments: Any) -> Any:
    if wait_n is not None:
        _wait(thread, wait_n)
    key = callbacks.HostAllocationKey.from_array(arguments["acc_allocation_key_as_array"])
    pending = any(product.accumulator == key for product in _in_flight[thread])
    assert not pending, "an accumulator is read before its last product was waited for"
    return _deref(thread=thread, wait_n=wait_n, **arguments)


# --- adding stores ---

_copy = callbacks.copy_smem_to_gmem
_adding = threading.Lock()


def _copy_or_add(*, reduction_op: Any, **arguments: Any) -> Any:
    if reduction_op is None:
        return _copy(reduction_op=None, **arguments)
    with _adding:
        assert reduction_op == "add"
        _add_ahead(**arguments)
        return _copy(reduction_op=None, **arguments)


def _add_ahead(**arguments: Any) -> None:
    """Adds the contents of a copy's destination to its source."""
    memory, thread = callbacks._get_shared_memory(), arguments["thread"]
    found = []
    for end in ("src", "dst"):
        key = callbacks.HostAllocationKey.from_array(arguments[f"{end}_allocation_key_as_array"])
        transforms = callbacks._remove_noop_transforms(arguments[f"{end}_transforms"])
        access = memory.access(key, jax.tree.map(int, transforms))
        content, (_, dtype), _ = memory.get_buffer_content(key, access, thread)
        found.append((key, access, callbacks._pad_to_requested(content, access.shape, dtype, 0)))
    (key, access, new), (_, _, old) = found
    memory.store_buffer_content(key, access, np.asarray(old + new, new.dtype), thread)


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
