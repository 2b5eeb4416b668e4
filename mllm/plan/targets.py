"""Compiles JAX programs for TPUs that this machine doesn't have, by libtpu, the real compiler (`make aot` installs it).

A target is a chip, as in `v6e`, or a slice of them, as in `v6e:2x4`; or GPUs, see `gpus.py`. A program is named
`package.module:function` or `file.py:function`; its function takes the target's mesh and keyword arguments, and returns
the function to compile and its arguments, trees of `jax.ShapeDtypeStruct`. XLA reads many options only as it starts, so
`run_child` starts this file as a process of its own.
"""

import importlib
import importlib.util
import json
import math
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, Mesh

from mllm import child_process
from mllm.plan import gpus

ROOT = Path(__file__).parent.parent.parent
# libtpu reads these as it is loaded: there is no TPU to ask for its metadata, nor one to keep other programs from.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
CHIPS = {"v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}
"""The chips known here, and how many dims their slices have."""
HBM = {chip: int(gib * 2**30) for chip, gib in {"v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}.items()}
"""Bytes of a device's HBM that a program may have, by libtpu 0.0.42's refusals; a device of tpu7x is half a chip."""

RATES = {
    "v5e": (197e12, 819e9),
    "v5p": (459e12, 2765e9),
    "v6e": (918e12, 1640e9),
    "tpu7x": (1153.5e12, 3690e9),
    "h100": (989e12, 3350e9),
}
"""bfloat16 flop/s and HBM's byte/s of each device, https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and
https://resources.nvidia.com/en-us-tensor-core (SXM, without sparsity). A core of tpu7x has half of its chip's."""


def split(target: str) -> tuple[str, tuple[int, ...]]:
    """The chip and the slice's shape, all ones for a bare chip; ValueError where one of them is unknown."""
    chip, _, shape = target.partition(":")
    if chip not in CHIPS:
        known = f"{', '.join(CHIPS)} and their slices, as in v6e:2x4"
        raise ValueError(f"target {target!r}: there are {known}; for plans of memory h100, too, as in h100:8")
    sizes = tuple(int(size) if size.isdecimal() else 0 for size in shape.split("x")) if shape else (1,) * CHIPS[chip]
    if len(sizes) != CHIPS[chip] or min(sizes) < 1:
        raise ValueError(f"target {target!r}: a slice of {chip} has {CHIPS[chip]} dimensions, as in {chip}:2x2")
    return chip, sizes


def devices(target: str) -> Sequence[jax.Device]:
    """The target's devices: a TensorCore each on tpu7x, a chip elsewhere.

    ValueError is raised if the chip has no such slice. ModuleNotFoundError is raised if libtpu isn't installed, or
    for GPUs the plugin.
    """
    if gpus.is_gpu(target):
        return gpus.devices(target)
    chip, sizes = split(target)
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError("libtpu, the TPU compiler, isn't installed; make aot does")
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    hosts = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(sizes) == 1 else {}
    name = f"{chip}:{'x'.join(map(str, sizes))}"
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **hosts).devices
    except jax.errors.JaxRuntimeError:
        raise ValueError(f"target {target!r}: {chip} has no such slice") from None


def memory_limit(target: str) -> int:
    """Bytes that a program may have on each device of the target."""
    return gpus.memory() if gpus.is_gpu(target) else HBM[split(target)[0]]


def mesh(target: str, shape: Sequence[int] = (1,), axes: Sequence[str] = ("chip",)) -> Mesh:
    """A mesh of the target's first devices; errors as `devices`, and ValueError where these are too few."""
    available = devices(target)
    needed = math.prod(shape)
    if len(available) < needed:
        raise ValueError(f"target {target!r} has {len(available)} devices, a mesh of {tuple(shape)} needs {needed}")
    types = (AxisType.Auto,) * len(axes)
    return Mesh(np.array(available[:needed]).reshape(shape), tuple(axes), axis_types=types)


def compiled(function: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh) -> jax.stages.Compiled:
    """A function, jitted or not, compiled for the mesh; arguments without a sharding are on all its devices.

    jax.errors.JaxRuntimeError is raised if the compiler refuses: for lack of room in HBM or VMEM, or of a way to
    lower an operation.
    """
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or everywhere), tuple(arguments)
    )
    # A program that was compiled without devices can't be read back from JAX's cache.
    cached = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    # A jitted function is not jitted again: then it would not donate its arguments.
    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    platform = {"gpu": "cuda"}.get(mesh.devices.flat[0].platform, "tpu")
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jitted.trace(*placed).lower(lowering_platforms=(platform,))
        return lowered.compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
        reset_cache()


def memory(program: jax.stages.Compiled) -> dict[str, int]:
    """The compiler's account of HBM, in bytes a device; what is aliased is among the arguments and the results."""
    account: Any = program.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    sizes = {name: getattr(account, f"{name}_size_in_bytes") for name in names}
    return sizes | {"peak": sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]}


def program(name: str) -> Callable[..., tuple[Callable[..., Any], Sequence[Any]]]:
    """The function that `package.module:function` or `file.py:function` names."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        return runpy.run_path(place)[function]
    return getattr(importlib.import_module(place), function)


def run_child(
    target: str,
    name: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    until: Callable[[], bool] | None = None,
) -> child_process.Ended:
    """Run `main` for a program in a process of its own, with `environment` added to this one's variables.

    In `arguments` "mesh" has the axes and their sizes, instead of one chip. The child removes `folder`, which the
    compiler writes to, if this process is killed. `until` is as in `child_process.run`.
    """
    name = os.path.abspath(name) if ".py:" in name else name
    command = [sys.executable, "-m", "mllm.plan.targets", target, name, json.dumps(dict(arguments)), str(folder)]
    return child_process.run(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", **environment}, until=until)


def main(target: str, name: str, arguments: str) -> None:
    """Compile a program and print its memory, as `memory` gives it, as a line of JSON."""
    given = json.loads(arguments)
    axes = given.pop("mesh", {"chip": 1})
    make = program(name)
    on_target = mesh(target, tuple(axes.values()), tuple(axes))
    child_process.answer(memory(compiled(*make(on_target, **given), on_target)))


if __name__ == "__main__":
    child_process.end_with_parent(lambda: shutil.rmtree(sys.argv[4], ignore_errors=True))
    main(*sys.argv[1:4])
