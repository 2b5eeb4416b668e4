"""The settings that every run has. Each algorithm's `settings.py` adds its own sections in a subclass of `RunConfig`.

A value that can't work is an error before anything is compiled or written. Names follow TRL's where TRL has them.
`load.py` reads and writes configurations. No file of this room imports JAX, so errors in a configuration come at once.
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
    """The checkpoints: when they are saved, and which are kept."""

    every: PositiveInt | None = None
    """Steps between checkpoints; None: only one at the end. A multiple of the updates of a rollout."""
    keep: PositiveInt = 2
    """The number of newest checkpoints that are kept."""
    keep_best: StrictBool = False
    """Also keep the best checkpoint: by `validation/loss` if the run validates, else by `eval/greedy_accuracy` where
    the task pays right answers, else by `eval/reward`. Needs `eval` or `data.validation`, with an `every` that is a
    multiple of `checkpoint.every`."""

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0


class LogConfig(Section):
    """Logs beside the metrics."""

    samples: int | None = Field(default=None, ge=0)
    """The number of completions of each step in samples.jsonl, the best and the worst of as many prompts as possible;
    None: every completion. Only where sampled completions are learned from."""
    wandb: str | None = Field(default=None, pattern=r"^[^/\\#?%:]{1,128}$")
    """The project of Weights & Biases that metrics and timings are sent to; None: nothing is sent."""


class Change(Section):
    """A setting that `--change` has changed in the course of a run."""

    step: int
    """The last step with the old value."""
    key: str
    """The setting, with dots."""
    old: Any
    new: Any


class BatchShape(NamedTuple):
    """The shape of an update's batch. The arrays have room for the worst packing; only rows with tokens cost time."""

    length: int
    """Tokens in a row."""
    micro: int
    """Rows in one forward and backward pass."""
    total: int
    """Rows of the arrays: whole micro-batches."""
    shards: int
    """The devices' shares of the rows of every micro-batch."""


class RunConfig(Section, ABC):
    """The settings of a run; its sections follow."""

    algorithm: str
    """`sft`, supervised fine-tuning; `grpo`, group relative policy optimization; `dpo`, direct preference optimization
    and its kin; or `distill`, distillation of a teacher."""
    run_dir: str = Field(min_length=1)
    """The folder of the run, which is new or holds this run, which then resumes; also gs://bucket/path."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """The seed of every random number."""
    steps: PositiveInt | None = None
    """The number of updates of the parameters; None: the batches in `data.epochs` passes over the data. Under GRPO a
    multiple of the updates of a rollout, `grpo.updates_per_generation` * `grpo.num_iterations`."""
    batch_size: PositiveInt
    """Sequences in each update; under SFT and DPO rows, which hold several examples or pairs. Under GRPO
    `num_generations` of them share a prompt, and a rollout has `grpo.updates_per_generation` times as many. A multiple
    of `num_generations`, and of `mesh.dp` * `mesh.fsdp`."""
    micro_batch_size: PositiveInt | None = None
    """Rows in one forward and backward pass; None: as many as the memory plan says fit, at most the whole batch, or
    under GRPO a sixteenth of the most packed rows, since their number varies. The number is noted in the run's
    config.yaml, and a resume keeps it. The gradient does not depend on it. A multiple of `mesh.dp` * `mesh.fsdp`; under
    SFT and DPO it divides `batch_size`."""
    model: ModelConfig
    """The model that is trained."""
    chat_template: ChatTemplate = "auto"
    """When the model's chat template renders data, tasks and evaluation: `always`, `never`, or `auto`: messages, and a
    task's texts unless the model has learned texts. docs/training.md has the details."""
    head: HeadConfig = HeadConfig()
    """How the loss is computed from hidden states."""
    optimizer: OptimizerConfig
    """How the parameters are updated."""
    mesh: MeshConfig = MeshConfig()
    """The devices."""
    task: TaskConfig | None = None
    """Problems with rewards; `eval` needs it."""
    rollout: RolloutConfig | None = None
    """How completions are sampled; `eval` needs it."""
    eval: EvalConfig | None = None
    """Completions of problems that are held out; needs `task` and `rollout`."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The checkpoints: when they are saved, and which are kept."""
    log: LogConfig = LogConfig()
    """Logs beside the metrics."""
    changes: tuple[Change, ...] = ()
    """The changes by `--change` so far: a record in the run's config.yaml."""

    @property
    @abstractmethod
    def batch_shape(self) -> BatchShape:
        """The shape of an update's batch."""

    @property
    def examples(self) -> DataConfig | None:
        """The section `data`; None for an algorithm that learns from completions that it samples."""
        return None

    @property
    def frozen_teacher(self) -> TeacherConfig | None:
        """The section `teacher`; None for an algorithm without a teacher."""
        return None

    @property
    def shards(self) -> int:
        """The devices' shares of a batch's rows; with `mesh.fsdp: -1`, which stands for a number later, dp's alone."""
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
        """Raise where an evaluation, or the choice of the best checkpoint by it, can't work."""
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
    """The settings of a run that learns from the examples of `data`."""

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
