"""The work of a traced function, by arithmetic: flops of its matrix products, and bytes that they move.

A Pallas kernel declares both itself (`cost_estimate`). For other products, operands are read and results written once
each. A loop's body counts as often as it runs. Where that depends on data, a loop with Pallas kernels is taken to visit
all tokens, in blocks; other such loops, and kernels without a `cost_estimate`, have no answer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


class Part(NamedTuple):
    """A kernel by its name, or all products outside of kernels, called "XLA"."""

    name: str
    flops: int
    bytes: int


def parts(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Part] | None:
    """The parts of a function, each kernel summed over its calls; None where the work is not known.

    The first of `arguments`, trees of `jax.ShapeDtypeStruct`, has the shape [tokens, features].
    """
    found: dict[str, Part] = {}
    try:
        for name, flops, size in _parts(jax.make_jaxpr(function)(*arguments).jaxpr, 1, arguments[0].shape):
            before = found.get(name, Part(name, 0, 0))
            found[name] = Part(name, before.flops + flops, before.bytes + size)
    except _UnknownError:
        return None
    return list(found.values())


class _UnknownError(Exception):
    """A loop that depends on data holds products and no kernel, or a kernel has no `cost_estimate`."""


def _parts(jaxpr: Jaxpr, times: int, hidden: tuple[int, int]) -> Iterator[Part]:
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "pallas_call":
            cost = parameters["cost_estimate"]
            if cost is None:
                raise _UnknownError
            yield Part(parameters["name"], times * cost.flops, times * cost.bytes_accessed)
        elif name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            avals: list[Any] = [var.aval for var in (*equation.invars, *equation.outvars)]
            left, _, product = avals
            flops = 2 * product.size * math.prod(left.shape[dim] for dim in contracted)
            yield Part("XLA", times * flops, times * sum(x.size * x.dtype.itemsize for x in avals))
        elif name == "cond":
            branches = [list(_parts(branch.jaxpr, times, hidden)) for branch in parameters["branches"]]
            yield from max(branches, key=lambda branch: sum(part.flops for part in branch))
        else:
            for body in _bodies(parameters):
                turns = _blocks(body, hidden) if name == "while" else parameters.get("length", 1)
                yield from _parts(body, times * turns, hidden)


def _bodies(parameters: dict[str, Any]) -> list[Jaxpr]:
    leaves = jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr))
    return [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in leaves if isinstance(x, ClosedJaxpr | Jaxpr)]


def _blocks(body: Jaxpr, hidden: tuple[int, int]) -> int:
    """The number of blocks of rows that the kernels in a loop's body make of the hidden states; 1 without a product."""
    found = list(_equations(body))
    kernels = [equation for equation in found if equation.primitive.name == "pallas_call"]
    shapes = [[var.aval.shape for var in equation.invars if var.aval.ndim == 2] for equation in kernels]
    # A kernel's first matrix with as many features is its block of hidden states; a later one may be the whole weight.
    rows = [shape[0] for matrices in shapes for shape in matrices[:1] if shape[1] == hidden[1]]
    if not rows and any(equation.primitive.name == "dot_general" for equation in found):
        raise _UnknownError
    return -(-hidden[0] // max(rows)) if rows else 1


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for body in _bodies(equation.params):
                yield from _equations(body)
