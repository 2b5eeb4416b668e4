"""How a completion states its answer. A module of its own, so that reward processes need not import the schema."""

from typing import Literal

AnswerForm = Literal["whole", "hashes", "tags", "boxed"]
"""As a whole, as `#### N`, in `<answer>` tags, or in `\\boxed{}`: see mllm/data/tasks/answers.py."""
