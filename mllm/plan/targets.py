"""Compiles JAX programs for devices that this machine doesn't have, by the real compilers.

A target is a TPU, as in `v6e`, or a slice of them, as in `v6e:2x4`, compiled for by libtpu (the extra `tpu`); or
the H100s of a host, as in `h100` and `h100:8`, compiled for by XLA's CUDA plugin (`make .venv/aot-gpu`). That is in
a folder of its own: if JAX found it without a driver, every program would complain.

A program is named `package.module:function` or `file.py:function`; its function takes the target's mesh and keyword
arguments, and returns the function to compile and its arguments, trees of `jax.ShapeDtypeStruct`. XLA reads many
options only as it starts, so `run_child` starts this file as a process of its own.

`account` says what memory a program takes as soon as the compiler knows it, minutes before it has the code: XLA assigns
every buffer its place before it generates instructions. The compiler writes its account of the assignment into a folder
(`--xla_dump_to`), and is stopped there. Its total is what it holds against a TPU's HBM; `memory_analysis()` adds up
more temporaries where there are collectives. A program that is too large has an account, too.

Without a GPU nothing can be timed, so XLA keeps its first choice for each matrix product, a Triton kernel, which may
not exist. With one, it may find cuBLAS faster, and then the operations before a product are stored first, which takes
more memory (docs/log.md): a plan has cuBLAS for all. What it holds outside XLA's share of the memory is left out.
"""

import importlib
import importlib.util
import json
import math
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, Mesh

from mllm.plan import child

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


class Chip(NamedTuple):
    """A kind of device, as programs see it: one of the two TensorCores of a tpu7x chip, or a whole other chip."""

    kind: str
    """The name that JAX has for the device."""
    dims: int
    """The number of dims of a slice's shape."""
    memory: int
    """Bytes that a program may have, by the refusals of libtpu 0.0.42; of a GPU three quarters, JAX's default."""


