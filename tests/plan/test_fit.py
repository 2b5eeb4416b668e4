"""A configuration runs on any devices: the mesh takes every device, and rows and rematerialisation fit in memory."""

import jax
import pytest
import tiny
from flax import nnx
from runs import changed

from mllm.config import load as configs
from mllm.config.load import for_devices
from mllm.errors import UserError
from mllm.model import load
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.plan import fit, memory
from mllm.plan.memory import COLUMNS, Phase
from mllm.plan.targets import Account, at_hand
from mllm.run.build import Run
from mllm.run.store import tool_run

OPEN = changed(tiny.config("sft", rollout=None, eval=None, task={"heldout": 0}), mesh={"fsdp": -1})
"""A batch of 8 rows on all devices."""


@pytest.mark.parametrize(("mesh", "devices", "fsdp"), [({}, 1, 1), ({}, 8, 8), ({"dp": 2, "tp": 2}, 8, 2), ({}, 4, 4)])
def test_fsdp_gets_the_devices_beside_dp_and_tp(mesh, devices, fsdp):
    assert for_devices(changed(OPEN, mesh=mesh), devices).mesh.fsdp == fsdp


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ({"tp": 2}, 1, "mesh: dp * tp = 2, more than the number of devices, 1"),
        ({}, 3, "batch_size: 8 is not divisible by mesh.dp * mesh.fsdp (3), with all 3 devices"),
    ],
)
def test_unsuitable_devices_are_a_one_line_error(mesh, devices, message):
    with pytest.raises(UserError) as error:
        for_devices(changed(OPEN, mesh=mesh), devices)
    assert str(error.value).startswith(message)


AUTO = changed(OPEN, mesh={"fsdp": 1})
ONE = changed(AUTO, model={"remat": "products"})


def peak(config):
    """MiB of an update: 1 a token of activations with `full`, 2 with `products`."""
    kept = 1 if config.model.remat == "full" else 2
    return 10 + config.micro_batch_size * config.examples.max_length * kept


def devices_with(mib):
    return at_hand(make_mesh(ONE.mesh))._replace(memory=int(mib * 2**20))


@pytest.fixture
def compiled(monkeypatch):
    """`model.remat` and the rows of the updates that would be compiled. Nothing is; `peak` gives the memory."""
    tried = []

    def update(config, devices):
        tried.append((config.model.remat, config.micro_batch_size))
        parts = dict.fromkeys(COLUMNS, 0) | {"parameters": 10 * 2**20, "activations": (peak(config) - 10) * 2**20}
        return Phase("update", parts)

    monkeypatch.setattr(fit, "compiled_update", update)
    return tried


@pytest.mark.parametrize(("rows", "tried"), [(8, [8]), (2, [8, 2, 4]), (1, [8, 1, 2])])
def test_a_micro_batch_has_the_most_rows_that_fit(compiled, rows, tried):
    most = changed(ONE, micro_batch_size=rows)
    fitted, update = fit.fitted(ONE, devices_with(peak(most) / fit.FILLED + 0.01))
    assert (fitted, update, [rows for _, rows in compiled]) == (most, peak(most) * 2**20, tried)
    assert fit.fitted(most, devices_with(0)) == (most, None)


@pytest.mark.parametrize(
    ("least", "memory", "chosen", "tried"),
    [
        (8, ("products", 8), ("products", 8), [("products", 8)]),
        (2, ("products", 4), ("products", 4), [("products", 8), ("products", 4)]),
        (4, ("full", 4), ("full", 4), [("products", 8), ("full", 8), ("full", 4)]),
        (1, ("full", 1), ("full", 1), [("products", 8), ("full", 8), ("full", 1), ("full", 2)]),
    ],
)
def test_auto_keeps_products_if_enough_rows_fit(compiled, monkeypatch, least, memory, chosen, tried):
    monkeypatch.setattr(fit, "ENOUGH", least * AUTO.examples.max_length)
    devices = devices_with(peak(fit.settled(AUTO, memory[1], memory[0])) / fit.FILLED + 0.01)
    fitted, _ = fit.fitted(AUTO, devices)
    assert (fitted.model.remat, fitted.micro_batch_size) == chosen
    assert compiled == tried


