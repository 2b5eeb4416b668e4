"""What a run's parts are made with: its seed, numbers of steps and tokens, signals, and what it is known again by."""

import inspect
import json
import signal
from functools import partial

import pytest
from runs import changed
from tiny import METHODS, config

from mllm.data.dataset import training_order
from mllm.errors import UserError
from mllm.parallel.processes import RowShare
from mllm.run import build
from mllm.run.build import Run
from mllm.run.checkpoint import by_name
from mllm.run.checksum import checksums
from mllm.run.signals import Interrupted
from mllm.sampler.schedule import Usual

SEED = 7
RANDOM = {"load_task", "Sampler", "make_train_step"}
TIMED = {"make_optimizer", "make_schedule", "RunLog"}
OTHERS = {"room_that_fits", "RewardRunner", "make_evaluation"}
ROWS = RowShare(0, 1)
"""What the mesh is made to say of this process's rows; not the constant of a process that trains alone."""


@pytest.fixture(scope="module", params=["sft", "grpo"])
def built(request, tmp_path_factory):
    """A run whose data end before its steps and which validates, or one with a reference; its parts' arguments."""
    folder, given = tmp_path_factory.mktemp("built"), {}
    lines = [json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(40)]
    (folder / "train.jsonl").write_text("".join(lines))
    data = {"source": str(folder / "train.jsonl"), "epochs": 1, "validation": {"share": 0.2}}
    parts = {"data": data} if request.param == "sft" else {"grpo": {"beta": 0.1, "reference": "initial"}}
    settings = config(
        request.param,
        run_dir=str(folder / "run"),
        seed=SEED,
        eval={},
        rollout={"temperature": 0.7, "stop": ["+"]},
        **parts,
    )

    def noting(name, make):
        def made(*args, **kwargs):
            given[name] = inspect.signature(make).bind(*args, **kwargs).arguments
            return make(*args, **kwargs)

        return made

    with pytest.MonkeyPatch.context() as patch:
        for name in RANDOM | TIMED | OTHERS:
            patch.setattr(build, name, noting(name, getattr(build, name)))
        patch.setattr(RowShare, "of_mesh", lambda mesh: ROWS)
        with Run.build(settings) as run:
            run.start()
            yield run, given


@pytest.mark.slow
def test_every_random_number_depends_on_the_run_s_seed(built):
    run, given = built
    assert {name: given[name]["seed"] for name in RANDOM} == dict.fromkeys(RANDOM, SEED)
    if run.config.data:
        order = training_order(len(run.source.batches.documents), SEED, 1)
        assert [*run.source.batches.order] == [*order]
    else:
        first = training_order(len(run.task.train), SEED)[0]
        position = run.source.position()
        assert next(run.source.prompts).example == run.task.train[first]
        run.source.seek(position)
    assert run.policy.seed == SEED


def test_each_part_is_made_with_what_it_must_know_of_the_others(built):
    """Where the data end, what training holds, the temperature as a part of GRPO's policy, the longest completion."""
    run, given = built
    assert {given[name]["steps"] for name in TIMED} == {run.source.steps}
    assert (run.source.steps < run.config.steps) == (run.config.data is not None)
    assert run.sampler.room().slots > 0
    grpo, batch = run.config.grpo, run.config.batch_size
    assert given["Sampler"]["usual"] == (Usual(batch // grpo.num_generations, batch) if grpo else None)
    planned = [given["room_that_fits"][name] for name in ("policy", "rollout", "optimizer", "holds_reference")]
    assert planned == [run.policy, run.config.rollout, run.config.optimizer, grpo is not None]
    assert run.forward.head.options["temperature"] == (0.7 if grpo else 1.0)
    assert given["Sampler"]["stop_texts"] == run.policy.stop_texts == ("+",)
    assert given["RewardRunner"]["max_completion_length"] == run.config.rollout.max_completion_length
    # A run is known again by the reference of its policy.
    assert bool(run.checkpoints.frozen) == (grpo is not None)
    assert run.checkpoints.frozen == (checksums(by_name(run.fixed.reference)) if grpo else {})
    shares = [given["make_evaluation"]["rows"], run.source.rows]
    shares += [run.source.batches.share] if run.config.data else []
    assert all(share is ROWS for share in shares)


def test_processes_with_other_examples_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "gather_objects", lambda own: [own, {**own, "content": "other"}])
    settings = config("sft", run_dir=str(tmp_path / "run"), eval=None, rollout=None)
    with pytest.raises(UserError, match="the processes have different examples"), Run.build(settings):
        pass


def test_a_signal_ends_whatever_a_run_is_in_the_middle_of(built, monkeypatch):
    run, _ = built
    monkeypatch.setattr(run.interrupt, "received", signal.SIGTERM)
    validations = [partial(run.measurements.repeated[-1].measure, {}, 1)] if run.config.data else []
    for poll in (run.sampler.poll, run.rewards.poll, *validations):
        with pytest.raises(Interrupted):
            poll()


def test_the_template_of_conversations_is_checked_with_the_run_s_own_setting(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "check_turns", lambda renderer, tools, keep: asked.append(keep))
    with Run.build(changed(METHODS["turns"], run_dir=str(tmp_path / "run"), task={"keep_thoughts": True})):
        assert asked == [True]
