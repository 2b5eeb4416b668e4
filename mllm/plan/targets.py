"""Devices of this machine and other target devices, and the memory of a program on them, by the compiler.

A target is a TPU, such as `v6e`, or a slice, such as `v6e:2x4`; its compiler is libtpu (the extra `tpu`). Or a target
is the H100s or H200s of a host, such as `h100` and `h200:8`; its compiler is XLA's CUDA plugin (`make .venv/aot-gpu`).
The plugin is in a folder of its own: if JAX found it without a driver, every program would complain.

Without a GPU nothing can be timed, so XLA keeps its first choice for each matrix product, a Triton kernel, which may
not exist. With a GPU, XLA may find cuBLAS faster. The operations before a product are then stored first, which takes
more memory (docs/log.md). So a plan has cuBLAS for every product (`CUBLAS`). Memory that cuBLAS takes for itself is
left out.
"""

import importlib
import importlib.util
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, Mesh

from mllm.config.load import for_devices
from mllm.config.run import RunConfig
from mllm.errors import UserError
from mllm.parallel.mesh import AXES, GPU_SHARE, bytes_on_device, device_memory, make_mesh
from mllm.parallel.processes import gather_objects

# libtpu reads these as it is loaded: there is no TPU to ask for its metadata, nor one to keep other programs from.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Chip(NamedTuple):
    """A kind of device, as programs see it: one of the two TensorCores of a tpu7x chip, or a whole other chip."""

    kind: str
    """The name that JAX has for the device."""
    dims: int
    """The number of dims of a slice's shape."""
    memory: int
    """Bytes that a program may have, by the refusals of libtpu 0.0.42; of a GPU `GPU_SHARE`."""


TPUS = {
    "v5e": Chip("TPU v5 lite", 2, int(15.75 * 2**30)),
    "v5p": Chip("TPU v5", 3, int(95.74 * 2**30)),
    "v6e": Chip("TPU v6 lite", 2, int(31.25 * 2**30)),
    "tpu7x": Chip("TPU7x", 3, int(94.75 * 2**30)),
}
GPUS = {
    "h100": (84_942_979_072, 3_352_320_000_000, "NVIDIA H100 80GB HBM3"),
    "h200": (150_754_820_096, 4_800_000_000_000, "NVIDIA H200"),
}
"""Memory in bytes, its bandwidth in bytes a second, and JAX's name. The rest of an H200 is an H100's."""
CHIPS = {**TPUS, **{name: Chip(kind, 1, int(memory * GPU_SHARE)) for name, (memory, _, kind) in GPUS.items()}}
GPUS_OF_A_HOST = 8
GPU_PLUGIN = Path(sys.prefix) / "aot-gpu"
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""The compiler's options for a plan on GPUs."""
GPU_CAVEAT = "by XLA's compiler without a GPU, with cuBLAS for all products, and never held against one (docs/log.md)"
_TOTAL = re.compile(r"\(color=0\)\nTotal bytes: (\d+)")
_REPEATED = re.compile(r"%[\w.-]+\.remat\d*(\.\d+)* = ")
_REFUSED = re.compile(r"\((\d+\.\d+)([KMG])\) exceeds available HBM")


# --- devices


class Devices(NamedTuple):
    """The devices that a plan is for."""

    name: str
    mesh: Mesh
    available: int
    memory: int
    """Bytes that a program may have on each device."""
    here: bool = True

    @property
    def caveat(self) -> str | None:
        return GPU_CAVEAT if not self.here and self.mesh.devices.flat[0].platform == "gpu" else None


def find_devices(config: RunConfig, target: str | None) -> tuple[RunConfig, Devices]:
    """The configuration for the devices at hand or of a `target`, and the devices; UserError if there are too few."""
    if target is None:
        try:
            config = for_devices(config, jax.device_count())
            return config, at_hand(make_mesh(config.mesh))
        except UserError as error:
            raise UserError(f"{error}; or plan for devices that aren't here, as with --target v6e:2x4") from None
    try:
        available = len(devices(target))
        config = for_devices(config, available)
        there = mesh(target, [getattr(config.mesh, axis) for axis in AXES], AXES)
        return config, Devices(target, there, available, CHIPS[split(target)[0]].memory, here=False)
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(f"--target: {error}") from None


