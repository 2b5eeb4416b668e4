"""Checks of the arguments that the heads share: each raises a ValueError that names the argument, before compiling."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .contract import Inputs, Options, Teacher
from .shapes import Array, Float
from .two_softmaxes import KINDS, Divergence

DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float32)))
"""Not float16: a probability times a token's weight, such as 2^-16, underflows to 0 for all but likely tokens."""


@dataclasses.dataclass(frozen=True)
class TeacherArguments:
    """The arguments of an entry point on a teacher, as the caller gave them."""

    hidden: Any
    weight: Any
    kind: Any
    beta: Any
    temperature: Any  # None: the student's
    softcap: Any  # "same": the student's


def as_array(x: Any) -> Any:
    """An array as it is; a list of numbers as an array."""
    return x if hasattr(x, "dtype") else np.asarray(x)


def check_floating(name: str, value: Any) -> None:
    if jnp.result_type(value) not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(map(str, DTYPES))}, not {jnp.result_type(value)}")


def check_model(prefix: str, hidden: Any, weight: Any) -> None:
    """Checks hidden states and weight against each other; their names begin with `prefix`."""
    check_floating(f"{prefix}hidden", hidden)
    check_floating(f"{prefix}weight", weight)
    (states, rows), name = (np.shape(hidden), np.shape(weight)), f"{prefix}weight"
    if len(rows) != 2 or 0 in rows:
        raise ValueError(f"{name} must be [vocabulary, features], not {list(rows)}")
    if states[-1:] != rows[1:]:
        turned = f"; pass {name}.T" if states[-1:] == rows[:1] else ""
        shapes = f"{list(states)} beside a weight {list(rows)}{turned}"
        raise ValueError(f"{prefix}hidden must be [..., features], with the features of {name}, not {shapes}")


def checked_inputs(
    hidden: Any,
    weight: Any,
    labels: Any = None,
    *,
    where: Any = None,
    weights: Any = None,
    ignore_index: int | None = None,
    temperature: Any = 1.0,
    weight_copy: Any = None,
    vocabulary: Any = None,
    operands: Sequence[Any] = (),
    teacher: TeacherArguments | None = None,
) -> Inputs:
    """The arguments of a pass in any leading dims; their weight is the copy if it is given."""
    check_model("", hidden, weight)
    copy = weight if weight_copy is None else weight_copy
    check_floating("weight_copy", copy)
    if np.shape(copy) != np.shape(weight):
        raise ValueError(f"weight_copy must have weight's shape {np.shape(weight)}, not {np.shape(copy)}")
    lead, rows = np.shape(hidden)[:-1], np.shape(weight)[0]
    labels = np.zeros(lead, np.int32) if labels is None else as_array(labels)
    live: Any = np.ones(lead, np.bool_) if where is None else as_array(where)
    for name, array, kind, word in (("labels", labels, jnp.integer, "integers"), ("where", live, jnp.bool_, "boolean")):
        if not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f"{name} must be {word}, not {array.dtype}")
    named = {"labels": labels, "where": live, "weights": live if weights is None else weights}
    for name, value in (named | {f"operands[{i}]": x for i, x in enumerate(operands)}).items():
        if np.shape(value) != lead:
            raise ValueError(f"{name} must have hidden's leading shape {list(lead)}, not {list(np.shape(value))}")
    temperature, checked_teacher = checked_temperature("temperature", temperature), None
    if teacher is not None:
        check_model("teacher_", teacher.hidden, teacher.weight)
        if np.shape(teacher.hidden)[:-1] != lead:
            leads = f"{list(lead)}, not {list(np.shape(teacher.hidden)[:-1])}"
            raise ValueError(f"teacher_hidden must have hidden's leading shape {leads}")
        rows = min(rows, np.shape(teacher.weight)[0])
        tau = teacher.temperature
        tau = temperature if tau is None else checked_temperature("teacher_temperature", tau)
        checked_teacher = Teacher(teacher.hidden, teacher.weight, tau)
    columns = checked_vocabulary(vocabulary, rows)
    if weights is not None:
        live = live & (as_array(weights) != 0)
    bounds = jnp.iinfo(labels.dtype)
    if ignore_index is not None and bounds.min <= ignore_index <= bounds.max:
        live = live & (labels != labels.dtype.type(ignore_index))
    check_labels(labels, live, vocabulary=rows if columns is None else columns)
    bound = None if columns is None else jnp.int32(columns)
    return Inputs(hidden, copy, as_int32(labels), live, temperature, bound, checked_teacher)


