"""The section `distill`: what is learned from a teacher; and the rules of distillation."""

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from mllm.algorithms.grpo.settings import GrpoConfig, packed_rows, rollout_faults
from mllm.algorithms.sft.settings import example_faults, example_rows
from mllm.config.schema import Config, Rows, Rules
from mllm.config.section import Fault, Section

UNREWARDED = ("scale_rewards", "baseline", "dynamic_sampling", "beta", "reference")
"""Settings of `grpo` that say how rewards are learned from, which distillation only logs."""
POLICY_GRADIENT = ("epsilon", "epsilon_high", "dual_clip", "entropy_coef", "importance_sampling", "importance_cap")
"""Settings of `grpo` that belong to its objective, which the sampled estimator alone has."""


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

    label_coef: float = Field(default=0.0, ge=0)
    """How much of the cross-entropy of the labels, the tokens of given completions, is added to the divergence
    (Hinton et al. 2015, arXiv:1503.02531, section 2). Both take one pass of the head. Only with `data`."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.kind != "jsd":
            self.reject_unused(f"with kind: {self.kind}", "beta")
        if self.estimator == "sampled":
            self.reject_unused("with estimator: sampled", "kind")
        return self

    @property
    def mixture(self) -> float:
        """The teacher's share in jsd's mixture."""
        return self.beta or 0.5


class DistillRules(Rules):
    implementation = "mllm.algorithms.distill.algorithm:make_distillation"
    sections: ClassVar = {"distill": DistillConfig, "grpo": GrpoConfig}
    needs = ("distill", "teacher")

    def faults(self, config: Config) -> Iterator[Fault]:
        distill, samples = config.section(DistillConfig), samples_completions(config)
        if samples == (config.data is not None):
            yield "data", "algorithm: distill learns either from data, or from task, rollout and grpo"
        if distill.estimator == "full" and config.head.impl == "mosaic_gpu":
            yield "head.impl", "mosaic_gpu has no divergences: remove it, or take xla"
        if not samples:
            if distill.estimator == "sampled":
                yield "grpo", "distill.estimator: sampled needs this section"
            yield from example_faults(config)
            return
        if distill.label_coef:
            yield "distill.label_coef", "is for the completions of data: remove it"
        yield from config.missing("grpo under algorithm: distill", "task", "rollout")
        unused = UNREWARDED if distill.estimator == "sampled" else UNREWARDED + POLICY_GRADIENT
        because = f"by distill.estimator: {distill.estimator}"
        yield from config.unused(because, *(f"grpo.{name}" for name in unused))
        grpo = config.section(GrpoConfig)
        if distill.estimator == "full" and grpo.limits.with_one_update is not None:
            yield "grpo.loss_type", f"{grpo.loss_type} is an objective, and distill.estimator: full has its own"
        yield from rollout_faults(config)

    def rows(self, config: Config) -> Rows:
        return packed_rows(config) if samples_completions(config) else example_rows(config)


def samples_completions(config: Config) -> bool:
    """Whether the student's own completions are learned from, and not the examples of `data`."""
    return any(isinstance(section, GrpoConfig) for _, section in config)
