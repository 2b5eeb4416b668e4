"""One table maps logical axes to mesh axes, and a size that its mesh axis does not divide is refused by name."""

from dataclasses import replace

import jax
import pytest

from mllm.config.model import MeshConfig
from mllm.errors import UserError
from mllm.model.layout import Layout
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import make_mesh

SIZES = PRESETS["Qwen/Qwen2.5-3B"]


def test_a_mesh_of_too_many_devices_is_an_error_that_counts_them():
    with pytest.raises(UserError, match=r"tp = 16, but there are 8 devices: set mesh.dp=2 or mesh.tp=2"):
        make_mesh(MeshConfig(dp=4, tp=4))
    with pytest.raises(UserError, match=r"tp = 1000, but there are 8 devices: lower more than one of them"):
        make_mesh(MeshConfig(dp=10, fsdp=10, tp=10))


@pytest.mark.parametrize(
    ("axes", "change", "message"),
    [
        ({"tp": 4}, {"num_attention_heads": 14}, "mesh.tp: 4 does not divide the model's num_attention_heads of 14"),
        ({"tp": 8}, {"vocab_size": 260}, "mesh.tp: 8 does not divide the model's vocab_size of 260; .* works is 4"),
        ({"tp": 3}, {"intermediate_size": 36}, "mesh.tp: 3 does not .* num_attention_heads of 16; .* works is 2"),
        ({"fsdp": 8}, {"hidden_size": 36}, "mesh.fsdp: 8 does not divide the model's hidden_size of 36; .* works is 6"),
    ],
)
def test_a_size_that_its_mesh_axis_does_not_divide_is_refused_with_the_nearest_that_works(axes, change, message):
    mesh = make_mesh(MeshConfig(**axes))
    with pytest.raises(UserError, match=message):
        Layout.of(mesh, replace(SIZES, **change))


def test_several_processes_must_use_all_of_their_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"mesh: dp \* fsdp \* tp = 4, but the 2 processes have 8 devices"):
        make_mesh(MeshConfig(dp=2, tp=2))
