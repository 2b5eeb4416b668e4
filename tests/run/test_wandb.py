"""Weights & Biases follows the events that TensorBoard gets, and a run does not depend on it."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import arguments, assert_same_end, changed, records, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import config

import train
from mllm.run.wandb import run_id
from mllm.store.run_store import RunStore

SETTINGS = config("sft", steps=4, checkpoint={"every": 2}, eval=None, rollout=None, log={"wandb": "project"})


class Service:
    """A service that remembers: stands for the package, whose `init` returns it."""

    def __init__(self):
        self.begun, self.fault, self.found = [], "", []
        self.package = SimpleNamespace(init=self.init, Settings=dict)

    def init(self, **options):
        self.begun.append({**options, "events": len(list(Path(options["dir"]).glob("tensorboard/*")))})
        return self

    def finish(self):
        self.found.append(drawn(self.begun[-1]["dir"]))
        if self.fault:
            raise ConnectionError(self.fault)


def drawn(run_dir):
    """The steps and losses that TensorBoard reads."""
    events = EventAccumulator(f"{run_dir}/tensorboard").Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service.package)
    return service


@pytest.mark.nightly
def test_a_run_is_followed_from_its_first_event_to_its_last_goes_on_there_and_does_not_depend_on_it(
    tmp_path, service, caplog, finished
):
    whole = finished("sft")
    settings = changed(whole, run_dir=str(tmp_path / "mine"), log={"wandb": "project"})
    assert run(changed(settings, steps=4)) == 0
    service.fault = "the network is down\nmore"
    assert run(settings) == 0
    assert_same_end(settings, whole)  # as any run that is given more steps
    first, second = service.begun
    assert (first["id"], first["name"], first["project"]) == (second["id"], "mine", "project")
    assert (first["resume"], first["sync_tensorboard"]) == ("allow", True)
    assert second["config"] == settings.model_dump(mode="json")
    assert (first["events"], second["events"]) == (0, 1)  # those of a file that is open by then are not followed
    losses = [(line["step"], pytest.approx(line["loss"])) for line in records(settings)[1:]]
    assert service.found == [losses[:4], losses]
    (warning,) = [record.getMessage() for record in caplog.records if "wandb" in record.getMessage()]
    assert warning == "log.wandb: the network is down; the run goes on without it"


def test_a_moved_run_keeps_its_id_and_a_copied_one_gets_another(tmp_path):
    first, copied, moved = (RunStore(tmp_path / name) for name in ("first", "copied", "moved"))
    first.folder.mkdir()
    number = run_id(first)
    shutil.copytree(first.folder, copied.folder)
    other = run_id(copied)
    assert (run_id(first), run_id(copied)) == (number, other)
    first.folder.rename(moved.folder)
    copied.folder.rename(first.folder)
    assert (run_id(moved), run_id(first)) == (number, other)
    restored = shutil.copytree(moved.folder, tmp_path / "restored")  # from a copy, at the place where it was
    shutil.rmtree(moved.folder)
    restored.rename(moved.folder)
    assert run_id(moved) == number
    assert len({number, other}) == 2


def test_without_the_package_nothing_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train.main(arguments(changed(SETTINGS, run_dir=str(tmp_path / "mine")))) == 2
    assert capsys.readouterr().err.startswith("error: log.wandb: the package is missing: pip install wandb")
    assert not (tmp_path / "mine").exists()
