"""The section `teacher`: a second, frozen model that is learned from."""

from typing import Literal, Self

from pydantic import model_validator

from mllm.config.model import ModelConfig
from mllm.config.section import Section, impossible


class TeacherConfig(Section):
    """A second model, which is frozen. Its tokenizer must have the student's tokens, with the same ids."""

    source: str
    """A folder in Hugging Face's layout or another run's `run_dir`, both also in a bucket, or a hub id."""
    step: int | str | None = None
    """The checkpoint, if the source is a run; as `model.step`."""
    revision: str | None = None
    """The commit or branch of a hub id, as `model.revision`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The dtype of the teacher's parameters, activations and products."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if isinstance(self.step, str) and self.step not in ("newest", "best"):
            raise impossible("step", f"{self.step!r} is none of newest, best and the number of a step")
        return self

    def model(self, student: ModelConfig) -> ModelConfig:
        """The model's settings; attention is the student's."""
        return ModelConfig(
            source=self.source,
            step=self.step,
            revision=self.revision,
            dtype=self.dtype,
            param_dtype=self.dtype,
            attention=student.attention,
        )
