"""A run depends on its seed, its processes agree on the data, and a signal reaches whatever it is in the middle of."""

import signal
from functools import partial

import pytest
from runs import changed, records, run
from tiny import METHODS, config

from mllm.errors import UserError
from mllm.run import build
from mllm.run.build import Run
from mllm.run.signals import Interrupted


@pytest.mark.slow
def test_another_seed_is_another_run(tmp_path):
    """Of its first parameters, the order of its prompts, and its samples."""
    runs = [config(run_dir=str(tmp_path / str(seed)), seed=seed, steps=1, log={"samples": 8}) for seed in (7, 8)]
    assert [run(settings) for settings in runs] == [0, 0]
    one, other = ([(sample["prompt"], sample["completion"]) for sample in records(x, "samples.jsonl")] for x in runs)
    assert {prompt for prompt, _ in one} != {prompt for prompt, _ in other}
    assert {completion for _, completion in one}.isdisjoint(completion for _, completion in other if completion)


def test_processes_with_other_examples_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "gather_objects", lambda own: [own, {**own, "content": "other"}])
    settings = config("sft", run_dir=str(tmp_path / "run"), eval=None, rollout=None)
    with pytest.raises(UserError, match="the processes have different examples"), Run.build(settings):
        pass


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_signal_ends_whatever_a_run_is_in_the_middle_of(algorithm, tmp_path, monkeypatch):
    data = {"data": {"validation": {"share": 0.2}}} if algorithm == "sft" else {}
    with Run.build(config(algorithm, run_dir=str(tmp_path / "run"), eval={}, rollout={"stop": ["+"]}, **data)) as begun:
        begun.start()
        monkeypatch.setattr(begun.interrupt, "received", signal.SIGTERM)
        validations = [partial(begun.measurements.repeated[-1].measure, {}, 1)] if data else []
        for poll in (begun.sampler.poll, begun.rewards.poll, *validations):
            with pytest.raises(Interrupted):
                poll()


def test_the_template_of_conversations_is_checked_with_the_run_s_own_setting(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "check_turns", lambda renderer, tools, keep: asked.append(keep))
    with Run.build(changed(METHODS["turns"], run_dir=str(tmp_path / "run"), task={"keep_thoughts": True})):
        assert asked == [True]