@pytest.mark.parametrize("kind", ["products", "full"])
def test_auto_keeps_products_if_the_settings_rows_fit(compiled, kind):
    two = changed(AUTO, micro_batch_size=2)
    fitted, _ = fit.fitted(two, devices_with(peak(fit.settled(two, 2, kind)) / fit.FILLED + 0.01))
    assert fitted == fit.settled(two, 2, kind)
    assert compiled == [("products", 2)]


@pytest.mark.parametrize(("repeating", "rows", "kept"), [({8}, 4, "products"), ({8, 2, 4}, 8, "full")])
def test_products_are_not_kept_where_xla_would_repeat_operations(compiled, monkeypatch, repeating, rows, kept):
    update = fit.compiled_update
    repeated = lambda config, *_: update(config, None)._replace(repeats=config.micro_batch_size in repeating)  # noqa: E731
    monkeypatch.setattr(fit, "compiled_update", repeated)
    monkeypatch.setattr(fit, "ENOUGH", 2 * AUTO.examples.max_length)
    assert fit.fitted(AUTO, devices_with(10**6))[0] == fit.settled(AUTO, rows, kept)


def test_auto_recomputes_all_on_tpus(compiled, monkeypatch):
    monkeypatch.setattr(load, "platform", lambda _: "tpu")
    assert fit.fitted(AUTO, devices_with(10**6))[0] == fit.settled(AUTO, 8, "full")
    assert compiled == [("full", 8)]


@pytest.mark.parametrize(("full", "rows"), [(8, 4), (1, 1)])
def test_only_the_fewest_rows_may_fill_the_memory(compiled, full, rows):
    found, _ = fit.fitted(ONE, devices_with(peak(changed(ONE, micro_batch_size=full))))
    assert found.micro_batch_size == rows


def test_a_start_compiles_the_update_and_no_head_apart(monkeypatch):
    programs = []
    monkeypatch.setattr(memory, "account_of", lambda *program: programs.append(program[0]) or Account(0, 2**20))
    monkeypatch.setattr(fit, "sure_to_fit", lambda *_: False)
    assert fit.fit(ONE, load_policy(ONE, make_mesh(ONE.mesh)), make_mesh(ONE.mesh)).micro_batch_size == 8
    assert len(programs) == 1


def test_a_compiled_update_says_whether_xla_repeats_operations(monkeypatch):
    for repeats in (True, False):
        monkeypatch.setattr(memory, "account_of", lambda *_, repeats=repeats: Account(0, 2**20, repeats))
        assert fit.compiled_update(fit.settled(ONE, 8, "products"), devices_with(1)).repeats == repeats


def test_a_line_says_the_smallest_change_that_would_fit(compiled):
    least = peak(changed(ONE, micro_batch_size=1))
    with pytest.raises(UserError, match=r"micro_batch_size: nothing fits on .* too much .*; model.remat=full would"):
        fit.fitted(ONE, devices_with(least - 1))
    half = changed(ONE, model={"remat": "full"})
    with pytest.raises(UserError, match=r"data\.max_length=16 would"):
        fit.fitted(half, devices_with(peak(changed(half, micro_batch_size=1)) - 1))
    for config in (ONE, changed(half, data={"max_length": 1})):  # no shorter rows than of one token
        with pytest.raises(UserError, match="; a TPU v5 lite would"):
            fit.fitted(config, devices_with(0))


@pytest.mark.slow
def test_a_run_pins_its_rows_and_remat_and_resume_keeps_the_values(tmp_path, monkeypatch):
    settings = changed(OPEN, run_dir=str(tmp_path / "run"))
    monkeypatch.setattr(fit, "sure_to_fit", lambda *_: False)
    monkeypatch.setattr(fit, "fastest_remat", lambda _: "full")  # not as the policy is loaded
    with Run.build(settings, False, fit.fit) as run:
        assert nnx.merge(run.policy.graphdef, run.policy.params).remat == "full"
    noted = configs.load_run(tool_run(settings.run_dir).folder / "config.yaml")
    assert (noted.micro_batch_size, noted.model.remat, noted.mesh.fsdp) == (8, "full", jax.device_count())
    monkeypatch.setattr(fit, "compiled_update", lambda *_: pytest.fail("the rows are noted"))
    with Run.build(settings, False, fit.fit) as resumed:
        assert (resumed.config.micro_batch_size, resumed.config.model.remat) == (8, "full")
