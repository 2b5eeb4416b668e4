"""The schema of a run: every setting, its type, its bounds, and what it may not be combined with.

Keys that are unknown, settings that nothing would read, and values that can't work are errors before anything is
compiled or written. Names follow TRL's where it has one. `load.py` reads and writes configurations. Both files import
nothing heavy, so that an error of the configuration does not wait for JAX.
"""

import math
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

LARGEST_NUMBER = 2**31 - 1
"""The largest whole number in a setting, because JAX counts in int32."""


class Section(BaseModel):
    """A group of settings; immutable, and closed to keys that it doesn't define."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def check_whole_numbers(self) -> Self:
        for name, value in self:
            if isinstance(value, int) and value > LARGEST_NUMBER:
                raise impossible(name, f"the number is too large: at most {LARGEST_NUMBER}")
        return self

    def reject_unused(self, because: str, *names: str) -> None:
        """Raise for the first of `names` that is set to something other than its default."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise impossible(name, f"is not used {because}: remove it")


class ModelConfig(Section):
    source: str | None = None
    """A folder in Hugging Face's layout, or a hub id."""
    init: Literal["pretrained", "random"] = "pretrained"
    architecture: dict[str, Any] | None = None
    """The keys of Hugging Face's config.json, for a model made from scratch without a `source`."""
    tokenizer: str | None = None
    """A folder or hub id, or `bytes`; by default the source's, or bytes for an `architecture`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The dtype of activations and of the products' operands."""
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the residual stream, which the layers add to; bfloat16 rounds each sum."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters that the optimizer updates."""
    remat: Literal["none", "dots", "full"] = "full"
    """What the backward pass recomputes in each layer: nothing, all but the matrix products, or everything."""
    attention: Literal["xla", "splash", "cudnn"] | None = None
    """The attention over whole sequences; None: splash attention on TPUs and cuDNN's on NVIDIA GPUs where these can
    run (see mllm/model/attention.py), else XLA's."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.init == "pretrained":
            if self.source is None:
                raise impossible("source", "give a local folder or a hub id, or set model.init=random")
            self.reject_unused("with init: pretrained (the source's config.json says it)", "architecture")
        elif (self.source is None) == (self.architecture is None):
            raise impossible("architecture", "init: random takes either a source or an architecture")
        if (self.dtype, self.residual_dtype) == ("float32", "bfloat16"):
            raise impossible("residual_dtype", "bfloat16 would round what dtype: float32 computes: remove it")
        return self


class HeadConfig(Section):
    impl: Literal["full_logits", "xla", "mosaic_tpu", "mosaic_gpu"] | None = None
    """None: the fastest that runs on this device without making [tokens, vocabulary] logits."""
    workspace_mib: int | None = Field(default=None, ge=0)
    """Memory in which the loss may keep logits; 0 computes them twice instead; None: the head chooses."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.impl == "full_logits":
            self.reject_unused("with impl: full_logits", "workspace_mib")
        return self


class OptimizerConfig(Section):
    name: Literal["adamw", "lion"] = "adamw"
    learning_rate: PositiveFloat
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, to `final_fraction` of itself at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.99, ge=0, lt=1)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    """Applies to matrices, never to norms and biases."""
    max_grad_norm: PositiveFloat | None = 1.0
    max_skipped: int = Field(default=10, ge=0)
    """Updates in a row that may be skipped because the loss or a gradient isn't finite; one more stops the run."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.name == "lion":
            self.reject_unused("by lion", "eps")
        if self.schedule == "constant":
            self.reject_unused("with schedule: constant", "final_fraction")
        return self


class MeshConfig(Section):
    """Devices along each axis; their product is the number of devices that are used."""

    dp: PositiveInt = 1
    fsdp: PositiveInt = 1
    tp: PositiveInt = 1


class DataConfig(Section):
    """The examples that SFT trains on."""

    source: str
    """A file of JSON lines (`messages`, or `question` and `answer`), a hub id, or `task`: the task's own solutions."""
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
    prefetch: int = Field(default=2, ge=0)
    """Batches that are made ahead of the step that reads them."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.source == "task" or self.source.endswith(".jsonl"):
            self.reject_unused(f"with source: {self.source}", "subset", "split")
        if self.source == "task":
            self.reject_unused("with source: task", "on_bad_line")
        return self


class RewardConfig(Section):
    name: str
    """`exact_match`, `flexible_match`, `format`, `tag_count`, `task` (its own scorer), or `package.module:function`."""
    weight: float = 1.0


class ArithmeticConfig(Section):
    operands: int = Field(default=2, ge=2, le=6)
    digits: int = Field(default=1, ge=1, le=6)
    """The most digits of an operand."""
    operators: str = Field(default="+", pattern=r"^[-+*]+$")


class TaskConfig(Section):
    name: str = Field(pattern=r"^(arithmetic|gsm8k|reasoning_gym:[a-z0-9_]+)$")
    arithmetic: ArithmeticConfig | None = None
    path: str | None = None
    """gsm8k: a folder with train.jsonl and test.jsonl; None: from the hub."""
    train_examples: PositiveInt = 10_000
    """reasoning_gym: how many problems to make for training."""
    heldout: PositiveInt = 256
    """How many problems evaluation may use; training never sees them."""
    system_prompt: str | None = None
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="exact_match"),)
    reward_timeout: PositiveFloat = 2.0
    """Seconds that one reward function may take for one completion."""
    max_failed_groups: float = Field(default=0.5, ge=0, le=1)
    """The share of a step's groups that may be left out; a larger one stops the run. A group is left out if a reward
    with a weight failed for one of its completions."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.name != "arithmetic":
            self.reject_unused(f"by task {self.name}", "arithmetic")
        if self.name != "gsm8k":
            self.reject_unused(f"by task {self.name}", "path")
        if not self.name.startswith("reasoning_gym:"):
            self.reject_unused(f"by task {self.name}", "train_examples")
        if not self.rewards:
            raise impossible("rewards", "give at least one")
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise impossible("rewards", "each name may stand once")
        return self


