"""The settings that every run has. Each algorithm's `settings.py` adds its own sections in a subclass of `RunConfig`.

A value that can't work is an error before anything is compiled or written. Settings have TRL's names where TRL has the
setting. `load.py` reads and writes configurations. `mllm.config` must not import JAX, so errors come at once.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

from pydantic import Field, PositiveInt, StrictBool, model_validator

from mllm.config.data import DataConfig
from mllm.config.model import HeadConfig, MeshConfig, ModelConfig, OptimizerConfig
from mllm.config.rollout import RolloutConfig
from mllm.config.section import Section, impossible
from mllm.config.task import ChatTemplate, EvalConfig, TaskConfig
from mllm.config.teacher import TeacherConfig


class CheckpointConfig(Section):
    """When checkpoints are saved, and which are kept."""

    every: PositiveInt | None = None
    """Steps between checkpoints; None: only one at the end. A multiple of the updates of a rollout."""
    keep: PositiveInt = 2
    """The number of newest checkpoints that are kept."""
    keep_best: StrictBool = False
    """Also keep the best checkpoint. The score is `validation/loss` if the run validates, else `eval/greedy_accuracy`
    if a reward compares answers, else `eval/reward`. Needs `eval` or `data.validation`, with an `every` that is a
    multiple of `checkpoint.every`."""

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0


class LogConfig(Section):
    """Further logs: sampled completions, and Weights & Biases."""

    samples: int | None = Field(default=None, ge=0)
    """Completions per step in samples.jsonl: the best and the worst of as many prompts as possible. None: every
    completion. Only for algorithms that train on sampled completions."""
    wandb: str | None = Field(default=None, pattern=r"^[^/\\#?%:]{1,128}$")
    """A Weights & Biases project that receives metrics and timings; None: nothing is sent."""


class Change(Section):
    """A setting that `--change` changed during a run."""

    step: int
    """The last step with the old value."""
    key: str
    """The setting, with dots."""
    old: Any
    new: Any


class BatchShape(NamedTuple):
    """The shape of an update's batch. The arrays have room for the worst packing; empty rows cost no time."""

    length: int
    """Tokens in a row."""
    micro: int
    """Rows in one forward and backward pass."""
    total: int
    """Rows of the arrays; a multiple of `micro`."""
    shards: int
    """The number of equal parts that each micro-batch's rows are split into, one for each group of tp devices."""


