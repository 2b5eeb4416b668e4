"""What an algorithm is to the trainer: the loss of a micro-batch, the step's metrics, and the source of its batches.

Each has a folder in mllm/algorithms. Nothing else asks which algorithm a run has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.data.source import Source
from mllm.data.tasks.task import Task
from mllm.model.layout import Params
from mllm.model.tokenizer import Renderer
from mllm.rewards.runner import RewardRunner
from mllm.sampler.sampler import Sampler
from mllm.training.head import Head, States

Metrics = dict[str, Float[Array, ""]]
Evaluate = Callable[[Params, int], dict[str, float]]
"""(parameters, step) -> metrics. All processes call it at the same place."""


class Pass(NamedTuple):
    """A program that goes over a rollout's batches, or over preferences, before their updates: for the plan."""

    policy: Literal["policy", "teacher"]
    """The model whose log-probabilities it computes."""
    beside_optimizer: bool = True
    """Whether the optimizer's moments are in memory by then."""


@dataclass(frozen=True)
class Parts:
    """The loaded parts of a run, from which an algorithm makes its source."""

    config: Config
    mesh: Mesh
    task: Task | None
    renderer: Renderer
    """The renderer of the examples; the sampler has a renderer for prompts."""
    forward: Any
    """The `mllm.training.step.Forward` of the algorithm."""
    sampler: Sampler | None = None
    rewards: RewardRunner | None = None


class Algorithm(ABC):
    """What an update learns, from what, and what a run holds in memory for it."""

    temperature = 1.0
    """The logits are divided by it: the policy is the distribution that is sampled from."""
    reference: Literal["held", "at_start"] | None = None
    """Whether the parameters that a run begins with are held, for `Source.next`, or needed once, for
    `Source.set_reference`."""
    teacher_in_update = False
    """Whether an update computes the teacher's distributions."""
    passes: tuple[Pass, ...] = ()
    progress: Mapping[str, str] = MappingProxyType({"loss": "loss"})
    """The metrics that a user sees on the terminal and in the table at the end, by their names there."""
    group = 1
    """How many sequences are compared with each other: `batch_size` is a multiple of it."""
    completions = 0
    """The completions of a rollout; 0: nothing is sampled to learn from."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def loss(
        self, head: Head, states: States, batch: Batch, teacher: States | None = None
    ) -> tuple[Float[Array, ""], Any]:
        """The batch's share of the step's loss, and arrays [B, T] without gradient, from which `metrics` are made."""

    @abstractmethod
    def metrics(self, batch: Batch, outputs: Any) -> Metrics:
        """The metrics of a whole batch, over the tokens with a weight, under TRL's names; NaN where there are none."""

    def inputs(self, tokens: jax.ShapeDtypeStruct, rows: jax.ShapeDtypeStruct) -> Any:
        """`Batch.inputs` as shapes, from the shapes of float32 arrays [B, T] (`tokens`) and [B] (`rows`)."""
        return None

    @abstractmethod
    def make_source(self, parts: Parts) -> Source:
        """The source of a run's batches; UserError where its data can't be learned from."""

    def evaluations(self, forward: Any, source: Source, poll: Callable[[], None]) -> Iterable[Evaluate]:
        """What is measured as often as `data.validation` says.

        All processes call `poll` between two batches; what it raises ends the measurement.
        """
        return ()


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm of a configuration."""
    module, _, name = config.rules.implementation.partition(":")
    return getattr(import_module(module), name)(config)
