"""Several sources of examples: drawn by their weights, in one order on every resume, and counted."""

import json

import numpy as np
import pytest
from pydantic import ValidationError
from runs import assert_same_end, killed_after, records, run
from tiny import config

from mllm.config.data import DataConfig
from mllm.data.dataset import mixed_order, training_order


def write(path, letter, count):
    path.write_text("".join(json.dumps({"text": letter * 20}) + "\n" for _ in range(count)))
    return str(path)


def test_sources_take_turns_by_their_weights_and_each_is_gone_through_in_its_own_order():
    order = mixed_order((5, 40), (1.0, 3.0), seed=7)
    numbers = np.array([order[place] for place in range(400)])
    first = numbers[numbers < 5]
    assert len(first) == 100
    assert all(abs(np.count_nonzero(numbers[:n] < 5) - n / 4) <= 1 for n in range(1, 400))  # evenly spread
    assert first.tolist() == [training_order(5, 7)[place] for place in range(100)]
    own = training_order(40, 8)
    assert numbers[numbers >= 5].tolist() == [5 + own[place] for place in range(300)]


def test_a_list_of_names_or_mappings_stands_for_a_mix_and_has_no_epochs():
    given = DataConfig.model_validate({"source": ["a.jsonl", {"source": "b.jsonl", "weight": 2}], "max_length": 8})
    assert [(one.source, one.weight) for one in given.mix] == [("a.jsonl", 1.0), ("b.jsonl", 2.0)]
    assert DataConfig.model_validate(given.model_dump()) == given
    for bad in ({"epochs": 1}, {"source": ["a.jsonl"]}, {"source": ["task", "a.jsonl"]}):
        with pytest.raises(ValidationError, match=r"epochs|two sources or more"):
            DataConfig.model_validate({"source": ["a.jsonl", "b.jsonl"], "max_length": 8} | bad)


@pytest.mark.slow
def test_a_run_counts_what_it_draws_from_each_source_and_resumes_to_the_bit(tmp_path):
    sources = [{"source": write(tmp_path / "a.jsonl", "a", 30), "weight": 3}, write(tmp_path / "b.jsonl", "b", 7)]
    data = {"source": sources, "packing": False, "validation": {"share": 0.2}}
    settings = config(
        "sft", run_dir=str(tmp_path / "run"), data=data, task=None, rollout=None, eval=None, checkpoint={"every": 2}
    )
    assert run(settings) == 0
    drawn = [(line["data/a.jsonl"], line["data/b.jsonl"]) for line in records(settings) if line["step"]]
    assert drawn == [(6, 2)] * 4
    again = killed_after(settings, 2, tmp_path / "killed")
    assert run(again) == 0
    assert_same_end(again, settings)
