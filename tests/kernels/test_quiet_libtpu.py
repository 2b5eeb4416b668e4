"""Importing `kernels` keeps libtpu quiet on a machine without a TPU, and changes no setting of the user."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

OWN = dict.fromkeys(("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"), "own")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, {}),
        ({"TPU_SKIP_MDS_QUERY": "1"}, {"TPU_ACCELERATOR_TYPE": "v6e-1", "TPU_WORKER_HOSTNAMES": "localhost"}),
        ({"TPU_SKIP_MDS_QUERY": "1", **OWN}, OWN),
    ],
    ids=["JAX has seen a TPU", "JAX has seen no TPU", "the user's own settings"],
)
def test_both_settings_are_made_where_there_is_no_tpu_and_the_user_has_made_none(environment, found, monkeypatch):
    for name in ("TPU_SKIP_MDS_QUERY", *OWN):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    importlib.reload(kernels)
    assert {name: os.environ[name] for name in OWN if name in os.environ} == found


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
