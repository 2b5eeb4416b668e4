"""How a completion states its answer; no part of the settings' schema, which processes of rewards start without."""

from typing import Literal

AnswerForm = Literal["whole", "hashes", "tags", "boxed"]
"""As a whole, as `#### N`, in `<answer>` tags, or in `\\boxed{}`: see mllm/data/tasks/answers.py."""
