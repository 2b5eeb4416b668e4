"""Every test sees eight virtual CPU devices. Shapes are checked at every call of a function, unless SHAPES=0.

A program is compiled once. Later runs, and the processes that tests start, take it from a folder.
"""

import fcntl
import gc
import os
import signal
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
CACHE = tempfile.TemporaryDirectory(prefix="mllm-tests-")  # where data.cache is; removed when the tests end
os.environ["XDG_CACHE_HOME"] = CACHE.name
gc.set_threshold(50_000, 20, 50)  # tracing makes millions of objects, and few circles: a sixteenth of all seconds
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Programs for CPUs compile in an eighth of the time. XLA decides on fusion, sharding and exchanges before this stage.
QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):  # later ones have no other emitters
    QUICKLY += " --xla_cpu_use_fusion_emitters=false"

# beartype knows typing.Self only where it decorates whole classes, and jaxtyping decorates functions: not the sections
# of the configuration, nor signals. The head's entry points check their arguments themselves, and which errors they
# raise is a part of their contract.
ENTRY_POINTS = ("api", "divergence", "layout", "likeliest", "logits")
UNCHECKED = {f"lm_head.{name}" for name in ENTRY_POINTS}
ROOT = Path(__file__).parent.parent
SOURCES = {"mllm": ROOT, "lm_head": ROOT / "kernels"}
FILES = [path.relative_to(root) for name, root in SOURCES.items() for path in (root / name).rglob("*.py")]
MODULES = {".".join(path.with_suffix("").parts) for path in FILES}
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("patient", deadline=None)  # other processes may take the processor
    settings.load_profile("patient")
SECTIONS = {
    name for name in MODULES if name.startswith("mllm.config.") or name.endswith(("settings", "algorithms.table"))
}
if find_spec("beartype") and os.environ.get("SHAPES") != "0":  # checking takes a seventh of all seconds
    install_import_hook(sorted(MODULES - UNCHECKED - SECTIONS), "beartype.beartype")


def pytest_configure(config: pytest.Config) -> None:
    """Sets XLA's flags before it reads them. Tests that compile for other devices get what users get."""
    quickly = "" if config.option.markexpr.startswith(("aot", "gpu", "tpu")) else QUICKLY
    flags = (os.environ.get("XLA_FLAGS", ""), quickly, "--xla_force_host_platform_device_count=8")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a slow test come first, so that the workers, who take a file at a time, end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Makes the configuration of a finished run by its name in `tiny.METHODS`.

    A session trains each once: a worker that wants the same at the same time waits. Tests go on from copies.
    """
    from runs import changed, run
    from tiny import METHODS

    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "finished"
    folder.mkdir(exist_ok=True)

    def make(name):
        settings, done = changed(METHODS[name], run_dir=str(folder / name)), folder / f"{name}.done"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                assert run(settings) == 0
                done.touch()
        return settings

    return make
