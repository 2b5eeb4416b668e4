"""The parts of a run: its seed, numbers of steps and tokens, signals, and the facts that a resume compares."""

import signal
from functools import partial

import pytest
from runs import changed, write_lines
from tiny import METHODS, SUMS, config

from mllm.data.dataset import training_order
from mllm.errors import UserError
from mllm.parallel.processes import RowShare
from mllm.run import build
from mllm.run.build import Run
from mllm.run.checkpoint import by_name
from mllm.run.checksum import checksums
from mllm.run.signals import Interrupted
from mllm.sampler.schedule import TypicalBatch

SEED = 7
ROWS = RowShare(0, 1)
"""The rows of this process by a patched mesh. A process that trains alone has a constant instead."""


@pytest.fixture(scope="module", params=["sft", "grpo"])
def built(request, tmp_path_factory):
    """A run that validates and has too few data for its steps, or a run with a reference."""
    folder = tmp_path_factory.mktemp("built")
    data = {
        "source": write_lines(folder / "train.jsonl", SUMS),
        "max_length": 16,
        "epochs": 1,
        "validation": {"share": 0.2},
    }
    parts = {"data": data} if request.param == "sft" else {"grpo": {"beta": 0.1, "reference": "initial"}}
    settings = config(
        request.param,
        run_dir=str(folder / "run"),
        seed=SEED,
        eval={},
        rollout={"temperature": 0.7, "stop": ["+"]},
        **parts,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowShare, "of_mesh", lambda mesh: ROWS)
        with Run.build(settings) as run:
            run.start()
            yield run


@pytest.mark.slow
def test_every_random_number_depends_on_the_run_s_seed(built):
    if built.config.examples:
        order = training_order(len(built.source.batches.documents), SEED, 1)
        assert [*built.source.batches.order] == [*order]
    else:
        first = training_order(len(built.task.train), SEED)[0]
        position = built.source.position()
        assert next(built.source.prompts).example == built.task.train[first]
        built.source.seek(position)
    assert built.policy.seed == built.sampling.sampler.seed == SEED


def test_build_connects_the_parts_of_a_run(built):
    """The end of the data, the memory of training, the temperature in GRPO's policy, the rows of a process."""
    grpo = None if built.config.examples else built.config.grpo
    batch, sampler = built.config.batch_size, built.sampling.sampler
    assert (built.source.steps < built.config.steps) == (grpo is None)
    assert sampler.typical == (TypicalBatch(batch // grpo.num_generations, batch) if grpo else None)
    assert built.forward.head.options["temperature"] == (0.7 if grpo else 1.0)
    assert sampler.stop_texts == built.policy.stop_texts == ("+",)
    assert sampler.stop_ids == built.policy.stop_ids
    assert ord("+") in sampler.stop_ids
    # A run is known again by the reference of its policy.
    assert built.checkpoints.frozen == (checksums(by_name(built.frozen_models.reference)) if grpo else {})
    examples = [] if grpo else [built.source.batches, built.source.heldout]
    assert all(share is ROWS for share in [built.source.rows, *(rows.share for rows in examples)])


def test_the_test_set_is_measured_at_the_end_under_its_own_name(tmp_path, monkeypatch):
    def make_evaluation(options, task, problems, prefix="eval/", *, rows, **_):
        assert rows is ROWS
        return lambda params, step: {prefix: problems}

    monkeypatch.setattr(build, "make_evaluation", make_evaluation)
    monkeypatch.setattr(RowShare, "of_mesh", lambda mesh: ROWS)
    lines = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    files = {"train": lines[:10], "test": lines[10:]}
    files = {name: write_lines(tmp_path / f"{name}.jsonl", part) for name, part in files.items()}
    task = {"name": "jsonl", **files, "heldout": 2}
    settings = config("grpo", run_dir=str(tmp_path / "run"), eval={"test": True, "every": 7}, task=task)
    with Run.build(settings) as run:
        (repeated,), (at_end,) = run.measurements.repeated, run.measurements.at_end
        assert (repeated.measure({}, 1), repeated.every) == ({"eval/": run.task.heldout}, 7)
        assert at_end({}, 1) == {"test/": run.task.test}


def test_processes_with_other_examples_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "gather_objects", lambda own: [own, {**own, "content": "other"}])
    settings = config("sft", run_dir=str(tmp_path / "run"), eval=None, rollout=None)
    with pytest.raises(UserError, match="the processes have different examples"), Run.build(settings):
        pass


def test_a_signal_ends_rollouts_rewards_and_validation(built, monkeypatch):
    monkeypatch.setattr(built.interrupt, "received", signal.SIGTERM)
    validations = [partial(built.measurements.repeated[-1].measure, {}, 1)] if built.config.examples else []
    for poll in (built.sampling.sampler.poll, built.sampling.rewards.poll, *validations):
        with pytest.raises(Interrupted):
            poll()


def test_the_template_of_a_run_in_turns_is_checked(tmp_path, monkeypatch):
    def refuse(renderer, tools):
        raise UserError(f"refused with {tools}")

    monkeypatch.setattr(build, "check_turns", refuse)
    with (
        pytest.raises(UserError, match="refused with"),
        Run.build(changed(METHODS["turns"], run_dir=str(tmp_path / "run"))),
    ):
        pass
