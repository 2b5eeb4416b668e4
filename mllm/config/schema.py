"""The schema of a run: every section, and what settings may not be combined with each other.

Keys that are unknown, settings that nothing would read, and values that can't work are errors before anything is
compiled or written. Names follow TRL's where it has one. `load.py` reads and writes configurations. All files of this
room import nothing heavy, so that an error of the configuration does not wait for JAX.
"""

import math
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, model_validator

from mllm.algorithms.distill.settings import DistillConfig, TeacherConfig
from mllm.algorithms.dpo.settings import DpoConfig
from mllm.algorithms.grpo.settings import GrpoConfig
from mllm.config.data import DataConfig
from mllm.config.model import HeadConfig, MeshConfig, ModelConfig, OptimizerConfig
from mllm.config.rollout import RolloutConfig
from mllm.config.section import Section, impossible
from mllm.config.task import ENVIRONMENT, ChatTemplate, EvalConfig, TaskConfig


class CheckpointConfig(Section):
    """What is saved, and when."""

    every: PositiveInt | None = None
    """Steps between checkpoints; None: only one at the end. A multiple of the updates of a rollout."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_best: bool = False
    """Keep the best checkpoint, too: by `validation/loss` if the run validates, else by `eval/greedy_accuracy`. Needs
    `eval` or `data.validation`, whose `every` is a multiple of `checkpoint.every`."""

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0


class LogConfig(Section):
    """What GRPO logs besides the metrics."""

    samples: int | None = Field(default=None, ge=0)
    """How many completions of each step are written to samples.jsonl; None: all. Only for grpo."""
    wandb: str | None = Field(default=None, pattern=r"^[^/\\#?%:]{1,128}$")
    """The project of Weights & Biases to which metrics and timings are sent, too; None: nothing is sent."""


class Change(Section):
    """A setting that `--change` has changed in the course of a run."""

    step: int
    """The last step with the old value."""
    key: str
    """The setting, with dots."""
    old: Any
    new: Any


UNREWARDED = ("scale_rewards", "dynamic_sampling", "teacher_coef", "beta", "reference")
"""Settings of `grpo` that say how rewards are learned from, which distillation only logs."""
POLICY_GRADIENT = ("epsilon", "epsilon_high", "dual_clip", "entropy_coef", "importance_sampling", "importance_cap")
"""Those of its objective."""


class Rows(NamedTuple):
    """The shape of an update's batch. The arrays have room for the worst packing; only rows with tokens cost time."""

    length: int
    """Tokens in a row."""
    micro: int
    """Rows in one forward and backward pass."""
    total: int
    """Rows of the arrays: whole micro-batches."""
    shards: int
    """The devices' shares of the rows of every micro-batch."""


