"""The sections `task` and `eval`: problems, their rewards, and how often they are measured."""

import re
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from mllm.config.answer_form import AnswerForm
from mllm.config.section import Section, impossible

ChatTemplate = Literal["auto", "always", "never"]
Form = Literal["texts", "chats"]
"""The form of the data that a model was trained on: plain texts only, or chats rendered by its template."""


CODE_NAME = re.compile(r"\w+(\.\w+)*:\w+")
"""`package.module:function`."""
ENVIRONMENT = "environment"
"""The name of an environment's reward; its weight is 1."""


JUDGES = ("exact_match", "flexible_match", "math")
"""The built-in rewards that compare a completion's answer with the right answer: 1 if they agree."""


class RewardConfig(Section):
    """A reward function; docs/rewards.md has the details."""

    name: str
    """`exact_match`, `flexible_match`, `math`, `format`, `overlong`, or `package.module:function`."""
    weight: float = 1.0
    """The factor in the sum of rewards; 0: the function is only logged."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function, by name."""


class ArithmeticConfig(Section):
    """Problems such as `12+7=`."""

    operands: int = Field(default=2, ge=2, le=6)
    """Numbers in a problem."""
    digits: int = Field(default=1, ge=1, le=6)
    """The most digits of an operand."""
    operators: str = Field(default="+", pattern=r"^[-+*]+$")
    """The operators that a problem may have."""


class ColumnsConfig(Section):
    """The data's names of the fields of a problem."""

    prompt: str = "prompt"
    """The user's message."""
    messages: str = "messages"
    """The chat, instead of `prompt`."""
    answer: str = "answer"
    """The right answer."""


HELDOUT = 256
"""Problems that are held out by default, or a tenth of the problems if that is less."""


class TaskConfig(Section):
    """Problems with rewards; docs/tasks.md has the details."""

    name: str
    """`jsonl` (files), `hub` (a data set), `package.module:function` (it returns problems), `arithmetic` or `gsm8k`."""
    train: str | None = None
    """jsonl: a file, or a pattern of files (.jsonl, .jsonl.gz, .json, .csv, .parquet), also in a bucket; hub: a split,
    by default `train`."""
    test: str | None = None
    """jsonl: the files of a test set; hub: its split. Training never sees its problems. Needs `eval.test`."""
    id: str | None = None
    """hub: the data set, e.g. `openai/gsm8k`."""
    subset: str | None = None
    """hub: the subset of the data set, e.g. `main`."""
    columns: ColumnsConfig | None = None
    """The data's names of `prompt`, `messages` and `answer` where they differ; for jsonl, hub and
    functions."""
    answer_form: AnswerForm = "whole"
    """How a completion states its answer: as a whole, as `#### N`, in `<answer>` tags, or in `\\boxed{}`. For jsonl,
    hub and functions."""
    arithmetic: ArithmeticConfig | None = None
    """arithmetic: the size of its problems."""
    path: str | None = None
    """gsm8k: a folder with train.jsonl and test.jsonl, also in a bucket; None: from the hub."""
    heldout: int | None = Field(default=None, ge=0)
    """The number of training problems that are held out for evaluation. None: 256, or a tenth of the problems if fewer,
    and 0 without an `eval` section."""
    system_prompt: str | None = None
    """The system message before a prompt; it replaces the instruction that `gsm8k` appends."""
    template_args: dict[str, Any] | None = None
    """Further variables of the chat template, by name, e.g. Qwen3's `enable_thinking: false`."""
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="exact_match"),)
    """The reward functions with their weights; each name once. With an environment the default is an empty list; the
    environment's reward is added."""
    environment: str | None = None
    """The environment that replies to the assistant, `package.module:Class`; docs/environments.md has the details."""
    tools: tuple[str, ...] | None = None
    """Functions that the assistant may call, each `package.module:function`."""
    reward_timeout: PositiveFloat = 2.0
    """Time limit in seconds of a reward function per completion, and of an environment per turn. A batched call gets
    this limit times its completions."""
    reward_workers: PositiveInt = 1
    """The number of reward processes, and of environment processes. Rewards do not depend on it."""

    @model_validator(mode="before")
    @classmethod
    def pay_by_environment(cls, given: Any) -> Any:
        """Leave out the default reward where an environment gives a reward."""
        by_environment = isinstance(given, dict) and given.get("environment") is not None and "rewards" not in given
        return {**given, "rewards": ()} if by_environment else given

    @model_validator(mode="after")
    def check(self) -> Self:
        _ = self.kind
        if self.name == "jsonl" and self.train is None:
            raise impossible("train", "task jsonl needs a file of problems")
        if self.name == "hub" and self.id is None:
            raise impossible("id", "task hub needs the id of a data set")
        if not (self.rewards or self.environment):
            raise impossible("rewards", "give at least one, or an environment")
        if self.environment is not None and not CODE_NAME.fullmatch(self.environment):
            raise impossible("environment", f"{self.environment}: expected package.module:Class")
        for name in self.tools or ():
            if not CODE_NAME.fullmatch(name):
                raise impossible("tools", f"{name}: expected package.module:function")
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise impossible("rewards", "each name may stand once")
        return self

    @property
    def kind(self) -> str:
        """The kind of loader: `arithmetic`, `gsm8k`, `jsonl`, `hub` or `function`."""
        if self.name in ("arithmetic", "gsm8k", "jsonl", "hub"):
            return self.name
        if CODE_NAME.fullmatch(self.name):
            return "function"
        tasks = "arithmetic, gsm8k, jsonl, hub or package.module:function"
        raise impossible("name", f"there is no task {self.name}: give {tasks}")

    @property
    def converses(self) -> bool:
        """Whether a completion is a conversation with an environment or tools."""
        return bool(self.environment or self.tools)

    @property
    def judge(self) -> int | None:
        """The index of the reward that judges answers: the judge with the largest weight; None without a judge."""
        judges = [index for index, reward in enumerate(self.rewards) if reward.name in JUDGES]
        return max(judges, key=lambda index: self.rewards[index].weight, default=None)

    @property
    def pays_answers(self) -> bool:
        """Whether the rewards depend on whether an answer is right."""
        return self.judge is not None and self.rewards[self.judge].weight > 0

    def of_run(self, evaluates: bool) -> "TaskConfig":
        """The task of a run; a run that doesn't evaluate holds out no problems by default."""
        return self if evaluates or self.heldout is not None else self.model_copy(update={"heldout": 0})

    def heldout_of(self, problems: int = 10 * HELDOUT) -> int:
        """The number of held-out problems if the task has this many `problems`; by default the largest number."""
        return min(HELDOUT, max(1, problems // 10)) if self.heldout is None else self.heldout


class EvalConfig(Section):
    """Evaluation at step 0, every n steps and at the end, on problems that training never sees."""

    every: PositiveInt | None = None
    """Steps between evaluations; None: only at step 0 and at the end. A multiple of the updates of a rollout."""
    samples: int = Field(default=0, ge=0)
    """Sampled completions of each problem at the rollout's temperature, for `avg@k` and `pass@k`. The greedy completion
    is always measured."""
    test: bool = False
    """Also measure the task's test set, once, at the end of the run; metrics begin with `test/`."""
