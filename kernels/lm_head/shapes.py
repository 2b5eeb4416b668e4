"""The types of arrays in signatures: jaxtyping's where it is installed, else the same names for `jax.Array`."""

import importlib.util
from typing import TYPE_CHECKING, Any

from jax import Array

if TYPE_CHECKING or importlib.util.find_spec("jaxtyping"):
    from jaxtyping import Bool, Float, Int, Integer, Shaped
else:

    class _AnyShape:
        def __class_getitem__(cls, _: Any) -> type:
            return Array

    Bool = Float = Int = Integer = Shaped = _AnyShape

__all__ = ["Array", "Bool", "Float", "Int", "Integer", "Shaped"]