def check_labels(labels: Any, live: Any, vocabulary: int) -> None:
    """Checks the labels [*N] of the rows that count, unless they are traced."""
    if _is_known(labels) and _is_known(live):
        wrong = np.asarray(labels)[np.asarray(live)].astype(object if labels.dtype.itemsize > 4 else np.int64)
        wrong = wrong[(wrong < 0) | (wrong >= vocabulary)]
        if wrong.size:
            raise ValueError(f"labels must be within [0, {vocabulary}), where they count; one is {wrong[0]}")


def as_int32(labels: Any) -> Any:
    """The labels as int32; -1 for a label outside of int32."""
    bounds, most = jnp.iinfo(labels.dtype), jnp.iinfo(jnp.int32).max
    if bounds.max > most:
        labels = (np if isinstance(labels, np.ndarray) else jnp).where((labels < 0) | (labels > most), -1, labels)
    return labels.astype(np.int32)


def checked_vocabulary(vocabulary: Any, rows: int) -> int | None:
    """The vocabulary's size; None: all `rows` of the weights."""
    if vocabulary is None:
        return None
    if not isinstance(vocabulary, Integral) or not 1 <= int(vocabulary) <= rows:
        raise ValueError(f"vocabulary must be within [1, {rows}], not {vocabulary!r}")
    return int(vocabulary)


def checked_temperature(name: str, temperature: Any) -> Float[Array, ""]:
    """The temperature as a float32 scalar; ValueError if it is differentiated."""
    if np.shape(temperature) != ():
        raise ValueError(f"{name} must be a scalar, not of shape {list(np.shape(temperature))}")
    if _is_known(temperature) and not 0 < float(temperature) < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {float(temperature)}")
    return undifferentiated(name, jnp.asarray(temperature, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def undifferentiated(name: str, value: Any) -> Any:
    """The value; differentiating it raises ValueError."""
    return value


def refuse_gradient(name: str, *_: Any) -> Any:
    raise ValueError(f"{name} has no gradient: wrap it in jax.lax.stop_gradient")


undifferentiated.defvjp(refuse_gradient, lambda name, _, cotangent: (cotangent,))


def checked_softcap(name: str, softcap: Any) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, jax.core.Tracer | str) or not 0 < float(softcap) < math.inf:
        raise ValueError(f"{name} must be None or a positive number known before tracing, not {softcap}")
    return float(softcap)


def checked_options(
    softcap: Any,
    dtype: Any,
    multiplied: Sequence[Any],
    differentiated: Sequence[Any] = (),
    workspace: Any = None,
    teacher: TeacherArguments | None = None,
) -> Options:
    """The options. Products' operands have `dtype`; default: the widest dtype of the operands.

    dh and dW get the dtypes of `differentiated`; default: the inputs' dtypes.
    """
    if teacher is not None:
        multiplied = *multiplied, teacher.hidden, teacher.weight
    dtypes = {jnp.dtype(x.dtype) for x in multiplied}
    product = jnp.dtype(max(dtypes, key=lambda x: x.itemsize) if dtype is None else dtype)
    if product not in DTYPES:
        raise ValueError(f"dtype must be None or one of {', '.join(map(str, DTYPES))}, not {product}")
    if workspace is not None and (not isinstance(workspace, Integral) or int(workspace) < 0):
        raise ValueError(f"workspace must be None or a number of bytes, not {workspace!r}")
    gradients: Any = tuple(x.dtype for x in differentiated) or None
    room = None if workspace is None else int(workspace)
    options = Options(checked_softcap("softcap", softcap), product, room, gradient_dtypes=gradients)
    if teacher is None:
        return options
    cap = softcap if teacher.softcap == "same" else teacher.softcap
    measure = checked_divergence(teacher.kind, teacher.beta)
    return dataclasses.replace(options, divergence=measure, teacher_softcap=checked_softcap("teacher_softcap", cap))


def checked_divergence(kind: Any, beta: Any) -> Divergence:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind != "jsd":
        return Divergence(kind)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be within [0, 1], not {beta}")
    ends: Any = {0: "forward_kl", 1: "reverse_kl"}
    return Divergence(ends[beta]) if beta in ends else Divergence(kind, float(beta))


def _is_known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
