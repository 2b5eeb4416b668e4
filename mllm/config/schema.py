"""The schema of a run: the sections that all algorithms have, and what settings may not be combined with each other.

Keys that are unknown, settings that nothing would read, and values that can't work are errors before anything is
compiled or written. Names follow TRL's where it has one. `load.py` reads and writes configurations. All files of this
room, and the settings of algorithms, import nothing heavy, so that an error of the configuration does not wait for JAX.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import Field, PositiveInt, StrictBool, model_validator

from mllm.config.data import DataConfig
from mllm.config.model import HeadConfig, MeshConfig, ModelConfig, OptimizerConfig
from mllm.config.rollout import RolloutConfig
from mllm.config.section import Fault, Section, impossible
from mllm.config.task import ChatTemplate, EvalConfig, TaskConfig
from mllm.config.teacher import TeacherConfig

SectionT = TypeVar("SectionT", bound=Section)


class CheckpointConfig(Section):
    """What is saved, and when."""

    every: PositiveInt | None = None
    """Steps between checkpoints; None: only one at the end. A multiple of the updates of a rollout."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_best: StrictBool = False
    """Keep the best checkpoint, too: by `validation/loss` if the run validates, else by `eval/greedy_accuracy`. Needs
    `eval` or `data.validation`, whose `every` is a multiple of `checkpoint.every`."""

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0


class LogConfig(Section):
    """What GRPO logs besides the metrics."""

    samples: int | None = Field(default=None, ge=0)
    """How many completions of each step are written to samples.jsonl, the best and the worst of as many prompts as that
    allows; None: all. Only where completions are sampled to learn from."""
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


class Rules(ABC):
    """An algorithm's rules of configurations, without JAX; mllm/algorithms/table.py lists all algorithms."""

    implementation: ClassVar[str]
    """Its `mllm.training.algorithm.Algorithm`, `package.module:Class`."""
    sections: ClassVar[Mapping[str, type[Section]]] = {}
    """The sections that it adds to the schema, by their keys. Several algorithms may have the same one."""
    needs: ClassVar[tuple[str, ...]] = ()
    """The keys of the sections that must be there."""
    unused: ClassVar[tuple[str, ...]] = ()
    """The keys of common sections that it does not use."""

    @abstractmethod
    def faults(self, config: "Config") -> Iterator[Fault]:
        """Settings that can't work, or have no effect, in a configuration that has all sections of `needs`."""

    @abstractmethod
    def rows(self, config: "Config") -> Rows:
        """The shape of an update's batch."""


class Config(Section):
    """The settings of a run that all algorithms have; `mllm.algorithms.table.schema` adds their own sections."""

    rules_by_name: ClassVar[Mapping[str, Rules]] = {}
    """The rules of the algorithms whose sections the schema has."""

    algorithm: str
    """Supervised fine-tuning, group relative policy optimization, direct preference optimization and its kin, or
    distillation of a teacher."""
    run_dir: str = Field(min_length=1)
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
    """Examples, or preferences; sft and dpo need it, and distill learns from it or from `grpo`."""
    task: TaskConfig | None = None
    """Problems with rewards; grpo and `eval` need it."""
    rollout: RolloutConfig | None = None
    """How completions are sampled; grpo and `eval` need it."""
    teacher: TeacherConfig | None = None
    """The model that distill learns from."""
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
        for fault in self.faults():
            raise impossible(*fault)
        return self

    @property
    def rules(self) -> Rules:
        """The algorithm's rules."""
        return self.rules_by_name[self.algorithm]

    @property
    def rows(self) -> Rows:
        """The shape of an update's batch."""
        return self.rules.rows(self)

    @property
    def shards(self) -> int:
        """The devices' shares of a batch's rows."""
        return self.mesh.dp * self.mesh.fsdp

    def section(self, kind: type[SectionT]) -> SectionT:
        """The section of this class, which the algorithm has; LookupError where it is not there."""
        section = next((value for _, value in self if isinstance(value, kind)), None)
        if section is None:  # StopIteration would end a generator of faults without a word
            raise LookupError(f"algorithm {self.algorithm} has no section of {kind.__name__}")
        return section

    def missing(self, because: str, *names: str) -> Iterator[Fault]:
        """A fault for each of the sections `names` that is missing."""
        for name in names:
            if getattr(self, name) is None:
                yield name, f"{because} needs this section"

    def faults(self) -> Iterator[Fault]:
        """All that can't work, or has no effect, because of another section; faults that explain others come first."""
        algorithm, rules = f"algorithm: {self.algorithm}", self.rules
        yield from self.missing(algorithm, *rules.needs)
        known = {name for other in self.rules_by_name.values() for name in other.sections}
        yield from self.unused(f"by {algorithm}", *rules.unused, *sorted(known - {*rules.sections}))
        yield from rules.faults(self)
        yield from evaluation_faults(self)
        yield from turn_faults(self)
        for key, rows in (("batch_size", self.batch_size), ("micro_batch_size", self.micro_batch_size or 0)):
            if rows % self.shards:
                yield key, f"{rows} is not divisible by mesh.dp * mesh.fsdp ({self.shards})"
        if self.steps is None and (self.data is None or self.data.epochs is None):
            yield "steps", "this setting is required" + ", or data.epochs" * (self.data is not None)
        if self.optimizer.moment_dtype == self.model.param_dtype:
            yield "optimizer.moment_dtype", "has no effect with model.param_dtype: bfloat16: remove it"
        if self.steps is not None and self.optimizer.warmup_steps > self.steps:
            yield "optimizer.warmup_steps", f"longer than the run ({self.steps} steps)"


def turn_faults(config: Config) -> Iterator[Fault]:
    """Settings that can't work, or have no effect, in conversations."""
    task, rollout = config.task, config.rollout
    if rollout is None:
        if task:
            yield from config.unused(
                "without a rollout section", "task.environment", "task.tools", "task.keep_thoughts"
            )
    elif not (task and task.converses):
        unused = ("rollout.max_turns", "rollout.max_total_length", *["task.keep_thoughts"] * (task is not None))
        yield from config.unused("without task.environment or task.tools", *unused)
    elif rollout.turns == 1:
        yield from config.unused("with rollout.max_turns: 1, since no turn follows", "task.tools", "task.keep_thoughts")


def evaluation_faults(config: Config) -> Iterator[Fault]:
    """Settings that can't work in evaluation, or in the choice of the best checkpoint by it."""
    task, evaluation, checkpoint = config.task, config.eval, config.checkpoint
    if evaluation is not None:
        yield from config.missing("eval", "task", "rollout")
    if task is not None and task.test is not None and not (evaluation and evaluation.test):
        yield "task.test", "is measured only at the end of a run with eval.test: true; set that"
    held_out = task is not None and task.heldout != 0
    if evaluation is not None and not held_out and (evaluation.every or not evaluation.test):
        yield "task.heldout", "0 leaves eval nothing but eval.test: set that alone, or hold problems out"
    if not checkpoint.keep_best:
        return
    validation = config.data and config.data.validation
    judge, key = (validation, "data.validation.every") if validation else (held_out and evaluation, "eval.every")
    if not judge:
        yield "checkpoint.keep_best", "needs an eval section" + " or data.validation" * bool(config.data)
    elif judge.every and (checkpoint.every is None or judge.every % checkpoint.every):
        problem = f"{key} ({judge.every}) is not a multiple of checkpoint.every ({checkpoint.every or 'null'})"
        yield "checkpoint.keep_best", f"{problem}: the evaluated parameters would not be saved"
