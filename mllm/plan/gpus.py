"""H100s that this machine doesn't have, for `targets.py`: XLA's CUDA plugin compiles for them (`make aot-gpu`).

A target is `h100`, or several of one host as in `h100:8`. The plugin needs no GPU, no driver and no CUDA library. It
lies in a folder of its own, which only this file looks into: where JAX finds it and no driver, every program complains.

Without a GPU nothing can be timed, so XLA keeps its first choice for each matrix product, a Triton kernel that takes
what comes before into itself; with one, it may find cuBLAS faster, and that result has to be stored first. `FLAGS` make
either choice for all of them, and who asks for memory takes what holds more (`assignment.py`). Left out: workspaces of
the libraries, 32 MiB or so, and what these hold outside XLA's share of the memory.
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
"""Where `make aot-gpu` puts the plugin."""
DESCRIPTION = Path(__file__).with_name("h100.txtpb").read_text()
CAVEAT = "by XLA's compiler without a GPU, and never held against one; the larger of two compilations (docs/log.md)"
"""What one should know of an account."""
FLAGS = ("--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=false")
"""For `XLA_FLAGS`: matrix products by Triton, and by cuBLAS."""
MOST = 8
"""GPUs of a host."""


def named(target: str) -> bool:
    return target.partition(":")[0] == "h100"


def count(target: str) -> int:
    """How many GPUs.

    Raises:
        ValueError: not one that a host can have.
    """
    _, _, number = target.partition(":")
    found = int(number) if number.isdecimal() else 0
    if ":" in target and not 1 <= found <= MOST:
        raise ValueError(f"target {target!r}: there are h100 and h100:2 to h100:{MOST}, the GPUs of a host")
    return found or 1


def devices(target: str) -> Sequence[jax.Device]:
    """Raises ValueError as `count`, ModuleNotFoundError where the plugin isn't installed."""
    shape = f"1x1x{count(target)}"  # partitions, hosts of each, GPUs of each
    # JAX would ask for the CUDA libraries that a GPU needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    with quiet():
        try:
            found = topologies.get_topology_desc("h100", "cuda", target_config=DESCRIPTION, topology=shape)
        except NotImplementedError:  # JAX knows no such plugin; where it was installed beside JAX, it would
            register()
            found = topologies.get_topology_desc("h100", "cuda", target_config=DESCRIPTION, topology=shape)
    return found.devices


def register() -> None:
    """Tell JAX of the plugin in `FOLDER`."""
    modules = sorted(path.name for path in FOLDER.glob("jax_plugins/xla_cuda*"))
    if not modules:
        raise ModuleNotFoundError("XLA's plugin for CUDA, which compiles for GPUs, isn't installed; make aot-gpu does")
    sys.path.append(str(FOLDER))
    # Pallas has looked for it beside the plugin, if it was imported before.
    runtime = next(FOLDER.glob("jax_cuda*_plugin/libmosaic_gpu_runtime.so"))
    os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(runtime))
    importlib.import_module(f"jax_plugins.{modules[-1]}").initialize()


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing reaches stderr: that there is no driver the plugin says as it is loaded, before it can be silenced."""
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
    """Bytes of a GPU's memory that JAX lets a program have: three quarters, or what the environment says.

    https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    """
    found = re.search(r"device_memory_size: (\d+)", DESCRIPTION)
    assert found is not None
    said = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    return int(int(found[1]) * float(said or 0.75))
