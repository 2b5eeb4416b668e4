"""The settings of SFT."""

from typing import Literal

from mllm.config.run import ExampleRun


class SftRun(ExampleRun):
    """Supervised fine-tuning on the examples of `data`."""

    algorithm: Literal["sft"]
