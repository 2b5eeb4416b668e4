"""The settings of distillation: over the examples of `data`, or over the student's own completions."""

from abc import ABC
from typing import Literal, Self

from pydantic import Field, model_validator

from mllm.algorithms.grpo.settings import RolloutRun
from mllm.config.run import ExampleRun, RunConfig
from mllm.config.section import Section, impossible
from mllm.config.teacher import TeacherConfig


class DivergenceConfig(Section):
    """The divergence from the teacher; docs/training.md has formulas and papers."""

    kind: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """The divergence at each token: KL(student || teacher), KL(teacher || student), or the generalised Jensen-Shannon
    divergence."""
    beta: float | None = Field(default=None, gt=0, lt=1)
    """The teacher's share in jsd's mixture; None: 0.5. Only with kind jsd."""

    @property
    def mixture(self) -> float:
        """The teacher's share in jsd's mixture."""
        return self.beta or 0.5


class DistillConfig(DivergenceConfig):
    """Distillation of a teacher over the examples of `data`; docs/training.md has formulas and papers."""

    label_coef: float = Field(default=0.0, ge=0)
    """Weight of the labels' cross-entropy, added to the divergence in the same pass of the head (Hinton et al. 2015,
    arXiv:1503.02531, section 2)."""


class OwnDistillConfig(DivergenceConfig):
    """Distillation of a teacher over the student's own completions; docs/training.md has formulas and papers."""

    estimator: Literal["full", "sampled"] = "full"
    """`full`: the divergence over the whole vocabulary. `sampled`: the objective of `grpo` with each sampled token's
    advantage log p_teacher - log p_sampler, an estimate of reverse_kl's gradient."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.estimator == "sampled" and self.kind != "reverse_kl":
            raise impossible("kind", f"sampled estimates reverse_kl, not {self.kind}: set estimator=full")
        return self


class TaughtRun(RunConfig, ABC):
    """The settings of a run that learns from a teacher."""

    algorithm: Literal["distill"]
    teacher: TeacherConfig
    """The frozen model that the student is trained on."""

    @property
    def frozen_teacher(self) -> TeacherConfig:
        return self.teacher

    @property
    def over_vocabulary(self) -> bool:
        """Whether the divergence is computed over the whole vocabulary."""
        return True

    @model_validator(mode="after")
    def check_head(self) -> Self:
        if self.over_vocabulary and self.head.impl == "mosaic_gpu":
            raise impossible("head.impl", "mosaic_gpu has no divergences: remove it, or take xla")
        return self


class DistillRun(TaughtRun, ExampleRun):
    """Distillation of a teacher over the examples of `data`."""

    distill: DistillConfig = DistillConfig()
    """The divergence, and how much the labels count."""


class OwnDistillRun(TaughtRun, RolloutRun):
    """Distillation of a teacher over the student's own completions of a task's problems."""

    distill: OwnDistillConfig = OwnDistillConfig()
    """The divergence, and how it is estimated."""

    @property
    def over_vocabulary(self) -> bool:
        return self.distill.estimator == "full"

    @model_validator(mode="after")
    def check_objective(self) -> Self:
        if self.grpo.beta > 0:
            raise impossible("grpo.beta", "distillation has no reference policy, only the teacher: remove it")
        if self.grpo.dynamic_sampling > 1:
            raise impossible("grpo.dynamic_sampling", "distillation compares no rewards: remove it")
        return self
