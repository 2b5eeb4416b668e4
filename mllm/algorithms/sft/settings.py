"""The rules of SFT, and of all that learns from `data`; it has no section of its own."""

from collections.abc import Iterator

from mllm.config.schema import Config, Rows, Rules
from mllm.config.section import Fault


class SftRules(Rules):
    implementation = "mllm.algorithms.sft.algorithm:Sft"
    needs = ("data",)
    unused = ("teacher",)

    def faults(self, config: Config) -> Iterator[Fault]:
        return example_faults(config)

    def rows(self, config: Config) -> Rows:
        return example_rows(config)


def example_rows(config: Config) -> Rows:
    """The rows of an update that learns from `data`."""
    assert config.data is not None
    return Rows(config.data.max_length, config.micro_batch_size or config.batch_size, config.batch_size, config.shards)


def example_faults(config: Config) -> Iterator[Fault]:
    """Settings that can't work, or have no effect, where `data` is learned from."""
    assert config.data is not None
    if config.log.samples is not None:
        yield "log.samples", f"is not used by algorithm: {config.algorithm}: remove it"
    if config.data.source == "task":
        yield from config.missing("data.source: task", "task")
    elif config.eval is None:
        yield from config.unused("without an eval section", "task")
    if config.eval is None:
        yield from config.unused("without an eval section", "rollout")
    micro = config.micro_batch_size or config.batch_size
    if config.batch_size % micro:  # under GRPO a row is not a sequence
        yield "batch_size", f"{config.batch_size} is not divisible by micro_batch_size ({micro})"