def at_hand(mesh: Mesh) -> Devices:
    """The devices of a mesh of this machine."""
    memory = min(gather_objects(device_memory(mesh)))  # all processes must choose the same numbers
    return Devices(f"{mesh.devices.flat[0].device_kind} at hand", mesh, jax.device_count(), memory)


def split(target: str) -> tuple[str, tuple[int, ...]]:
    """The chip's name and the slice's shape, all 1 for a single chip; ValueError if the chip or shape is unknown."""
    name, colon, shape = target.partition(":")
    if name not in CHIPS:
        known = f"{', '.join(TPUS)} and their slices, as in v6e:2x4, and {', '.join(GPUS)}, as in h100:8"
        raise ValueError(f"target {target!r}: there are {known}")
    dims = CHIPS[name].dims
    sizes = tuple(int(size) if size.isdecimal() else 0 for size in shape.split("x")) if colon else (1,) * dims
    if len(sizes) != dims or min(sizes) < 1 or (name not in TPUS and sizes[0] > GPUS_OF_A_HOST):
        fault = "a host has 1 to 8, as in h100:8" if dims == 1 else f"a slice has {dims} dimensions, as in {name}:2x2"
        raise ValueError(f"target {target!r}: {fault}")
    return name, sizes


def devices(target: str) -> Sequence[jax.Device]:
    """The target's devices: a TensorCore each on tpu7x, a chip elsewhere.

    ValueError is raised if the chip has no such slice. ModuleNotFoundError is raised if libtpu isn't installed, or
    for GPUs the plugin.
    """
    chip, sizes = split(target)
    if chip not in TPUS:
        return gpus(chip, *sizes)
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError("libtpu, the TPU compiler, isn't installed: pip install -e '.[tpu]' (half a minute)")
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    hosts = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(sizes) == 1 else {}
    name = f"{chip}:{'x'.join(map(str, sizes))}"
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **hosts).devices
    except jax.errors.JaxRuntimeError:
        raise ValueError(f"target {target!r}: {chip} has no such slice") from None


def gpus(chip: str, count: int) -> Sequence[jax.Device]:
    """So many GPUs of a host; ModuleNotFoundError where the plugin isn't installed."""
    description = Path(__file__).with_name("h100.txtpb").read_text()
    for own, other in zip(GPUS["h100"], GPUS[chip], strict=True):
        description = description.replace(str(own), str(other))
    # JAX would ask for the CUDA libraries that a GPU needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    plugins = importlib.util.find_spec("jax_plugins")  # the plugins that JAX finds by itself
    folders = map(Path, plugins.submodule_search_locations or ()) if plugins else ()
    if not any([*folder.glob("xla_cuda*")] for folder in folders):
        register_gpu_plugin()
    # Partitions, hosts of each, GPUs of each.
    return topologies.get_topology_desc("h100", "cuda", topology=f"1x1x{count}", target_config=description).devices


def register_gpu_plugin() -> None:
    """Make the plugin in `GPU_PLUGIN` known to JAX."""
    modules = sorted(path.name for path in GPU_PLUGIN.glob("jax_plugins/xla_cuda*"))
    if not modules:
        raise ModuleNotFoundError("XLA's plugin for CUDA, which compiles for GPUs, isn't installed: make .venv/aot-gpu")
    jax.device_count()  # JAX must look for plugins before this plugin can be found: it loads no plugin twice
    sys.path.append(str(GPU_PLUGIN))
    # Pallas has looked for it beside the plugin, if it was imported before.
    runtime = next(GPU_PLUGIN.glob("jax_cuda*_plugin/libmosaic_gpu_runtime.so"))
    os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(runtime))
    importlib.import_module(f"jax_plugins.{modules[-1]}").initialize()


