"""How many weights have moved as products see them: the metric, and exports that keep what has moved."""

import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import changed, newest, records, run
from safetensors.numpy import load_file
from tiny import ARCHITECTURE, config

from mllm.model.compute_copy import Rounding, compute_copy
from mllm.model.layout import TENSORS
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.run import moved
from mllm.run.checkpoint import by_name
from mllm.run.report import summary
from mllm.store.run_store import RunStore
from tools import export

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parent.parent / "fixtures"
DITHERED, NEAREST = (Rounding(jnp.dtype("bfloat16"), dithered) for dithered in (True, False))


def settings_of(folder: Path, **sections):
    """A run of a model on bfloat16's grid, with a learning rate at which rounding to nearest hides its updates."""
    model = {"init": "pretrained", "architecture": None, "source": str(FIXTURES / "tiny_sft"), "tokenizer": "bytes"}
    model |= {"dtype": "bfloat16", **sections.pop("model", {})}
    often = {"eval": {"every": 2}, "checkpoint": {"every": 2}, "optimizer": {"learning_rate": 1e-6}}
    return config("sft", run_dir=str(folder), model=model, **{**often, **sections})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    settings = settings_of(tmp_path_factory.mktemp("moved") / "run")
    assert run(settings) == 0
    return settings


@pytest.fixture
def copy(trained, tmp_path):
    return changed(trained, run_dir=str(shutil.copytree(trained.run_dir, tmp_path / "run")))


def tensors_of(params, rounding):
    """The tensors of a model's file, and their values in the dtype of the rounding."""
    for name, leaf in by_name(params).items():
        if "{}" not in TENSORS[name]:
            yield TENSORS[name], compute_copy(leaf, rounding, name)
        else:
            for layer, values in enumerate(leaf):
                yield TENSORS[name].format(layer), compute_copy(values, rounding, name, layer)


def all_moved(settings, rounding):
    """The share of all weights of a run's matrices whose compute copies differ from the start's."""
    first = load_policy(settings, make_mesh(settings.mesh)).initial_params()
    both = (tensors_of(params, rounding) for params in (first, newest(settings).train.params))
    moved = [np.ravel(one != other) for (_, one), (_, other) in zip(*both, strict=True) if one.ndim == 2]
    return np.mean(np.concatenate(moved))


def test_the_share_of_moved_weights_is_measured_at_every_evaluation_from_0_on(trained):
    measured = {line["step"]: line["params/moved"] for line in records(trained) if "params/moved" in line}
    assert list(measured) == [0, 2, 4]
    assert measured[0] == 0
    assert 0.001 < measured[2] < measured[4] == pytest.approx(all_moved(trained, DITHERED), abs=0.004)
    assert measured[4] > 2 * all_moved(trained, NEAREST)
    assert f"weights moved      0.00% at step 0, {measured[4]:.2%} at step 4" in summary(RunStore(trained.run_dir), "")


def test_a_sample_is_of_all_matrices_and_the_same_on_every_mesh():
    sizes = {**ARCHITECTURE, "vocab_size": 2048, "hidden_size": 64, "head_dim": 8}
    found = []
    for mesh in ({}, {"fsdp": 8}, {"dp": 2, "fsdp": 2, "tp": 2}):
        settings = config(model={"architecture": sizes}, mesh=mesh)
        params = load_policy(settings, make_mesh(settings.mesh)).initial_params()
        first = moved.sample(params)
        later = jax.tree.map(lambda leaf: leaf * (1 + 1e-4), params)
        found.append((first, moved.moved_share(first, later, DITHERED)))
    assert found == found[:1] * 3
    weights, stride = moved.sampled(params)
    matrices = {name: leaf for name, leaf in by_name(params).items() if "norm" not in name and "bias" not in name}
    assert stride % 2 == 1 < stride
    assert weights.keys() == matrices.keys()
    one, other = (
        [np.ravel(compute_copy(leaf, DITHERED, name)[..., ::stride, ::stride]) for name, leaf in by_name(tree).items()]
        for tree in (matrices, {name: leaf * (1 + 1e-4) for name, leaf in matrices.items()})
    )
    assert found[0][1] == np.mean(np.concatenate(one) != np.concatenate(other))
    assert moved.SAMPLED / 2 < sum(each.size for each in weights.values()) < 1.1 * moved.SAMPLED
    assert 0.01 < found[0][1] < 0.05


def test_a_bfloat16_export_is_what_the_run_multiplies_and_may_be_replaced(trained, copy, capsys):
    folder = Path(copy.run_dir, "export")
    for dtype, rounding in (("float32", Rounding(jnp.dtype("float32"))), ("bfloat16", DITHERED)):
        assert export.main([copy.run_dir, "--dtype", dtype]) == 0
        exported = load_file(folder / "model.safetensors")
        for tensor, expected in tensors_of(newest(trained).train.params, rounding):
            assert exported[tensor].dtype == expected.dtype
            assert exported[tensor].tobytes() == np.asarray(expected).tobytes()
        said, line = capsys.readouterr().out.splitlines()
        assert said == f"step 4 of {copy.run_dir} is exported to {folder}"
        assert "differ from the run's first ones, rounded to nearest" in line
        for share, how in zip(re.findall(r"([\d.]+)%", line), (DITHERED, NEAREST), strict=True):
            assert float(share) == pytest.approx(100 * all_moved(trained, how), abs=0.4)
        readme = (folder / "README.md").read_text()
        assert all(part in readme for part in (line, f"Step 4 of {copy.run_dir}", dtype))
    (folder / "README.md").write_text("# Mine")
    assert export.main([copy.run_dir]) == 2
    assert "README.md: no export wrote this, and it would be lost" in capsys.readouterr().err


def test_a_run_that_rounds_to_nearest_exports_so_and_is_restored_in_float32(copy):
    path = Path(copy.run_dir, "config.yaml")
    path.write_text(path.read_text().replace("compute_rounding: dithered", "compute_rounding: nearest"))
    assert export.main([copy.run_dir]) == 0
    exported = load_file(Path(copy.run_dir, "export", "model.safetensors"))
    for tensor, expected in tensors_of(newest(copy).train.params, NEAREST):
        assert exported[tensor].tobytes() == np.asarray(expected).tobytes()
    assert export.restore(copy.run_dir, None, "float32")[0].model.dtype == "float32"
