"""Programs that were compiled once are read from a folder at later starts; a line says which one is compiled now.

It is in mllm/xla in $XDG_CACHE_HOME or ~/.cache, one for each process, since their programs differ. JAX's own cache
leaves a file that it neither reads nor replaces when it is killed in the middle of a write, and lets only process 0
write; who sets JAX_COMPILATION_CACHE_DIR gets that one.
"""

import functools
import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import jax
from jax._src import compilation_cache, compiler  # JAX has no other way to a cache of one's own
from jax._src.compilation_cache_interface import CacheInterface

from mllm.stopwatch import COMPILING
from mllm.store.bucket import cache_folder

LARGEST = 4 * 2**30
"""The most bytes of a process's folder; the programs that were read longest ago make room."""
DIGEST = hashlib.sha256().digest_size
log = logging.getLogger(__name__)


class ProgramCache(CacheInterface):
    """Programs by JAX's keys: files that are replaced whole, and begin with a checksum. No error passes through."""

    def __init__(self, folder: Path) -> None:
        self._path = folder  # JAX's name

    def get(self, key: str) -> bytes | None:
        """The program; None where there is none, or it is damaged."""
        path = self._path / key
        with suppress(OSError):
            content = path.read_bytes()
            if hashlib.sha256(content[DIGEST:]).digest() == content[:DIGEST]:
                with suppress(OSError):
                    os.utime(path)
                return content[DIGEST:]
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write the program, and remove others until all are at most `LARGEST` bytes."""
        part = self._path / f"{os.getpid()}.part"
        with suppress(OSError):
            try:
                part.write_bytes(hashlib.sha256(value).digest() + value)
                part.replace(self._path / key)
            finally:
                part.unlink(missing_ok=True)
            files = [(found.stat(), found) for found in self._path.iterdir()]
            held = 0
            for found, path in sorted(files, key=lambda file: file[0].st_mtime_ns, reverse=True):
                held += found.st_size
                if held > LARGEST:
                    path.unlink(missing_ok=True)


@functools.cache
def keep_programs() -> None:
    """Read programs from this process's folder and write them there, and count and say what is compiled.

    JAX must know the other processes by now. A folder that can't be used is a warning.
    """
    COMPILING.listen()
    index, count = jax.process_index(), jax.process_count()
    # Processes tune a program for GPUs together: one that had it already would be waited for.
    if jax.config.values["jax_compilation_cache_dir"] or (count > 1 and jax.default_backend() == "gpu"):
        return
    folder = cache_folder() / "xla" / f"{index}_of_{count}"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = folder.stat()
        strange = found.st_uid != os.geteuid() or found.st_mode & 0o022  # programs of others must not run
        problem = "others can write it" * strange or "can't be written" * (not os.access(folder, os.W_OK))
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        log.warning("%s: %s; so programs are compiled at each start (JAX_COMPILATION_CACHE_DIR)", folder, problem)
        return
    compilation_cache.get_file_cache = lambda path: (ProgramCache(Path(path)), path)
    if index:  # else JAX would not write
        vars(compiler)["distributed"] = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # files that nothing checks or bounds
    jax.config.update("jax_compilation_cache_dir", str(folder))
