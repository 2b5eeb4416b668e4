"""A configuration runs on the devices that are there: the mesh takes all of them, the micro-batch what fits."""

import jax
import pytest
import tiny
from runs import changed, run

from mllm.config import load as configs
from mllm.config.load import for_devices
from mllm.errors import UserError
from mllm.parallel.mesh import make_mesh
from mllm.plan import fit
from mllm.plan.memory import at_hand
from mllm.run.store import tool_run

OPEN = changed(tiny.config("sft", rollout=None, eval=None, task={"heldout": 0}), mesh={"fsdp": -1})
"""A batch of 8 rows on all devices."""


@pytest.mark.parametrize(("mesh", "devices", "fsdp"), [({}, 1, 1), ({}, 8, 8), ({"dp": 2, "tp": 2}, 8, 2), ({}, 4, 4)])
def test_fsdp_takes_the_devices_that_dp_and_tp_leave(mesh, devices, fsdp):
    assert for_devices(changed(OPEN, mesh=mesh), devices).mesh.fsdp == fsdp


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ({"tp": 2}, 1, "mesh: dp * tp = 2, but there are 1 devices"),
        ({}, 3, "batch_size: 8 is not divisible by mesh.dp * mesh.fsdp (3), with all 3 devices"),
    ],
)
def test_devices_that_do_not_suit_are_one_line(mesh, devices, message):
    with pytest.raises(UserError) as error:
        for_devices(changed(OPEN, mesh=mesh), devices)
    assert str(error.value).startswith(message)


def devices_with(memory, config):
    return at_hand(make_mesh(config.mesh))._replace(memory=memory)


@pytest.fixture(scope="module")
def peaks():
    """The bytes of an update by its rows, as the compiler has them."""
    one = changed(OPEN, mesh={"fsdp": 1})
    devices = devices_with(0, one)
    return {rows: fit.compiled_update(changed(one, micro_batch_size=rows), devices).peak for rows in (1, 2, 8)}


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_micro_batch_has_the_most_rows_that_fit(peaks, rows):
    one = changed(OPEN, mesh={"fsdp": 1})
    found = fit.with_micro_batch(one, devices_with(peaks[rows], one))
    assert found.micro_batch_size == rows
    assert found == changed(one, micro_batch_size=rows)


def test_where_nothing_fits_a_line_says_the_smallest_change_that_would(peaks):
    one = changed(OPEN, mesh={"fsdp": 1})
    with pytest.raises(UserError, match=r"micro_batch_size: nothing fits on .* too much .*; model.remat=full would"):
        fit.with_micro_batch(one, devices_with(peaks[1] - 1, one))
    shorter = changed(one, model={"remat": "full"})
    least = fit.compiled_update(changed(shorter, micro_batch_size=1), devices_with(0, one)).peak
    with pytest.raises(UserError, match=r"data\.max_length=16 would"):
        fit.with_micro_batch(shorter, devices_with(least - 1, one))
    with pytest.raises(UserError, match="; a TPU v5 lite would"):
        fit.with_micro_batch(one, devices_with(0, one))


@pytest.mark.slow
def test_a_run_on_all_devices_notes_its_rows_and_a_resume_keeps_them(tmp_path, monkeypatch):
    settings = changed(OPEN, run_dir=str(tmp_path / "run"), steps=4, checkpoint={"every": 2})
    monkeypatch.setattr(fit, "sure_to_fit", lambda *_: False)
    assert run(settings) == 0
    noted = configs.load_run(tool_run(settings.run_dir).folder / "config.yaml")
    assert (noted.micro_batch_size, noted.mesh.fsdp) == (8, jax.device_count())
    monkeypatch.setattr(fit, "with_micro_batch", lambda *_: pytest.fail("the rows are noted"))
    assert run(changed(settings, steps=5)) == 0
