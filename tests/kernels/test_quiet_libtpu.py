"""Importing `kernels` makes the settings that keep libtpu quiet without a TPU, and changes none of the user's."""

import importlib
import os

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