class RunConfig(Section, ABC):
    """The settings of a run; its sections follow."""

    algorithm: str
    """`sft`, supervised fine-tuning; `grpo`, group relative policy optimization; `dpo`, direct preference optimization
    and its kin; or `distill`, distillation of a teacher."""
    run_dir: str = Field(min_length=1)
    """The folder of the run, or gs://bucket/path. If the folder already holds this run, it resumes."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """The seed of every random number."""
    steps: PositiveInt | None = None
    """The number of parameter updates; None: the batches in `data.epochs` passes over the data. Under GRPO a multiple
    of the updates per rollout, `grpo.updates_per_generation` * `grpo.num_iterations`."""
    batch_size: PositiveInt
    """Completions per update under GRPO, a multiple of `grpo.num_generations`; a rollout has
    `grpo.updates_per_generation` times as many. Under SFT and DPO packed rows, each with several examples or pairs.
    A multiple of `mesh.dp` * `mesh.fsdp`."""
    micro_batch_size: PositiveInt | None = None
    """Rows in one forward and backward pass; the gradient does not depend on it. None: as many as fit by the memory
    plan. The limit is the whole batch; under GRPO a sixteenth of the most packed rows. The choice is written to the
    run's config.yaml, and a resume keeps it. A multiple of `mesh.dp` * `mesh.fsdp`; under SFT and DPO it divides
    `batch_size`."""
    model: ModelConfig
    """The model that is trained."""
    chat_template: ChatTemplate = "auto"
    """When the model's chat template renders data and prompts: `always`, `never`, or `auto`. `auto` renders messages,
    and a task's texts unless the model was trained on texts. docs/training.md has the details."""
    head: HeadConfig = HeadConfig()
    """How the loss is computed from hidden states."""
    optimizer: OptimizerConfig
    """How the parameters are updated."""
    mesh: MeshConfig = MeshConfig()
    """How the devices share the work."""
    task: TaskConfig | None = None
    """Problems with rewards; `eval` needs it."""
    rollout: RolloutConfig | None = None
    """How completions are sampled; `eval` needs it."""
    eval: EvalConfig | None = None
    """Evaluation on held-out problems; needs `task` and `rollout`."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved, and which are kept."""
    log: LogConfig = LogConfig()
    """Further logs: sampled completions, and Weights & Biases."""
    changes: tuple[Change, ...] = ()
    """The changes by `--change` so far, recorded in the run's config.yaml."""

    @property
    @abstractmethod
    def batch_shape(self) -> BatchShape:
        """The shape of an update's batch."""

    @property
    def examples(self) -> DataConfig | None:
        """The section `data`; None for an algorithm that trains on completions sampled by its own policy."""
        return None

    @property
    def frozen_teacher(self) -> TeacherConfig | None:
        """The section `teacher`; None for an algorithm without a teacher."""
        return None

    @property
    def shards(self) -> int:
        """The number of equal parts of a batch's rows: dp * fsdp, or dp while `mesh.fsdp` is still -1."""
        return self.mesh.dp * max(self.mesh.fsdp, 1)

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, given: Any) -> Any:
        """Treat a null setting or section as left out."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def check_run(self) -> Self:
        for key, rows in (("batch_size", self.batch_size), ("micro_batch_size", self.micro_batch_size or 0)):
            if rows % self.shards:
                raise impossible(key, f"{rows} is not divisible by mesh.dp * mesh.fsdp ({self.shards})")
        data = self.examples
        if self.steps is None and (data is None or data.epochs is None):
            raise impossible("steps", "this setting is required" + ", or data.epochs" * (data is not None))
        if self.steps is not None and self.optimizer.warmup_steps > self.steps:
            raise impossible("optimizer.warmup_steps", f"longer than the run ({self.steps} steps)")
        self.check_evaluation(data)
        if self.task and self.task.tools and self.rollout and self.rollout.turns == 1:
            raise impossible("task.tools", "no turn follows a call: set rollout.max_turns to 2 or more")
        return self

    def check_evaluation(self, data: DataConfig | None) -> None:
        """Raise if the evaluation, or the choice of the best checkpoint by it, can't work."""
        task, evaluation, checkpoint = self.task, self.eval, self.checkpoint
        for name, section in (("task", task), ("rollout", self.rollout)):
            if evaluation is not None and section is None:
                raise impossible(name, "eval needs this section")
        held_out = task is not None and task.heldout != 0
        if evaluation is not None and not held_out and (evaluation.every or not evaluation.test):
            raise impossible("task.heldout", "0 leaves eval only eval.test: set that alone, or hold problems out")
        if not checkpoint.keep_best:
            return
        validation = data and data.validation
        judge, key = (validation, "data.validation.every") if validation else (held_out and evaluation, "eval.every")
        if not judge:
            raise impossible("checkpoint.keep_best", "needs an eval section" + " or data.validation" * bool(data))
        if judge.every and (checkpoint.every is None or judge.every % checkpoint.every):
            problem = f"{key} ({judge.every}) is not a multiple of checkpoint.every ({checkpoint.every or 'null'})"
            raise impossible("checkpoint.keep_best", f"{problem}: the evaluated parameters would not be saved")


class ExampleRun(RunConfig, ABC):
    """The settings of a run that trains on the examples of `data`."""

    data: DataConfig
    """The examples."""

    @property
    def examples(self) -> DataConfig:
        return self.data

    @property
    def batch_shape(self) -> BatchShape:
        micro = self.micro_batch_size or self.batch_size
        return BatchShape(self.data.max_length, micro, self.batch_size, self.shards)

    @model_validator(mode="after")
    def check_examples(self) -> Self:
        if self.data.source == "task" and self.task is None:
            raise impossible("task", "data.source: task needs this section")
        if self.batch_size % (micro := self.micro_batch_size or self.batch_size):
            raise impossible("batch_size", f"{self.batch_size} is not divisible by micro_batch_size ({micro})")
        return self
