"""The table of algorithms: an algorithm added in one file trains and is planned like the built-in algorithms."""

from pathlib import Path

import pytest
from reinforce import ReinforceRun, make
from runs import records, run
from tiny import config

from mllm.algorithms.recipes import MAKERS
from mllm.algorithms.table import RUNS
from mllm.config import load as configs
from mllm.errors import UserError
from mllm.parallel.mesh import make_mesh
from mllm.plan.programs import Programs

SECTIONS = {"eval": None, "grpo": {"num_generations": 2}, "reinforce": {"reward_scale": 2.0}}


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setitem(RUNS, "reinforce", ReinforceRun)
    monkeypatch.setitem(MAKERS, ReinforceRun, make)


@pytest.mark.slow
def test_an_algorithm_that_one_file_adds_trains(added, tmp_path):
    rewards = [{"name": "user_rewards:even_characters"}]
    settings = config("reinforce", run_dir=str(tmp_path / "run"), steps=1, task={"rewards": rewards}, **SECTIONS)
    assert run(settings) == 0
    samples = records(settings, "samples.jsonl")
    assert [line["advantage"] for line in samples] == [2 * line["reward"] for line in samples]
    assert records(settings)[-1]["grad_norm"] > 0


def test_plan_and_schema_know_a_new_algorithm(added):
    settings = config("reinforce", **SECTIONS)
    batch = Programs(settings, make_mesh(settings.mesh)).batch(8)
    assert batch.inputs.advantages.shape == (8, settings.batch_shape.length)
    given = config("sft").model_dump(mode="json") | {"reinforce": {}}
    with pytest.raises(UserError, match="reinforce: unknown setting of algorithm: sft; it is for reinforce"):
        configs.validate(given, Path("run.yaml"))