def mesh(target: str, shape: Sequence[int] = (1,), axes: Sequence[str] = ("chip",)) -> Mesh:
    """A mesh of the target's first devices; errors as `devices`, and ValueError if there are too few devices."""
    available = devices(target)
    needed = math.prod(shape)
    if len(available) < needed:
        raise ValueError(f"target {target!r} has {len(available)} devices, a mesh of {tuple(shape)} needs {needed}")
    types = (AxisType.Auto,) * len(axes)
    return Mesh(np.array(available[:needed]).reshape(shape), tuple(axes), axis_types=types)


# --- programs


def compiled(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    mesh: Mesh,
    options: Mapping[str, bool | str] | None = None,
) -> jax.stages.Compiled:
    """Compile a function, jitted or not, for a target's mesh; arguments without a sharding are replicated.

    jax.errors.JaxRuntimeError is raised if the compiler refuses: HBM or VMEM is too small, or an operation can't be
    lowered.
    """
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or everywhere), tuple(arguments)
    )
    # A program that was compiled without devices can't be read back from JAX's cache.
    cached = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    platform = {"gpu": "cuda"}.get(mesh.devices.flat[0].platform, "tpu")
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = as_jitted(function).trace(*placed).lower(lowering_platforms=(platform,))
        return lowered.compile(dict(options or {}))
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
        reset_cache()


def as_jitted(function: Callable[..., Any]) -> jax.stages.Wrapped:
    """The function, jitted. A jitted function is not jitted again: then it would not donate its arguments."""
    return function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)


class Account(NamedTuple):
    """Memory in bytes a device; the peak includes arguments and results."""

    temporaries: int
    peak: int
    repeats: bool = False
    """Whether XLA for GPUs computes operations of the program again, to save memory."""


def account_of(function: Callable[..., Any], arguments: Sequence[Any], devices: Devices) -> Account:
    """The account of a program on the devices, also of a program that a TPU has no room for.

    UserError is raised if the compiler refuses the program for another reason.
    """
    try:
        if devices.here:
            return memory(as_jitted(function).trace(*arguments).lower().compile())
        return account(function, arguments, devices.mesh)
    except jax.errors.JaxRuntimeError as error:
        if (refused := account_of_refusal(str(error), bytes_on_device(arguments))) is None:
            line = str(error).splitlines()[0]
            raise UserError(f"{devices.name}: the compiler refuses the program: {line}") from None
        return refused


def memory(program: jax.stages.Compiled) -> Account:
    """The account of a program by `memory_analysis()`; aliased arguments count once."""
    analysis: Any = program.memory_analysis()
    arguments = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    repeats = bool(_REPEATED.search(program.as_text() or ""))
    return Account(analysis.temp_size_in_bytes, arguments + analysis.temp_size_in_bytes, repeats)


def account(function: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh) -> Account:
    """The account of a function compiled for a target's mesh; errors as `compiled`."""
    if mesh.devices.flat[0].platform == "gpu":
        return memory(compiled(function, arguments, mesh, CUBLAS))
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, bool | str] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        result = memory(compiled(function, arguments, mesh, report))
        # Where a program has loops, `memory_analysis()` counts some temporaries twice: a quarter of an update's peak.
        for path in Path(folder).glob("*after_optimizations-memory-usage-report.txt"):
            if total := _TOTAL.search(path.read_text()):
                excess = result.peak - int(total[1])
                return Account(result.temporaries - excess, result.peak - excess)
        return result


def account_of_refusal(message: str, arguments: int) -> Account | None:
    """The account that a TPU's compiler gives as it refuses a program for lack of memory; None for another refusal.

    `arguments` are the bytes of the program's arguments on a device.
    """
    if (match := _REFUSED.search(message)) is None:
        return None
    peak = int(float(match[1]) * 1024 ** ("KMG".index(match[2]) + 1))
    return Account(max(0, peak - arguments), peak)
