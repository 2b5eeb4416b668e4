"""Problems of reasoning-gym (arXiv:2505.24760; pip install reasoning-gym), and its own score as a reward.

    python train.py --config qwen25_0p5b_grpo.yaml run_dir=runs/reasoning task.name=mllm.examples.reasoning:problems \
      task.rewards='[{name: "mllm.examples.reasoning:score"}]' task.system_prompt=null task.answer_form=tags

The environment variable GYM_TASK names another generator.
"""

import json
import os
from functools import cache

NAME = os.environ.get("GYM_TASK", "chain_sum")
PROBLEMS = 10_000
INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>."


@cache
def generator(size):
    import reasoning_gym

    return reasoning_gym.create_dataset(NAME, seed=0, size=size)


def problems():
    for entry in generator(PROBLEMS):
        prompt = f"{entry['question']} {INSTRUCTION}"
        yield {"prompt": prompt, "answer": str(entry["answer"]), "entry": json.dumps(entry, default=str)}


def score(completion, entry):
    """The generator's own score from 0 to 1. It may accept several answers, and give partial credit."""
    answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return generator(1).score_answer(answer, json.loads(entry))
