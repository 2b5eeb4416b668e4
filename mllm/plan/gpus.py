"""H100s that this machine doesn't have, for `targets.py`: XLA's CUDA plugin compiles for them (`make aot-gpu`).

A target is `h100`, or several of one host as in `h100:8`. The plugin is installed in a folder of its own: if JAX found
it without a driver, every program would complain. Without a GPU nothing can be timed, so XLA keeps its first choice for
each matrix product, a Triton kernel. With one, it may find cuBLAS faster, and then the operations before a product are
stored first. `FLAGS` make either choice for all products, and a plan takes the one that needs more memory. What the
libraries hold outside XLA's share of the memory is left out.
"""

import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental import topologies

FOLDER = Path(sys.prefix) / "aot-gpu"
DESCRIPTION = Path(__file__).with_name("h100.txtpb").read_text()
CAVEAT = "by XLA's compiler without a GPU, and never held against one; the larger of two compilations (docs/log.md)"
FLAGS = ("--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=false")
"""For `XLA_FLAGS`: matrix products by Triton, and by cuBLAS."""


def is_gpu(target: str) -> bool:
    """Whether a target is one of this file's."""
    return target.partition(":")[0] == "h100"


def count(target: str) -> int:
    """The number of GPUs that a target names; ValueError where a host can't have that many."""
    found = re.fullmatch(r"h100(?::([1-8]))?", target)
    if found is None:
        raise ValueError(f"target {target!r}: there are h100 and h100:2 to h100:8, the GPUs of a host")
    return int(found[1] or 1)


def devices(target: str) -> Sequence[jax.Device]:
    """The target's devices; ValueError as `count`, ModuleNotFoundError where the plugin isn't installed."""
    shape = f"1x1x{count(target)}"  # partitions, hosts of each, GPUs of each
    # JAX would ask for the CUDA libraries that a GPU needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    with silent_stderr():
        try:
            found = topologies.get_topology_desc("h100", "cuda", target_config=DESCRIPTION, topology=shape)
        except NotImplementedError:  # JAX knows the plugin only where it is installed beside JAX
            register()
            found = topologies.get_topology_desc("h100", "cuda", target_config=DESCRIPTION, topology=shape)
    return found.devices


def register() -> None:
    """Make the plugin in `FOLDER` known to JAX."""
    modules = sorted(path.name for path in FOLDER.glob("jax_plugins/xla_cuda*"))
    if not modules:
        raise ModuleNotFoundError("XLA's plugin for CUDA, which compiles for GPUs, isn't installed; make aot-gpu does")
    sys.path.append(str(FOLDER))
    # Pallas has looked for it beside the plugin, if it was imported before.
    runtime = next(FOLDER.glob("jax_cuda*_plugin/libmosaic_gpu_runtime.so"))
    os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(runtime))
    importlib.import_module(f"jax_plugins.{modules[-1]}").initialize()


@contextmanager
def silent_stderr() -> Iterator[None]:
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def memory() -> int:
    """Bytes of a GPU's memory that JAX lets a program have (docs.jax.dev/en/latest/gpu_memory_allocation.html)."""
    found = re.search(r"device_memory_size: (\d+)", DESCRIPTION)
    assert found is not None
    share = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    return int(int(found[1]) * float(share or 0.75))
