"""Weights & Biases gets the numbers that TensorBoard gets, and a run does not depend on it."""

import struct
import sys
import time
from types import SimpleNamespace

import pytest
from runs import arguments, changed, records, run
from tiny import config

import train
from mllm.run.metrics import RunLog

SETTINGS = config("sft", steps=6, checkpoint={"every": 2}, eval=None, rollout=None, log={"wandb": "project"})


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
    def made():
        made = Service()
        monkeypatch.setitem(sys.modules, "wandb", made.package)
        return made

    return made


def test_a_run_sends_every_step_once_goes_on_there_and_does_not_depend_on_the_service(tmp_path, service, caplog):
    whole = changed(SETTINGS, run_dir=str(tmp_path / "whole"), log={"wandb": None})
    assert run(whole) == 0
    settings = changed(SETTINGS, run_dir=str(tmp_path / "mine"))
    assert run(changed(settings, steps=2, log={"wandb": None})) == 0
    there = service()
    assert run(changed(settings, steps=4)) == 0
    assert there.steps == numbers_of(settings)  # what was done before it, too
    there.steps[5] = {"loss": 0.5}  # as if the run had been killed after a step that it does again
    there.fails_at = 6
    assert run(settings) == 0
    assert records(settings) == records(whole)
    first, second = there.begun
    assert (first["id"], first["name"], first["project"]) == (second["id"], "mine", "project")
    assert second["config"] == settings.model_dump(mode="json")
    assert there.steps == {step: numbers for step, numbers in numbers_of(settings).items() if step < 5} | {
        5: {"loss": 0.5}
    }
    (warning,) = [record.getMessage() for record in caplog.records if "wandb" in record.getMessage()]
    assert warning == "log.wandb: the network is down; the run goes on without it"
    assert there.ended == 1  # the second was given up


def test_without_the_package_nothing_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train.main(arguments(changed(SETTINGS, run_dir=str(tmp_path / "mine")))) == 2
    assert capsys.readouterr().err.startswith("error: log.wandb: the package is missing: pip install wandb")
    assert not (tmp_path / "mine").exists()


def test_the_package_itself_writes_the_same_numbers_when_it_is_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = changed(SETTINGS, run_dir=str(tmp_path / "mine"))
    for last in (2, 4):
        log = RunLog(tmp_path / "mine", last - 2, 4, settings)
        for step in (last - 1, last):
            log.write(step, {"loss": 1 / step, "reward": float("nan")})
            log.write_timings(step, {"tokens_per_second": 5.0}, {})
        log.close()
        time.sleep(1)  # the package names a start's folder by the second
    files = sorted(tmp_path.glob("mine/wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1  # one id
    sent: dict[int, dict[str, str]] = {}
    for data in leveldb_records(files[-1].read_bytes()):
        if items := {"".join([i.key, *i.nested_key]): i.value_json for i in Record.FromString(data).history.item}:
            sent[int(items["_step"])] = items
    assert {step: float(items["loss"]) for step, items in sent.items()} == {s: 1 / s for s in (1, 2, 3, 4)}
    assert {items["tokens_per_second"] for items in sent.values()} == {"5"}


def leveldb_records(content: bytes):
    """The records of a file in the format of LevelDB's log, after a header of 7 bytes."""
    place, data = 7, b""
    while place + 7 <= len(content):
        if (rest := 32768 - place % 32768) < 7:
            place += rest
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield data
            data = b""
