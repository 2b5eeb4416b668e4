"""The device and the mesh axes that a program is traced for; the device need not be in this machine.

Inside `jax.shard_map`, a value's type has the mesh axes along which it differs between devices. These axes must agree
among the arguments of a custom derivative, between cotangents and primals, and between a loop's first and last carry.
"""

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh


def platform(mesh: Mesh | AbstractMesh | None = None) -> str:
    """`cpu`, `gpu` or `tpu`: the mesh's, else the platform of the mesh set while tracing, else JAX's default."""
    if isinstance(mesh, AbstractMesh):
        return jax.default_backend() if mesh.abstract_device is None else mesh.abstract_device.platform
    if mesh is not None:
        return mesh.devices.flat[0].platform
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def multiprocessors() -> int:
    """The number of multiprocessors of the GPU that is traced for; an H100's where JAX doesn't say."""
    device = _device()
    return getattr(device, "core_count", None) or getattr(device, "num_cores", None) or 132


def why_not_hopper(mesh: Mesh | None = None) -> str | None:
    """Why the target device, or the mesh's, is not a Hopper GPU, or None."""
    if (name := platform(mesh)) not in ("gpu", "cuda"):
        return f"it needs a Hopper GPU, and this is a {name}"
    device = _device() if mesh is None else mesh.devices.flat[0]
    capability, kind = getattr(device, "compute_capability", None), device.device_kind  # abstract devices have none
    if capability == "9.0" or (capability is None and any(name in kind for name in ("H100", "H200", "H800", "H20"))):
        return None
    return f"it needs a Hopper GPU, and this is {kind}"


def _device() -> Any:
    """The device that is traced for, which may be abstract."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def varying_axes(*arrays: Any) -> Set[str]:
    """The mesh axes that any of the arrays varies over."""
    return frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary(x: Any, axes: Set[str]) -> jax.Array:
    """`x` as a value that may differ over `axes` too. Transposed, this is a sum over the axes that were added."""
    added = tuple(axes - varying_axes(x))
    return jax.lax.pcast(x, added, to="varying") if added else jnp.asarray(x)


def same_varying(arrays: Any) -> Any:
    """A tree of JAX arrays that may vary over every axis of any of them (see `vary`)."""
    arrays = jax.tree.map(jnp.asarray, arrays)
    axes = varying_axes(*jax.tree.leaves(arrays))
    return jax.tree.map(lambda x: vary(x, axes), arrays)
