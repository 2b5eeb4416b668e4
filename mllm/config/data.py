"""The section `data`: the examples that SFT learns from."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from mllm.config.section import Section


class DataConfig(Section):
    """The examples that SFT trains on."""

    source: str
    """A file or a pattern of files (.jsonl, .jsonl.gz, .parquet), a hub id, or `task`: the task's own solutions."""
    subset: str | None = None
    """The subset of a data set on the hub, e.g. `main`."""
    split: str = "train"
    """The split of a data set on the hub."""
    max_length: PositiveInt
    """Tokens in a row; a longer example is cut there."""
    packing: bool = True
    """Fill a row with several examples; they don't attend to each other."""
    shuffle: bool = True
    epochs: PositiveInt | None = None
    """Passes over the data; None: as many as `steps` take."""
    on_bad_line: Literal["error", "skip"] = "error"
    """What to do with lines that are no examples: list all in one error, or leave them out and count them."""
    prefetch: int = Field(default=2, ge=0)
    """Batches that are made ahead of the step that reads them."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.source == "task" or names_files(self.source):
            self.reject_unused(f"with source: {self.source}", "subset", "split")
        if self.source == "task":
            self.reject_unused("with source: task", "on_bad_line")
        return self


def names_files(source: str) -> bool:
    """Whether a source is a file or a pattern of files by its name, and so no hub id."""
    return source.endswith((".jsonl", ".jsonl.gz", ".parquet")) or not {*"*?["}.isdisjoint(source)