class RolloutConfig(Section):
    """How completions are sampled, for GRPO and for evaluation."""

    max_prompt_length: PositiveInt
    max_completion_length: PositiveInt
    temperature: PositiveFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """How many of the likeliest tokens are sampled from; 0: all."""
    stop: tuple[str, ...] = ()
    """Tokens that end a completion, besides the model's own."""
    max_slots: PositiveInt | None = None
    """The most sequences that are decoded at a time, over all devices; None: as many as the devices' memory holds."""


class GrpoConfig(Section):
    num_generations: int = Field(default=8, ge=2)
    """Completions of each prompt: the group whose rewards are compared."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo"] = "grpo"
    num_iterations: PositiveInt = 1
    """Updates from each rollout."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    epsilon_high: float | None = Field(default=None, gt=0)
    """None: the same as `epsilon`."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference policy; 0: no reference policy is held."""
    reference: Literal["initial"] | None = None
    """The reference policy: the parameters that the run began with."""
    entropy_coef: float = 0.0
    scale_rewards: Literal["group", "batch", "none"] = "group"
    importance_cap: PositiveFloat | None = 2.0
    """Upper limit of the importance weight, trainer's over sampler's probability; None: no such weight."""
    mask_truncated_completions: bool = False
    row_length: PositiveInt | None = None
    """Tokens in a row of the update, into which sequences are packed; None: as many as the longest sequence may have.
    The gradient does not depend on it."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.beta > 0 and self.reference is None:
            raise impossible("beta", "a KL penalty needs a reference: set grpo.reference=initial, or beta to 0")
        if self.beta == 0:
            self.reject_unused("with beta: 0", "reference")
        return self


class EvalConfig(Section):
    """Evaluation at step 0, every n steps and at the end, on problems that training never sees."""

    every: PositiveInt | None = None
    """Steps between evaluations; None: only at step 0 and at the end."""
    prompts: PositiveInt | None = None
    """How many held-out problems are used; None: all."""
    sampled: bool = False
    """Measure one completion at the rollout's temperature besides the greedy one."""


