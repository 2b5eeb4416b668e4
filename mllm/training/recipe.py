"""The interface of an algorithm: a `Recipe`, made from settings, and the `Parts` for its data source.

Each algorithm has a folder in mllm/algorithms. No other code depends on the algorithm's name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from mllm.config.run import RunConfig
from mllm.data.batch import Batch
from mllm.data.source import Source
from mllm.data.tasks.task import Task
from mllm.model.tokenizer import Renderer
from mllm.rewards.runner import RewardRunner
from mllm.sampler.sampler import Sampler
from mllm.training.head import Head, HeadInputs
from mllm.training.step import Forward, Metrics

Outputs = TypeVar("Outputs", bound=tuple[Any, ...])
Made = TypeVar("Made", bound=tuple[Any, ...], covariant=True)
"""Arrays [B, T] of a micro-batch without gradient, a NamedTuple: the input of the metrics."""
Shape = jax.ShapeDtypeStruct


class Pass(NamedTuple):
    """A log-prob pass over a rollout's batches, or over preferences, before their updates: for the plan."""

    policy: Literal["policy", "teacher"]
    """The model that computes the log-probabilities."""
    beside_optimizer: bool = True
    """Whether the optimizer's moments are in memory by then."""


@runtime_checkable
class Loss(Protocol[Made]):
    """The batch's share of the step's loss, and arrays without gradient for the metrics."""

    def __call__(
        self, head: Head, states: HeadInputs, batch: Batch, teacher: HeadInputs | None = None
    ) -> tuple[Float[Array, ""], Made]: ...


def no_inputs(tokens: Shape, rows: Shape) -> None:
    """`Batch.inputs` of an algorithm without further inputs."""


@dataclass(frozen=True)
class Demands:
    """The programs and parameters that an algorithm needs in memory."""

    temperature: float = 1.0
    """Divisor of the logits: the policy is the distribution that is sampled from."""
    reference: Literal["held", "at_start"] | None = None
    """Whether the run's initial parameters are kept in memory (for `Source.next`), or needed once (for
    `ReferencedSource.set_reference`)."""
    teacher_in_update: bool = False
    """Whether an update computes the teacher's distributions."""
    passes: tuple[Pass, ...] = ()
    group: int = 1
    """The number of sequences that are compared with each other; divides `batch_size`."""
    completions: int = 0
    """The completions of a rollout; 0: the algorithm doesn't sample."""
    inputs: Callable[[Shape, Shape], tuple[Any, ...] | None] = no_inputs
    """`Batch.inputs` as shapes, from the shapes of float32 arrays [B, T] and [B]."""


@dataclass(frozen=True)
class Sampling:
    """The task, sampler and rewards of a run that samples completions."""

    task: Task
    sampler: Sampler
    rewards: RewardRunner


@dataclass(frozen=True)
class Parts:
    """The loaded parts of a run: an algorithm makes its source of them."""

    mesh: Mesh
    forward: Forward
    renderer: Renderer
    """The renderer of the examples; the sampler has a renderer for prompts."""
    examples_task: Task | None
    """The task with solutions as examples; None: `data.source` names the examples."""
    sampling: Sampling | None = None
    """The parts that sample completions for training; None: the run trains on `data`."""


@dataclass(frozen=True)
class Recipe(Generic[Outputs]):
    """An algorithm's loss, metrics, source and memory demands."""

    loss: Loss[Outputs]
    metrics: Callable[[Batch, Outputs], Metrics]
    """The metrics of a whole batch, over the tokens that count, under TRL's names; NaN without such tokens."""
    source: Callable[[Parts], Source]
    """Makes the source of a run's batches; UserError if the data can't be used."""
    demands: Demands = Demands()
    progress: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({"loss": "loss"}))
    """The metrics on the terminal and in the table at the end: printed name -> metric."""

    def forward(self, config: RunConfig, graphdef: Any, mesh: Mesh, teacher: Any = None) -> Forward:
        """Model, head and loss of a run, and its teacher, by their graphdefs; UserError if `head.impl` is for other
        devices."""
        head = Head(config.head, mesh, self.demands.temperature)
        return Forward(graphdef, mesh, head, config.batch_shape, self.loss, self.metrics, teacher)
