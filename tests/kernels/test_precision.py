"""Every matrix product of a run has the precision of its model's dtype, whatever JAX's configuration says.

float32 is the highest: on a TPU sampler and trainer would otherwise round their operands, and not the same ones.
bfloat16 is one pass: Mosaic refuses more.
"""

from typing import Any

import head_programs as head
import jax
import pytest
from cases import equations
from engines import V6E
from jax import lax
from tiny import ARCHITECTURE, config

from mllm.config.model import MeshConfig
from mllm.model import attention
from mllm.parallel.mesh import make_mesh
from mllm.plan.programs import Program, Programs


def precisions(program: Program) -> set[Any]:
    function, arguments = program
    found = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
    products = {equation.params["precision"] for equation in found if equation.primitive.name == "dot_general"}
    assert products
    return products


def allowed(dtype: str) -> set[Any]:
    if dtype == "float32":
        return {(lax.Precision.HIGHEST, lax.Precision.HIGHEST)}
    # The last is JAX's own attention's.
    return {(lax.Precision.DEFAULT, lax.Precision.DEFAULT), lax.DotAlgorithmPreset.BF16_BF16_F32}


OTHER = "tensorfloat32"
"""A setting that names none of the allowed precisions."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("splash", "bfloat16"), pytest.param("xla", "float32", marks=pytest.mark.nightly)]
)
def test_sampler_and_trainer_multiply_at_the_same_precision(kernel, dtype, monkeypatch):
    if kernel == "splash":
        monkeypatch.setattr(attention, "platform", lambda mesh: "tpu")
    architecture = {**ARCHITECTURE, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    programs = Programs(config(model={"architecture": architecture, "dtype": dtype}), make_mesh(MeshConfig()))
    with jax.default_matmul_precision(OTHER):
        for name in ("update", "logprob", "prefill", "decode"):
            merged = allowed("float32") if name == "decode" else set()  # pages' sums are float32
            assert precisions(getattr(programs, name)()) <= allowed(dtype) | merged, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "impl", ["xla", "mosaic_tpu", *(pytest.param(x, marks=pytest.mark.slow) for x in ("full_logits", "chunked_logits"))]
)
def test_the_head_multiplies_at_the_precision_of_its_operands(impl, dtype):
    sizes = {"tokens": 256, "vocabulary": 512, "features": 128, "hidden": dtype, "weight": dtype, "impl": impl}
    mesh = make_mesh(MeshConfig())
    for program in (head.general(mesh, entropy=True, **sizes), head.loss(mesh, workspace=1 << 30, **sizes)):
        with jax.default_matmul_precision(OTHER), jax.sharding.use_abstract_mesh(V6E):
            assert precisions(program) <= allowed(dtype)