class CheckpointConfig(Section):
    every: PositiveInt | None = None
    """Steps between checkpoints; None: only one at the end."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_best: bool = False
    """Keep the checkpoint with the highest `eval/greedy_accuracy`, too."""


class LogConfig(Section):
    samples: int | None = Field(default=None, ge=0)
    """How many completions of each step are written to samples.jsonl; None: all."""


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
    algorithm: Literal["sft", "grpo"]
    run_dir: str
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: PositiveInt
    """How often the parameters are updated."""
    batch_size: PositiveInt
    """Sequences in each update. Under GRPO `num_generations` of them share a prompt."""
    micro_batch_size: PositiveInt | None = None
    """Rows in one forward and backward pass; None: the whole batch, or under GRPO, whose packed rows vary in number, a
    sixteenth of the most rows. The gradient does not depend on it."""
    model: ModelConfig
    head: HeadConfig = HeadConfig()
    optimizer: OptimizerConfig
    mesh: MeshConfig = MeshConfig()
    data: DataConfig | None = None
    task: TaskConfig | None = None
    rollout: RolloutConfig | None = None
    grpo: GrpoConfig | None = None
    eval: EvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.algorithm == "grpo":
            self.check_grpo()
        else:
            self.check_sft()
        self.check_evaluation()
        self.check_rows(self.mesh.dp * self.mesh.fsdp)
        if self.optimizer.warmup_steps > self.steps:
            raise impossible("optimizer.warmup_steps", f"longer than the run ({self.steps} steps)")
        return self

    @property
    def rows(self) -> Rows:
        """The shape of an update's batch."""
        shards = self.mesh.dp * self.mesh.fsdp
        if self.data is not None:
            return Rows(self.data.max_length, self.micro_batch_size or self.batch_size, self.batch_size, shards)
        assert self.grpo and self.rollout  # noqa: PT018
        longest = self.rollout.max_prompt_length + self.rollout.max_completion_length
        length = self.grpo.row_length or longest
        # First-fit opens a row only when the others are too full: all but the last hold at least length // longest.
        most = math.ceil(self.batch_size / (length // longest))
        micro = self.micro_batch_size or math.ceil(most / (16 * shards)) * shards
        return Rows(length, micro, math.ceil(most / micro) * micro, shards)

    def need(self, because: str, *names: str) -> None:
        """Raise for the first of the sections `names` that is missing."""
        for name in names:
            if getattr(self, name) is None:
                raise impossible(name, f"{because} needs this section")

    def check_grpo(self) -> None:
        """Raise if a setting can't work, or has no effect, under GRPO."""
        self.need("algorithm: grpo", "task", "rollout", "grpo")
        assert self.grpo and self.rollout  # noqa: PT018
        self.reject_unused("by algorithm: grpo", "data")
        longest = self.rollout.max_prompt_length + self.rollout.max_completion_length
        if self.grpo.row_length is not None and self.grpo.row_length < longest:
            both = f"rollout.max_prompt_length + max_completion_length ({longest})"
            raise impossible("grpo.row_length", f"{self.grpo.row_length} is less than {both}")
        if self.grpo.loss_type == "gspo" and self.head.workspace_mib is not None:
            raise impossible("head.workspace_mib", "is not used with grpo.loss_type: gspo: remove it")
        group, iterations = self.grpo.num_generations, self.grpo.num_iterations
        if self.batch_size % group:
            raise impossible("batch_size", f"{self.batch_size} is not divisible by grpo.num_generations ({group})")
        for key, steps in (("steps", self.steps), ("checkpoint.every", self.checkpoint.every or 0)):
            if steps % iterations:
                raise impossible(key, f"{steps} is not divisible by grpo.num_iterations ({iterations})")

    def check_sft(self) -> None:
        """Raise if a setting can't work, or has no effect, under SFT."""
        self.need("algorithm: sft", "data")
        assert self.data is not None
        self.reject_unused("by algorithm: sft", "grpo", "log")
        if self.data.source == "task":
            self.need("data.source: task", "task")
        elif self.eval is None:
            self.reject_unused("without an eval section", "task")
        if self.eval is None:
            self.reject_unused("without an eval section", "rollout")

    def check_evaluation(self) -> None:
        """Raise if evaluation, or the choice of the best checkpoint by it, can't work."""
        if self.eval is None:
            if self.checkpoint.keep_best:
                raise impossible("checkpoint.keep_best", "needs an eval section")
            return
        self.need("eval", "task", "rollout")
        assert self.task is not None
        if self.eval.prompts is not None and self.eval.prompts > self.task.heldout:
            raise impossible("eval.prompts", f"only {self.task.heldout} problems are held out (task.heldout)")
        evaluated, saved = self.eval.every, self.checkpoint.every
        if self.checkpoint.keep_best and evaluated and saved and evaluated % saved:
            problem = f"eval.every ({evaluated}) is not a multiple of checkpoint.every ({saved})"
            raise impossible("checkpoint.keep_best", f"{problem}: the evaluated parameters would not be saved")

    def check_rows(self, shards: int) -> None:
        """Raise if micro-batches, or the `shards` devices that share their rows, would not be equally large."""
        batch, micro, group = self.batch_size, self.micro_batch_size, self.grpo.num_generations if self.grpo else 1
        divided = micro if micro and self.algorithm == "sft" else 1  # under GRPO a row is not a sequence
        if batch % divided:
            raise impossible("batch_size", f"{batch} is not divisible by micro_batch_size ({micro})")
        problem = f"is not divisible by mesh.dp * mesh.fsdp ({shards}); the nearest that works is"
        if batch % shards:
            step = math.lcm(shards, divided, group)
            raise impossible("batch_size", f"{batch} {problem} {max(1, round(batch / step)) * step}")
        if micro is not None and micro % shards:
            works = [rows for rows in range(shards, batch + 1, shards) if self.algorithm == "grpo" or batch % rows == 0]
            nearest = min(works, key=lambda rows: abs(rows - micro))
            raise impossible("micro_batch_size", f"{micro} {problem} {nearest}")


def impossible(key: str, message: str) -> PydanticCustomError:
    """The error of a setting that contradicts another; `key` is relative to the section that raises it."""
    return PydanticCustomError("impossible", "{key}\n{message}", {"key": key, "message": message})