class Config(Section):
    """The settings of a run; its sections follow."""

    algorithm: Literal["sft", "grpo", "dpo", "distill"]
    """Supervised fine-tuning, group relative policy optimization, direct preference optimization and its kin, or
    distillation of a teacher."""
    run_dir: str
    """The folder of the run, which is new or holds this run, which then resumes; also gs://bucket/path."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """What every random number is made from."""
    steps: PositiveInt | None = None
    """How often the parameters are updated; None: as often as `data.epochs` passes over the data have batches. Under
    GRPO a multiple of the updates of a rollout, `grpo.updates_per_generation` * `grpo.num_iterations`."""
    batch_size: PositiveInt
    """Sequences in each update; under SFT and DPO rows, which hold several examples or pairs. Under GRPO
    `num_generations` of them share a prompt, and a rollout has `grpo.updates_per_generation` times as many. A multiple
    of `num_generations`, and of `mesh.dp` * `mesh.fsdp`."""
    micro_batch_size: PositiveInt | None = None
    """Rows in one forward and backward pass; None: the whole batch, or under GRPO, whose packed rows vary in number, a
    sixteenth of the most rows. The gradient does not depend on it. A multiple of `mesh.dp` * `mesh.fsdp`; under SFT and
    DPO it divides `batch_size`."""
    model: ModelConfig
    """What is trained."""
    chat_template: ChatTemplate = "auto"
    """When the model's chat template renders data, tasks and evaluation: `always`, `never`, or `auto`: messages, and a
    task's texts unless the model has learned texts. docs/training.md has the details."""
    head: HeadConfig = HeadConfig()
    """How the loss is computed from hidden states."""
    optimizer: OptimizerConfig
    """How the parameters are updated."""
    mesh: MeshConfig = MeshConfig()
    """The devices."""
    data: DataConfig | None = None
    """Examples, or preferences; sft and dpo need it, and grpo does not use it. distill learns from it, from `grpo`, or
    from both."""
    task: TaskConfig | None = None
    """Problems with rewards; grpo and `eval` need it."""
    rollout: RolloutConfig | None = None
    """How completions are sampled; grpo and `eval` need it."""
    grpo: GrpoConfig | None = None
    """What is learned from completions; grpo needs it, sft and dpo do not use it. Under distill it says how the
    student's completions are grouped, weighted and packed."""
    dpo: DpoConfig | None = None
    """What is learned from preferences; only dpo uses it, and needs it."""
    teacher: TeacherConfig | None = None
    """The model that distill, and grpo with `grpo.teacher_coef`, learn from."""
    distill: DistillConfig | None = None
    """What is learned from the teacher; distill needs it, and no other algorithm uses it."""
    eval: EvalConfig | None = None
    """Completions of problems that are held out; needs `task` and `rollout`."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved, and when."""
    log: LogConfig = LogConfig()
    """What is logged besides the metrics."""
    changes: tuple[Change, ...] = ()
    """What `--change` has changed so far: a record in the run's config.yaml, which nothing reads elsewhere."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.algorithm == "grpo":
            self.check_grpo()
        elif self.algorithm == "distill":
            self.check_distill()
        else:
            self.check_data()
        self.check_evaluation()
        self.check_turns()
        shards = self.mesh.dp * self.mesh.fsdp
        for key, rows in (("batch_size", self.batch_size), ("micro_batch_size", self.micro_batch_size or 0)):
            if rows % shards:
                raise impossible(key, f"{rows} is not divisible by mesh.dp * mesh.fsdp ({shards})")
        if self.steps is None and (self.data is None or self.data.epochs is None):
            raise impossible("steps", "this setting is required" + ", or data.epochs" * (self.grpo is None))
        if self.optimizer.moment_dtype == self.model.param_dtype:
            raise impossible("optimizer.moment_dtype", "has no effect with model.param_dtype: bfloat16: remove it")
        if self.steps is not None and self.optimizer.warmup_steps > self.steps:
            raise impossible("optimizer.warmup_steps", f"longer than the run ({self.steps} steps)")
        return self

    @property
    def rows(self) -> Rows:
        """The shape of an update's batch."""
        shards = self.mesh.dp * self.mesh.fsdp
        if self.grpo is None:
            assert self.data is not None
            return Rows(self.data.max_length, self.micro_batch_size or self.batch_size, self.batch_size, shards)
        assert self.rollout is not None
        longest = self.rollout.total_length
        length = max(self.grpo.row_length or longest, self.data.max_length if self.data else 0)
        # First-fit opens a row only when the others are too full: all but the last hold at least length // longest.
        most = math.ceil(self.batch_size / (length // longest))
        micro = self.micro_batch_size or math.ceil(most / (16 * shards)) * shards
        if self.data is not None:  # whose batches have batch_size rows
            micro = math.gcd(micro, self.batch_size)
        return Rows(length, micro, math.ceil(most / micro) * micro, shards)

    @property
    def teacher_in_update(self) -> bool:
        """Whether an update computes the teacher's distributions."""
        return bool(self.teacher and self.distill and self.distill.estimator == "full")

    def need(self, because: str, *names: str) -> None:
        """Raise for the first of the sections `names` that is missing."""
        for name in names:
            if getattr(self, name) is None:
                raise impossible(name, f"{because} needs this section")

    def check_grpo(self) -> None:
        """Raise if a setting can't work, or has no effect, under GRPO."""
        self.need("algorithm: grpo", "task", "rollout", "grpo")
        assert self.grpo is not None
        self.reject_unused("by algorithm: grpo", "data", "dpo", "distill")
        if self.grpo.num_generations < 2:
            raise impossible("grpo.num_generations", "1 leaves nothing to compare a reward with: 2 or more")
        if self.grpo.teacher_coef:
            self.need("grpo.teacher_coef", "teacher")
        else:
            self.reject_unused("with grpo.teacher_coef: 0", "teacher")
        self.check_rollouts()

    def check_rollouts(self) -> None:
        """The same of all that samples completions to learn from."""
        assert self.grpo and self.rollout  # noqa: PT018
        longest = self.rollout.total_length
        if self.grpo.row_length is not None and self.grpo.row_length < longest:
            what = "max_prompt_length + max_completion_length" if self.rollout.turns == 1 else "max_total_length"
            raise impossible("grpo.row_length", f"{self.grpo.row_length} is less than rollout.{what} ({longest})")
        if self.grpo.takes_sequences and self.head.workspace_mib is not None:
            whole = "grpo.loss_type: gspo, nor where one update takes the importance weights of whole completions"
            raise impossible("head.workspace_mib", f"is not used with {whole}: remove it")
        if (name := self.grpo.filter_by) is not None and self.task:
            known = [*(reward.name for reward in self.task.rewards), *[ENVIRONMENT] * self.task.converses]
            if name not in known:
                raise impossible("grpo.filter_by", f"{name} is none of task.rewards ({', '.join(known)})")
        group, updates = self.grpo.num_generations, self.grpo.updates_per_rollout
        if self.batch_size % group:
            raise impossible("batch_size", f"{self.batch_size} is not divisible by grpo.num_generations ({group})")
        # A signal in an evaluation ends the run, and only between two rollouts can it be saved.
        validation = self.data and self.data.validation
        every = {"checkpoint": self.checkpoint, "eval": self.eval, "data.validation": validation}
        for key, steps in {"steps": self.steps, **{f"{key}.every": x and x.every for key, x in every.items()}}.items():
            if steps and steps % updates:
                product = f"grpo.updates_per_generation * num_iterations ({updates})"
                raise impossible(key, f"{steps} is not divisible by {product}, the updates of a rollout")

    def check_data(self) -> None:
        """Raise if a setting can't work, or has no effect, under SFT or DPO."""
        algorithm = f"algorithm: {self.algorithm}"
        self.need(algorithm, "data", *(("dpo",) if self.algorithm == "dpo" else ()))
        others = ("grpo", "teacher", "distill", *(("dpo",) if self.algorithm == "sft" else ()))
        self.reject_unused(f"by {algorithm}", *others)
        if self.dpo is not None:
            assert self.data is not None
            if self.head.workspace_mib is not None:
                raise impossible("head.workspace_mib", f"is not used by {algorithm}: remove it")
            if self.data.source == "task" and self.dpo.form == "labelled":
                raise impossible("data.source", "a task has no labels, which dpo.loss_type: kto needs: give a file")
        self.check_examples()

    def check_examples(self) -> None:
        """The same of all that learns from `data` alone."""
        assert self.data is not None
        if self.log.samples is not None:
            raise impossible("log.samples", f"is not used by algorithm: {self.algorithm}: remove it")
        if self.data.source == "task":
            self.need("data.source: task", "task")
        elif self.eval is None:
            self.reject_unused("without an eval section", "task")
        if self.eval is None:
            self.reject_unused("without an eval section", "rollout")
        micro = self.micro_batch_size or self.batch_size
        if self.batch_size % micro:  # under GRPO a row is not a sequence
            raise impossible("batch_size", f"{self.batch_size} is not divisible by micro_batch_size ({micro})")

    def check_distill(self) -> None:
        """Raise if a setting can't work, or has no effect, under distillation."""
        self.need("algorithm: distill", "distill")
        self.reject_unused("by algorithm: distill", "dpo")
        distill, data, grpo = self.distill, self.data, self.grpo
        assert distill is not None
        if not (data or grpo):
            raise impossible(
                "data", "algorithm: distill learns from data, or from task, rollout and grpo, or from both"
            )
        self.need("algorithm: distill", "teacher")
        if distill.estimator == "full" and self.teacher and self.head.impl not in (None, "xla", "mosaic_tpu"):
            raise impossible("head.impl", f"{self.head.impl} has no divergences: xla and mosaic_tpu have")
        if not (data and grpo):
            self.reject_unused("without both data and grpo", "distill.data_share")
        elif distill.data_share is None:
            raise impossible("distill.data_share", "data and grpo need this setting, or remove one of them")
        if grpo:
            self.check_own_completions(distill, grpo)
        elif distill.estimator == "sampled":
            raise impossible("grpo", "distill.estimator: sampled needs this section")
        else:
            self.check_examples()

    def check_own_completions(self, distill: DistillConfig, grpo: GrpoConfig) -> None:
        """The same of distillation that samples the student's completions."""
        self.need("grpo under algorithm: distill", "task", "rollout")
        unused = UNREWARDED if distill.estimator == "sampled" else UNREWARDED + POLICY_GRADIENT
        self.reject_unused(f"by distill.estimator: {distill.estimator}", *(f"grpo.{name}" for name in unused))
        if distill.estimator == "full" and grpo.loss_type == "gspo":
            raise impossible("grpo.loss_type", "gspo is an objective, and distill.estimator: full has its own")
        if self.data is not None:
            self.reject_unused("with grpo, whose steps end the run", "data.epochs")
            if self.batch_size % (self.micro_batch_size or 1):
                micro = f"micro_batch_size ({self.micro_batch_size})"
                raise impossible("batch_size", f"{self.batch_size} is not divisible by {micro}")
        self.check_rollouts()

    def check_turns(self) -> None:
        """Raise if a setting of conversations can't work, or has no effect."""
        if self.rollout is None:
            if self.task:
                self.reject_unused("without a rollout section", "task.environment", "task.tools", "task.keep_thoughts")
        elif not (self.task and self.task.converses):
            unused = (
                "rollout.max_turns",
                "rollout.max_total_length",
                *["task.keep_thoughts"] * (self.task is not None),
            )
            self.reject_unused("without task.environment or task.tools", *unused)
        elif self.rollout.turns == 1:
            self.reject_unused("with rollout.max_turns: 1, since no turn follows", "task.tools", "task.keep_thoughts")

    def check_evaluation(self) -> None:
        """Raise if evaluation, or the choice of the best checkpoint by it, can't work."""
        if self.eval is not None:
            self.need("eval", "task", "rollout")
        if self.task is not None and self.task.test is not None and not (self.eval and self.eval.test):
            raise impossible("task.test", "is measured only at the end of a run with eval.test: true; set that")
        held_out = self.task is not None and self.task.heldout != 0
        if self.eval is not None and not held_out and (self.eval.every or not self.eval.test):
            fault = "0 leaves eval nothing but eval.test"
            raise impossible("task.heldout", f"{fault}: set that alone, or hold problems out")
        if not self.checkpoint.keep_best:
            return
        validation = self.data and self.data.validation
        judge, key = (validation, "data.validation.every") if validation else (held_out and self.eval, "eval.every")
        if not judge:
            raise impossible("checkpoint.keep_best", "needs an eval section" + " or data.validation" * bool(self.data))
        if judge.every and self.checkpoint.every and judge.every % self.checkpoint.every:
            problem = f"{key} ({judge.every}) is not a multiple of checkpoint.every ({self.checkpoint.every})"
            raise impossible("checkpoint.keep_best", f"{problem}: the evaluated parameters would not be saved")
