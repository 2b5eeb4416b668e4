"""The device that a program is traced for, which need not be in the machine that traces it."""

import jax
from jax.sharding import AbstractMesh, Mesh


def platform(mesh: Mesh | AbstractMesh | None = None) -> str:
    """`cpu`, `gpu` or `tpu`: that of the mesh, else that of the mesh which is set while tracing, else JAX's default."""
    if isinstance(mesh, AbstractMesh):
        return jax.default_backend() if mesh.abstract_device is None else mesh.abstract_device.platform
    if mesh is not None:
        return mesh.devices.flat[0].platform
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """The name of the device kind that is traced for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def multiprocessors() -> int:
    """The number of multiprocessors of the GPU that is traced for; an H100's where JAX doesn't say."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    found = getattr(jax.devices()[0], "core_count", None) if device is None else device.num_cores
    return found or 132


def why_not_hopper() -> str | None:
    """The reason why the device that is traced for is no GPU of the Hopper generation, or None."""
    if platform() != "gpu":
        return f"it needs a Hopper GPU, and this is a {platform()}"
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        found = getattr(jax.devices()[0], "compute_capability", None)
        return None if found == "9.0" else f"it needs a Hopper GPU, and this one has compute capability {found}"
    if any(name in device.device_kind for name in ("H100", "H200", "H800", "H20")):
        return None
    return f"it needs a Hopper GPU, and this is {device.device_kind}"
