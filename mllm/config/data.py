"""The section `data`: examples for SFT and distillation, and preferences for DPO."""

from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, StrictBool, model_validator

from mllm.config.section import Section, impossible

FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
Column: TypeAlias = Literal[
    *("messages", "question", "input", "answer", "prompt", "completion", "chosen", "rejected", "text", "tools")
]
"""The fields of an example; docs/data.md describes them."""


class ValidationConfig(Section):
    """The loss on examples that training never sees, at step 0, every n steps and at the end."""

    source: str | None = None
    """A file or a pattern of files, as `data.source`, or a hub id. One of `source`, `split` and `share` is needed."""
    split: str | None = None
    """Another split of the data set on the hub that `data.source` names."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """The share of the training examples that is held out: the same examples in every run on the same data. Not with
    `data.source` task."""
    every: PositiveInt | None = None
    """Steps between validations; None: only at step 0 and at the end. A multiple of the updates of a rollout."""
    patience: PositiveInt | None = None
    """End the run after this many validations in a row without a lower loss; None: never. Needs `every`."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if [self.source, self.split, self.share].count(None) != 2:
            raise impossible("source", "give one of source, split and share")
        return self


class SourceConfig(Section):
    """One of several sources of examples."""

    source: str
    """A file or a pattern of files, as `data.source`, or a hub id."""
    weight: PositiveFloat = 1.0
    """The relative number of examples from this source."""
    subset: str | None = None
    """As `data.subset`."""
    split: str = "train"
    """As `data.split`."""
    columns: dict[Column, str] | None = None
    """As `data.columns`, for this source."""


class DataConfig(Section):
    """The examples that SFT trains on; under DPO an example is a pair."""

    source: str
    """A file or a pattern of files (.jsonl, .jsonl.gz, .json, .csv, .parquet), also in a bucket (gs://); or a hub id.
    `task`: the task's solutions, and for DPO also its `rejected` completions. A list of sources, each a name or a
    mapping with a `weight`, sets `mix`."""
    mix: tuple[SourceConfig, ...] | None = None
    """Several sources, drawn by their weights in an order that the seed determines. Sources repeat, so `steps` must be
    set. None: `source` alone."""
    subset: str | None = None
    """The subset of a data set on the hub, e.g. `main`; not with files."""
    split: str = "train"
    """The split of a data set on the hub; not with files."""
    columns: dict[Column, str] | None = None
    """The column names of an example's fields. Alpaca: `{question: instruction, input: input, answer: output}`; the
    `input` is appended to the question after an empty line."""
    max_length: PositiveInt
    """Tokens in a row; a longer example is cut. Both sequences of a pair are in one row."""
    packing: StrictBool = True
    """Fill a row with several examples; they don't attend to each other."""
    shuffle: StrictBool = True
    """Shuffle the examples anew in each pass."""
    epochs: PositiveInt | None = None
    """Passes over the data; None: as many as `steps` take."""
    cache: str | None = None
    """The folder of the tokenized examples; None: mllm in $XDG_CACHE_HOME or ~/.cache. Not with source task."""
    validation: ValidationConfig | None = None
    """The examples for the validation loss; None: no validation."""

    @model_validator(mode="before")
    @classmethod
    def read_list(cls, given: Any) -> Any:
        """Move a list of sources to `mix`, and the settings of a single source to their own places."""
        if not isinstance(given, dict) or not isinstance(given.get("source"), list) or not given["source"]:
            return given
        mix = [entry if isinstance(entry, dict) else {"source": entry} for entry in given["source"]]
        if len(mix) == 1:
            return {**given, **{key: value for key, value in mix[0].items() if key != "weight"}}
        return {**given, "source": mix[0].get("source"), "mix": mix}

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.mix is not None:
            if self.epochs is not None:
                raise impossible("epochs", "a mix has no end: remove it, and set steps")
            if len(self.mix) < 2 or "task" in {entry.source for entry in self.mix}:
                raise impossible("mix", "give two sources or more, files or hub ids")
            if self.source != self.mix[0].source:
                raise impossible("source", f"{self.source} is not used with mix: give the list of sources here")
        if self.validation and self.validation.split and (self.source == "task" or names_files(self.source)):
            raise impossible("validation.split", f"is not used with source: {self.source}: give a source or a share")
        if self.validation and self.validation.share and self.source == "task":
            raise impossible("validation.share", "is not used with source: task: set eval, or give a source")
        return self


def names_files(source: str) -> bool:
    """Whether a source is a file or a pattern of files by its name, or in a bucket, and so no hub id."""
    return "://" in source or source.endswith(FILE_ENDINGS) or not {*"*?["}.isdisjoint(source)
