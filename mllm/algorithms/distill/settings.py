"""The sections `teacher` and `distill`: the model that is learned from, and what is learned from it."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mllm.config.model import ModelConfig
from mllm.config.section import Section, impossible


class TeacherConfig(Section):
    """A second model, which is frozen. Its tokenizer must have the student's tokens, with the same ids."""

    source: str
    """A folder in Hugging Face's layout or the `run_dir` of another run, both also in a bucket, or a hub id."""
    step: int | str | None = None
    """The checkpoint of the run that is the source, as `model.step`."""
    revision: str | None = None
    """The commit or branch of a hub id, as `model.revision`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The dtype of its parameters, activations and products."""

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
            remat="none",
            attention=student.attention,
        )


class DistillConfig(Section):
    """What is learned from a teacher; docs/training.md has formulas and papers. With `grpo` the student's own
    completions are learned from, with `data` given ones."""

    kind: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """The divergence of both models' distributions at each token: KL(student || teacher), KL(teacher || student), or
    the generalised Jensen-Shannon divergence."""
    beta: float | None = Field(default=None, gt=0, lt=1)
    """The teacher's share in jsd's mixture; None: 0.5. Only with kind jsd."""
    estimator: Literal["full", "sampled"] = "full"
    """The divergence over the whole vocabulary, or the policy gradient of the sampled token with the advantage log
    teacher - log student, by the objective of `grpo`, which is reverse_kl and needs `grpo`."""
    data_share: float | None = Field(default=None, gt=0, lt=1)
    """The share of rollouts in place of which `data` is learned from; needed with `grpo` and `data`, and only then."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.kind != "jsd":
            self.reject_unused(f"with kind: {self.kind}", "beta")
        if self.estimator == "sampled":
            self.reject_unused("with estimator: sampled", "kind", "data_share")
        return self

    @property
    def mixture(self) -> float:
        """The teacher's share in jsd's mixture."""
        return self.beta or 0.5
