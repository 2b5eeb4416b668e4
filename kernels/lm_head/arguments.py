"""Checks of the arguments that the heads share: each raises a ValueError that names the argument, before compiling."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

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


def check_copy(copy: Any, weight: Any) -> None:
    check_floating("weight_copy", copy)
    if np.shape(copy) != np.shape(weight):
        raise ValueError(f"weight_copy must have weight's shape {np.shape(weight)}, not {np.shape(copy)}")


def check_tokens(lead: tuple[int, ...], owner: str, per_token: Mapping[str, Any]) -> None:
    """Checks that all has `owner`'s leading shape `lead`, that labels are integers, and that `where` is boolean."""
    for name, kind, word in (("labels", jnp.integer, "integers"), ("where", jnp.bool_, "boolean")):
        if name in per_token and not jnp.issubdtype(jnp.result_type(per_token[name]), kind):
            raise ValueError(f"{name} must be {word}, not {jnp.result_type(per_token[name])}")
    for name, value in per_token.items():
        if np.shape(value) != lead:
            raise ValueError(f"{name} must have {owner}'s leading shape {list(lead)}, not {list(np.shape(value))}")


def check_labels(labels: Any, live: Any, vocabulary: int, name: str = "labels") -> None:
    """Checks the labels [*N], or several a row, of the rows that count, unless they are traced."""
    if _is_known(labels) and _is_known(live):
        wrong = np.asarray(labels)[np.asarray(live)]
        wrong = wrong[(wrong < 0) | (wrong >= vocabulary)]
        if wrong.size:
            raise ValueError(f"{name} must be within [0, {vocabulary}), where they count; one is {wrong[0]}")


def checked_candidates(candidates: Any, live: Any, vocabulary: int) -> Any:
    """The candidates [*N, K] of rows `live` [*N]."""
    if not jnp.issubdtype(jnp.result_type(candidates), jnp.integer):
        raise ValueError(f"candidates must be integers, not {jnp.result_type(candidates)}")
    if np.ndim(candidates) == 0 or np.shape(candidates)[:-1] != np.shape(live):
        raise ValueError(
            f"candidates must be {list(np.shape(live))} and one dim more, not {list(np.shape(candidates))}"
        )
    check_labels(candidates, live, vocabulary, "candidates")
    return candidates


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


def product_dtype(dtype: Any, hidden: Any, weight: Any) -> jnp.dtype:
    """The dtype of the matrix products' operands: `dtype`, or the wider of the arguments' dtypes."""
    found = jnp.dtype(jnp.promote_types(hidden.dtype, weight.dtype) if dtype is None else dtype)
    if found not in DTYPES:
        raise ValueError(f"dtype must be None or one of {', '.join(map(str, DTYPES))}, not {found}")
    return found


def _is_known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
