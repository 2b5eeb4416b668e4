"""Reads the text of a program compiled for TPUs: Pallas kernels, arrays, and exchanges of devices."""

import re
from importlib.util import find_spec
from typing import NamedTuple

import jax
import pytest

from mllm.plan.targets import GPU_PLUGIN

FOR_TPUS = [pytest.mark.aot, pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: make aot")]
NO_PLUGIN = not GPU_PLUGIN.is_dir() and find_spec("jax_plugins") is None
FOR_GPUS = [pytest.mark.aot_gpu, pytest.mark.skipif(NO_PLUGIN, reason="needs XLA's plugin for CUDA: make aot-gpu")]
"""Marks of tests that compile for devices that aren't there."""


class Stored(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class Exchanged(NamedTuple):
    """An array that comes out of a collective."""

    kind: str
    dtype: str
    shape: tuple[int, ...]


def kernels(program: jax.stages.Compiled) -> set[str]:
    """Names of the Pallas kernels, without XLA's numbers and JAX's marks of what is differentiated."""
    calls = re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", text(program))
    return {re.sub(r"^(?:transpose_|jvp_)*(.*?)_*(?:\.\d+)*$", r"\1", name) for name in calls}


def exchanged(program: jax.stages.Compiled) -> list[Exchanged]:
    """The arrays that collectives exchange. An array in a loop counts once, and scalars are left out."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
    # For TPUs a reduce-scatter is a computation of this name. It consists of an all-reduce and a slice.
    scattered = re.compile(r"^%all-reduce-scatter\S* \([^\n]*\) -> ([^\n]*) \{$.*?^\}$", re.MULTILINE | re.DOTALL)
    matches = re.findall(rf"%\S+ = (.*?) ({kinds})(?:-start)?\(", scattered.sub("", text(program)))
    matches += [(result, "reduce-scatter") for result in scattered.findall(text(program))]
    return [Exchanged(kind, *array) for result, kind in matches for array in arrays(result)]


def arrays(part: str) -> list[Stored]:
    """The arrays with one dim or more in a piece of a program's text."""
    matches = re.findall(r"(\w+)\[([\d,]+)\]", part)
    return [Stored(dtype, tuple(map(int, shape.split(",")))) for dtype, shape in matches]


def text(program: jax.stages.Compiled) -> str:
    return program.as_text() or ""
