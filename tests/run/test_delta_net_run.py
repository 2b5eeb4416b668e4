"""GRPO in turns of a model with delta nets, whose sequences wait in their slots."""

import pytest
from runs import assert_same_end, changed, killed_after, records, run
from tiny import METHODS, QWEN35

from tools import generate


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [{}, pytest.param({"dtype": "bfloat16", "lora": {"rank": 2, "alpha": 2}}, marks=pytest.mark.nightly)]
)
def test_a_killed_run_ends_to_the_bit_as_if_it_had_not_been_and_its_model_answers(model, tmp_path, capsys):
    """Some turns end by stop texts, and more conversations than there are slots go on."""
    whole = changed(METHODS["turns"], run_dir=str(tmp_path / "whole"), model={"architecture": QWEN35, **model})
    assert run(whole) == 0
    assert max(line["environment/mean_turns"] for line in records(whole)) > 1
    killed = killed_after(whole, whole.steps - whole.checkpoint.every, tmp_path / "killed")
    assert run(killed) == 0
    assert_same_end(killed, whole)
    capsys.readouterr()
    assert generate.main([whole.run_dir, "1+2=", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out
