"""A run on a user's own file of problems: what can't be used is counted, and it goes on with the same problems only."""

import json

from runs import assert_same_end, changed, killed_after, records, run
from tiny import config


def test_long_prompts_are_counted_exactly_over_a_resume_which_other_problems_refuse(tmp_path, capsys):
    problems = tmp_path / "problems.jsonl"
    lines = [{"prompt": f"{a}+{a}=" + "?" * 30 * (a % 3 == 0), "answer": 2 * a} for a in range(12)]
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {"name": "jsonl", "train": str(problems), "heldout": None}
    whole = config(run_dir=str(tmp_path / "whole"), steps=8, task=task, checkpoint={"every": 3, "keep": 3})
    assert run(whole) == 0
    stopped = killed_after(whole, 3, tmp_path / "stopped")
    assert run(stopped) == 0
    assert_same_end(stopped, whole)
    skipped = [line["prompts_skipped"] for line in records(whole)]
    assert skipped == sorted(skipped)
    assert skipped[-1] >= 3  # 16 prompts of 8 steps are at least an epoch, and 3 or 4 of 11 are long

    assert run(changed(whole, run_dir=str(tmp_path / "evaluated"), eval={"prompts": 2})) == 2
    assert "eval.prompts: only 1 problems are held out (task.heldout)" in capsys.readouterr().err
    problems.write_text(problems.read_text().replace('"answer": 16', '"answer": 17'))
    assert run(changed(stopped, steps=9)) == 2
    assert "data: the run began with other examples" in capsys.readouterr().err
