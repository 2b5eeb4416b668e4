"""What a program that is being traced will run on, which need not be the machine that traces it."""

import jax
from jax.sharding import Mesh


def platform(mesh: Mesh | None = None) -> str:
    """`cpu`, `gpu` or `tpu`: of the mesh, else of the mesh that is set while tracing, else JAX's default."""
    if mesh is not None:
        return mesh.devices.flat[0].platform
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
