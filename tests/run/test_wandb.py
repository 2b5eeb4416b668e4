"""Weights & Biases gets the numbers that TensorBoard gets, and a run does not depend on it."""

import sys
from types import SimpleNamespace

import pytest
from runs import arguments, assert_same_end, changed, records, run
from tiny import config

import train

SETTINGS = config("sft", steps=4, checkpoint={"every": 2}, eval=None, rollout=None, log={"wandb": "project"})


def numbers_of(settings):
    """What metrics.jsonl and timings.jsonl say of each step."""
    found: dict[int, dict[str, float]] = {}
    for name in ("metrics.jsonl", "timings.jsonl"):
        for line in records(settings, name):
            step = line.pop("step")
            found.setdefault(step, {}).update({key: v for key, v in line.items() if isinstance(v, int | float)})
    return found


class Service:
    """A service that remembers: stands for the package, whose `init` returns it."""

    def __init__(self):
        self.begun, self.steps, self.ended, self.fails_at = [], {}, 0, None
        self.package = SimpleNamespace(init=self.init, Settings=dict)

    def init(self, **options):
        self.begun.append(options)
        self.starting_step = max(self.steps, default=-1) + 1
        return self

    def log(self, numbers, step):
        if step == self.fails_at:
            raise ConnectionError("the network is down\nmore")
        self.steps.setdefault(step, {}).update(numbers)

    def finish(self):
        self.ended += 1


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service.package)
    return service


@pytest.mark.slow
def test_a_run_sends_every_step_once_goes_on_there_and_does_not_depend_on_the_service(tmp_path, service, caplog):
    whole = changed(SETTINGS, run_dir=str(tmp_path / "whole"), log={"wandb": None})
    assert run(whole) == 0
    settings = changed(SETTINGS, run_dir=str(tmp_path / "mine"))
    assert run(changed(settings, steps=2)) == 0
    assert service.steps == numbers_of(settings)
    service.steps[3] = {"loss": 0.5}  # as if the run had been killed after a step that it does again
    service.fails_at = 4
    assert run(settings) == 0
    assert_same_end(settings, whole)  # as any run that is given more steps
    first, second = service.begun
    assert (first["id"], first["name"], first["project"]) == (second["id"], "mine", "project")
    assert second["config"] == settings.model_dump(mode="json") | {"learned": "chats"}
    before = {step: numbers for step, numbers in numbers_of(settings).items() if step < 3}
    assert service.steps == before | {3: {"loss": 0.5}}
    (warning,) = [record.getMessage() for record in caplog.records if "wandb" in record.getMessage()]
    assert warning == "log.wandb: the network is down; the run goes on without it"
    assert service.ended == 1  # the second was given up


def test_without_the_package_nothing_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train.main(arguments(changed(SETTINGS, run_dir=str(tmp_path / "mine")))) == 2
    assert capsys.readouterr().err.startswith("error: log.wandb: the package is missing: pip install wandb")
    assert not (tmp_path / "mine").exists()
