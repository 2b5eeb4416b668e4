"""Importing `kernels` keeps libtpu quiet on a machine without a TPU, and changes no setting of the user."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

SET = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")


def reloaded(monkeypatch, **environment):
    """The settings after `kernels` is imported in an environment."""
    for name in ("TPU_SKIP_MDS_QUERY", *SET):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    importlib.reload(kernels)
    return {name: os.environ[name] for name in SET if name in os.environ}


def test_where_jax_has_seen_a_tpu_nothing_is_set(monkeypatch):
    assert reloaded(monkeypatch) == {}


def test_where_jax_has_seen_no_tpu_both_settings_are_made(monkeypatch):
    assert reloaded(monkeypatch, TPU_SKIP_MDS_QUERY="1").keys() == set(SET)


def test_what_a_user_has_set_stays(monkeypatch):
    own = dict.fromkeys(SET, "own")
    assert reloaded(monkeypatch, TPU_SKIP_MDS_QUERY="1", **own) == own


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
@pytest.mark.parametrize("platforms", [{}, {"JAX_PLATFORMS": "cpu"}])
def test_a_program_on_a_machine_without_a_tpu_prints_nothing_but_its_own(platforms):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "JAX_", "LIBTPU_"))}
    root = Path(__file__).parent.parent.parent
    # The conftest's and other tests' settings aside, as a user starts a program.
    environment = kept | platforms | {"PYTHONPATH": os.pathsep.join([str(root), kept.get("PYTHONPATH", "")])}
    program = "import kernels, jax; print(len(jax.devices()) > 0)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert done.stderr == ""
