"""Checks of the arguments that the heads share: each raises a ValueError that names the argument, before compiling."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .contract import Inputs, Options
from .shapes import Array, Float

DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float32)))
"""Not float16: a probability times a token's weight, such as 2^-16, would be 0 there for all but likely words."""


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
    operands: Sequence[Any] = (),
) -> Inputs:
    """The arguments of a pass in any leading dims, as they are given; their weight is the copy, if there is one."""
    check_model("", hidden, weight)
    copy = weight if weight_copy is None else weight_copy
    check_floating("weight_copy", copy)
    if np.shape(copy) != np.shape(weight):
        raise ValueError(f"weight_copy must have weight's shape {np.shape(weight)}, not {np.shape(copy)}")
    lead = np.shape(hidden)[:-1]
    labels = np.zeros(lead, np.int32) if labels is None else labels
    live: Any = np.ones(lead, np.bool_) if where is None else where
    for name, array, kind, word in (("labels", labels, jnp.integer, "integers"), ("where", live, jnp.bool_, "boolean")):
        if not jnp.issubdtype(jnp.result_type(array), kind):
            raise ValueError(f"{name} must be {word}, not {jnp.result_type(array)}")
    named = {"labels": labels, "where": live, "weights": live if weights is None else weights}
    for name, value in (named | {f"operands[{i}]": x for i, x in enumerate(operands)}).items():
        if np.shape(value) != lead:
            raise ValueError(f"{name} must have hidden's leading shape {list(lead)}, not {list(np.shape(value))}")
    if weights is not None:
        live = live & (weights != 0)
    if ignore_index is not None:
        live = live & (labels != ignore_index)
    check_labels(labels, live, vocabulary=np.shape(weight)[0])
    return Inputs(hidden, copy, labels, live, checked_temperature(temperature))


def check_labels(labels: Any, live: Any, vocabulary: int) -> None:
    """Checks the labels [*N] of the rows that count, unless they are traced."""
    if _is_known(labels) and _is_known(live):
        wrong = np.asarray(labels)[np.asarray(live)]
        wrong = wrong[(wrong < 0) | (wrong >= vocabulary)]
        if wrong.size:
            raise ValueError(f"labels must be within [0, {vocabulary}), where they count; one is {wrong[0]}")


def checked_temperature(temperature: Any) -> Float[Array, ""]:
    """The temperature as a float32 scalar that is not differentiated."""
    if np.shape(temperature) != ():
        raise ValueError(f"temperature must be a scalar, not of shape {list(np.shape(temperature))}")
    if _is_known(temperature) and not 0 < float(temperature) < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {float(temperature)}")
    return jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))


def checked_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, jax.core.Tracer) or not 0 < float(softcap) < math.inf:
        raise ValueError(f"softcap must be None or a positive number known before tracing, not {softcap}")
    return float(softcap)


def checked_options(
    softcap: Any, dtype: Any, multiplied: Sequence[Any], differentiated: Sequence[Any] = (), workspace: Any = None
) -> Options:
    """The options. Products' operands have `dtype`, or the widest dtype of all that is multiplied.

    `differentiated` are the arrays whose dtypes dh and dW get; without any, they get those of the inputs.
    """
    product = jnp.dtype(jnp.result_type(*(x.dtype for x in multiplied)) if dtype is None else dtype)
    if product not in DTYPES:
        raise ValueError(f"dtype must be None or one of {', '.join(map(str, DTYPES))}, not {product}")
    if workspace is not None and (not isinstance(workspace, int) or workspace < 0):
        raise ValueError(f"workspace must be None or a number of bytes, not {workspace!r}")
    gradients: Any = tuple(x.dtype for x in differentiated) or None
    return Options(checked_softcap(softcap), product, workspace, gradient_dtypes=gradients)


def _is_known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
