"""tools/rewards.py: rewards for right, empty and given completions, without a model."""

import json
import subprocess
import sys

import pytest
from runs import environment
from templates import PUBLIC
from tiny import config

from mllm.config.load import dump
from tools import rewards

REWARDS = """
def share(completion, length, truncated, log_metric, log_extra):
    log_metric("length", length)
    log_extra("cut", str(truncated))
    return 1 / len(completion)
"""
TASK = {
    "name": "jsonl",
    "train": "problems.jsonl",
    "heldout": 1,
    "answer_form": "hashes",
    "rewards": [{"name": "rewards:share"}, {"name": "exact_match", "weight": 2}],
}


@pytest.fixture
def tried(tmp_path, monkeypatch, capsys):
    """A function that calls the tool, with a file of samples or without, and returns exit code, output and error."""
    model = {"init": "pretrained", "architecture": None, "source": "./absent"}
    (tmp_path / "config.yaml").write_text(dump(config(model=model, task=TASK)))
    (tmp_path / "rewards.py").write_text(REWARDS)
    problems = [{"prompt": f"{n}+{n}=", "answer": 2 * n} for n in (1, 2, 3)]
    (tmp_path / "problems.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in problems))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)  # that of docs/examples, if another test has imported it
    monkeypatch.syspath_prepend(tmp_path)  # other tests have named folders with a rewards.py

    def tried(samples=None, *settings):
        (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples or ()))
        code = rewards.main(["config.yaml", *(["samples.jsonl"] if samples is not None else []), *settings])
        return code, *capsys.readouterr()

    return tried


def test_no_samples_means_right_and_empty_answers(tried, caplog):
    code, printed, _ = tried()
    blocks = printed.split("\n\n")
    for right, empty in zip(blocks[0:4:2], blocks[1:4:2], strict=True):
        prompt, completion, *given = right.splitlines()
        assert completion.split(maxsplit=1)[1] == f"#### {2 * int(prompt.split()[1][0])}"
        share = ["share", "0.167", "length:", "4.0", "cut:", "True"]
        assert [line.split() for line in given] == [share, ["exact_match", "1.000"], ["reward", "2.167"]]
        assert "raised ZeroDivisionError: division by zero (rewards.py:5)  length: 1.0  cut: False" in empty
    assert dict(map(str.split, blocks[4].splitlines())) == {
        "rewards/share/length": "2.5",
        "rewards/share/mean": "0.167",
        "rewards/share/std": "0",
        "rewards/share/raised": "2",
        "rewards/exact_match/mean": "0.5",
        "rewards/exact_match/std": "0.5",
    }
    assert code == 1
    assert "length and completion_ids are those of the text's bytes: model.source: ./absent: no such" in caplog.text


def test_all_problems_are_answered_where_a_run_holds_none_out(tried, tmp_path):
    (tmp_path / "config.yaml").write_text(dump(config(task={"name": "jsonl", "train": "one.jsonl", "heldout": None})))
    (tmp_path / "one.jsonl").write_text('{"prompt": "7+7=", "answer": 14}')
    code, printed, _ = tried()
    assert code == 0
    assert "7+7=" in printed


@pytest.mark.nightly
@pytest.mark.usefixtures("tried")
def test_the_user_s_module_may_be_called_as_the_tool_is():
    command = [sys.executable, rewards.__file__, "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert (done.returncode, "rewards/share/mean" in done.stdout) == (1, True)


def test_run_samples_are_scored_by_the_problems_of_their_prompts(tried):
    of_a_run = {"step": 3, "prompt": "3+3=", "completion": "#### 6", "rewards": {}, "advantage": None}
    code, printed, _ = tried([of_a_run, {"prompt": "1+1=", "completion": "3\x1b"}])
    assert code == 0
    assert [line.split()[1] for line in printed.splitlines() if line.startswith(("prompt", "exact", "reward "))] == [
        *("3+3=", "1.000", "2.167"),
        *("1+1=", "0.000", "0.500"),
    ]
    assert "3\\x1b" in printed
    right, wrong = ({"prompt": "1+1=", "completion": completion} for completion in ("#### 2", "2"))
    _, printed, _ = tried([right] * 6 + [wrong] * 3)
    assert printed.count("prompt") == 8
    assert "the first 8 of 9 completions; of all:\n" in printed
    assert ["rewards/exact_match/mean", "0.667"] in map(str.split, printed.splitlines())


def test_overrides_apply_and_an_environment_alone_is_an_error(tried):
    code, output, _ = tried([{"prompt": "3+3=", "completion": "6"}], "task.rewards=[{name: format}]")
    assert (code, "rewards/format/mean" in output, "exact_match" in output) == (0, True, False)
    code, _, error = tried(None, "task.rewards=[]", "task.environment=rewards:Game", "rollout.max_turns=2")
    assert (code, error.startswith("error: task.environment: its reward is given in a conversation")) == (2, True)


def test_bad_samples_are_one_line_errors(tried):
    for sample, message in (
        ({"prompt": "4+4=", "completion": "8"}, "samples.jsonl: task jsonl has no problem with the prompt '4+4=':"),
        ({"prompt": "1+1=", "text": "8"}, "SAMPLES.jsonl: completion must be a string (samples.jsonl:1); the fields"),
    ):
        code, _, error = tried([sample])
        assert (code, error.count("\n")) == (2, 1)
        assert error.startswith(f"error: {message}")


def test_the_tool_knows_that_the_prompt_has_opened_a_thought(tried, monkeypatch):
    tokenizer = PUBLIC["qwen3.5"].tokenizer()
    monkeypatch.setattr(rewards, "tokenizer_of", lambda model: tokenizer)
    samples = [{"prompt": "1+1=", "completion": "Two.</think><answer>2</answer>"}]
    for mean, settings in ((1, []), (0, ["task.template_args={enable_thinking: false}"])):
        _, printed, _ = tried(samples, "task.rewards=[{name: format}]", *settings)
        assert ["rewards/format/mean", str(mean)] in map(str.split, printed.splitlines())