TPUS = {
    "v5e": Chip("TPU v5 lite", 2, int(15.75 * 2**30)),
    "v5p": Chip("TPU v5", 3, int(95.74 * 2**30)),
    "v6e": Chip("TPU v6 lite", 2, int(31.25 * 2**30)),
    "tpu7x": Chip("TPU7x", 3, int(94.75 * 2**30)),
}
CHIPS = {**TPUS, "h100": Chip("NVIDIA H100 80GB HBM3", 1, 84_942_979_072 * 3 // 4)}
GPUS_OF_A_HOST = 8
GPU_PLUGIN = Path(sys.prefix) / "aot-gpu"
TPU_FILES = (".after_optimizations", ".after_optimizations_after_buffer_assignment.txt", "")
GPU_FILES = (".*_gpu_after_optimizations", ".0.ir-no-opt.ll", "--xla_gpu_enable_triton_gemm=false")
"""After the module's name, the beginning of the names of the two files with the account, and the end of the name of a
file that is written later (on GPUs the first kernel's code); the compiler's flag, or none. A program that is too large
for a TPU has no later file, and the compiler ends by itself."""
_TOTAL = re.compile(r"\(color=0\)\nTotal bytes: (\d+)")
_TEMPORARY = re.compile(r"^allocation \d+: size (\d+), (?!color).*preallocated-temp", re.MULTILINE)


def split(target: str) -> tuple[str, tuple[int, ...]]:
    """The chip and the slice's shape, all ones for a bare chip; ValueError where one of them is unknown."""
    name, colon, shape = target.partition(":")
    if name not in CHIPS:
        raise ValueError(f"target {target!r}: there are {', '.join(TPUS)} and their slices, as in v6e:2x4, and h100:8")
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
        return gpus(*sizes)
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


def gpus(count: int) -> Sequence[jax.Device]:
    """So many H100s of a host; ModuleNotFoundError where the plugin isn't installed."""
    description = Path(__file__).with_name("h100.txtpb").read_text()
    # Partitions, hosts of each, GPUs of each.
    shape = {"topology": f"1x1x{count}", "target_config": description}
    # JAX would ask for the CUDA libraries that a GPU needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    plugins = importlib.util.find_spec("jax_plugins")  # the plugins that JAX finds by itself
    folders = map(Path, plugins.submodule_search_locations or ()) if plugins else ()
    with silent_stderr():
        if not any([*folder.glob("xla_cuda*")] for folder in folders):
            register_gpu_plugin()
        return topologies.get_topology_desc("h100", "cuda", **shape).devices


def register_gpu_plugin() -> None:
    """Make the plugin in `GPU_PLUGIN` known to JAX."""
    modules = sorted(path.name for path in GPU_PLUGIN.glob("jax_plugins/xla_cuda*"))
    if not modules:
        raise ModuleNotFoundError("XLA's plugin for CUDA, which compiles for GPUs, isn't installed: make .venv/aot-gpu")
    sys.path.append(str(GPU_PLUGIN))
    # Pallas has looked for it beside the plugin, if it was imported before.
    runtime = next(GPU_PLUGIN.glob("jax_cuda*_plugin/libmosaic_gpu_runtime.so"))
    os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(runtime))
    importlib.import_module(f"jax_plugins.{modules[-1]}").initialize()


@contextmanager
def silent_stderr() -> Iterator[None]:
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


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
    source, _, function = name.rpartition(":")
    if source.endswith(".py"):
        return runpy.run_path(source)[function]
    return getattr(importlib.import_module(source), function)


def run_child(
    target: str,
    name: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    until: Callable[[], bool] | None = None,
) -> child.Ended:
    """Run `main` for a program in a process of its own, with `environment` added to this one's variables.

    In `arguments` "mesh" has the axes and their sizes, instead of one chip. The child removes `folder`, which the
    compiler writes to, if this process is killed. `until` is as in `child.run`.
    """
    name = os.path.abspath(name) if ".py:" in name else name
    command = [sys.executable, "-m", "mllm.plan.targets", target, name, json.dumps(dict(arguments)), str(folder)]
    return child.run(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", **environment}, until=until)


class Account(NamedTuple):
    """Memory in bytes a device; the peak has arguments and results, too."""

    temporaries: int
    peak: int


def account(target: str, program: str, axes: Mapping[str, int], **arguments: Any) -> Account:
    """The account of `program`, which gets a mesh of the target with these axes, and `arguments`, as JSON.

    ValueError, which says why in one line, is raised if it can't be compiled. A program that is too large can be.
    """
    begin, last, flag = TPU_FILES if split(target)[0] in TPUS else GPU_FILES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inherited = os.environ.get("XLA_FLAGS", "")
        flags = {"XLA_FLAGS": " ".join([inherited, flag, f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text"])}
        settings = {**arguments, "mesh": dict(axes)}
        ended = run_child(target, program, settings, flags, folder, until=lambda: any(folder.glob(f"*{last}")))
        # Files of the compiler for the CPU have other names.
        names = "memory-usage-report", "buffer-assignment"
        report, assignment = (next(folder.glob(f"*{begin}-{name}.txt"), None) for name in names)
        if report is None or assignment is None:
            raise ValueError(f"{program} on {target}: {ended.reason or 'the compiler left no report'}")
        return parse_account(report.read_text(), assignment.read_text())


def parse_account(report: str, assignment: str) -> Account:
    """The account, from the compiler's report of memory and its list of allocations."""
    total = _TOTAL.search(report)
    if total is None:
        raise ValueError(
            "the compiler's report has another form; was it written by the compiler of make aot or make aot-gpu?"
        )
    return Account(sum(map(int, _TEMPORARY.findall(assignment))), int(total[1]))


def main(target: str, name: str, arguments: str) -> None:
    """Compile a program, whose account the compiler writes."""
    settings = json.loads(arguments)
    axes = settings.pop("mesh", {"chip": 1})
    make = program(name)
    target_mesh = mesh(target, tuple(axes.values()), tuple(axes))
    compiled(*make(target_mesh, **settings), target_mesh)


if __name__ == "__main__":
    child.end_with_parent(lambda: shutil.rmtree(sys.argv[4], ignore_errors=True))
    main(*sys.argv[1:4])
