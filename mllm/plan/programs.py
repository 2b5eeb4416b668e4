"""Builds the programs of a run from array shapes only, to compile them for a memory plan.

They are the programs that the run itself would compile, at their largest sizes: the longest prompts and completions,
and a whole batch.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mllm.algorithms.recipes import recipe_of
from mllm.config.rollout import RolloutConfig
from mllm.config.run import RunConfig
from mllm.data.batch import Batch
from mllm.model.delta_net import DeltaState
from mllm.model.layout import LOGICAL_AXES, Params
from mllm.model.load import Policy
from mllm.model.presets import PRESETS
from mllm.run.source_run import load_policy, load_teacher
from mllm.sampler import slots
from mllm.sampler.decoding import (
    Cache,
    DecodingWeights,
    Pages,
    abstract_cache,
    abstract_decoding_weights,
    decoding_graphdef,
)
from mllm.sampler.pages import page_size
from mllm.sampler.schedule import PIECE, pool_pages, prompts_a_batch
from mllm.sampler.slots import Prefilled
from mllm.sampler.states import abstract_states
from mllm.training.head import HeadInputs
from mllm.training.optimizer import make_optimizer, make_schedule
from mllm.training.step import abstract_state, make_logprob_pass, make_train_step

Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, trees of jax.ShapeDtypeStruct with shardings."""


class Programs:
    """The programs of training by one configuration on one mesh, and their shapes; UserError as `load_policy`."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        model = config.model
        if model.init == "pretrained" and known_by_name(model.source):
            config = config.model_copy(update={"model": model.model_copy(update={"init": "random", "tokenizer": None})})
        self.config = config
        self.policy = load_policy(config, mesh)
        self.teacher = self.load_teacher(mesh)
        self.optimizer = make_optimizer(config.optimizer, config.steps or 1)
        self.state = abstract_state(self.policy.trained, self.optimizer)
        self.model = nnx.merge(self.policy.graphdef, self.policy.params)
        self.array = self.model.layout.abstract
        self.shape = config.batch_shape
        recipe = recipe_of(config)
        self.demands = recipe.demands
        teacher = None if self.teacher is None else self.teacher.graphdef
        self.forward = recipe.forward(config, self.policy.graphdef, mesh, teacher)

    def load_teacher(self, mesh: Mesh) -> Policy | None:
        """The teacher; without its tokenizer, if its sizes are known by name."""
        if (teacher := self.config.frozen_teacher) is None:
            return None
        if not known_by_name(teacher.source):
            return load_teacher(self.config, mesh, self.policy.tokenizer)
        model = teacher.model(self.config.model).model_copy(update={"init": "random", "tokenizer": None})
        return load_policy(self.config, mesh, model)

    def logprob(self, of_teacher: bool = False) -> Program:
        """The log-prob pass over a rollout, or over preferences, by the policy or the teacher."""
        forward, params = self.forward, self.policy.params
        if of_teacher and self.teacher and self.forward.teacher:
            forward, params = self.forward.teacher, self.teacher.params
        return make_logprob_pass(forward), (params, self.batch(self.shape.total, bare=True))

    def update(self) -> Program:
        """The train step."""
        schedule = make_schedule(self.config.optimizer, self.config.steps or 1)
        function = make_train_step(self.forward, self.optimizer, schedule, self.config.seed)
        scored = [self.teacher.params] if self.teacher and self.demands.teacher_in_update else []
        return function, (self.state, self.batch(self.shape.total), self.policy.split(self.policy.params)[1], *scored)

    def head_of_logprob(self) -> Program:
        """The head alone, on a micro-batch of the log-prob pass."""
        return self.forward.head.logprobs, (self.head_states(self.policy), self.batch(self.shape.micro, bare=True))

    def head_of_update(self) -> Program:
        """The head alone with its gradients, except a frozen matrix's, on a micro-batch of the update."""
        lora = self.policy.lora
        trained = (0, 1) if lora is None or "head" in lora.targets else 0

        def loss(hidden: Any, weight: Any, copy: Any, batch: Batch, *teacher: HeadInputs) -> Any:
            return self.forward.head_loss(self.forward.head, HeadInputs(hidden, weight, copy), batch, *teacher)

        function = jax.value_and_grad(loss, trained, has_aux=True)
        scored = [self.head_states(self.teacher)] if self.teacher and self.demands.teacher_in_update else []
        return function, (*self.head_states(self.policy), self.batch(self.shape.micro), *scored)

    def batch(self, rows: int, bare: bool = False) -> Batch:
        """The largest batch; a `bare` batch lacks the further inputs of the algorithm's loss."""
        shape = (rows, self.shape.length)
        ints, floats = (self.array(shape, dtype, ("batch", "time")) for dtype in (jnp.int32, jnp.float32))
        inputs = None if bare else self.demands.inputs(floats, self.array((rows,), jnp.float32, ("batch",)))
        return Batch(ints, ints, ints, ints, floats, inputs)

    def head_states(self, policy: Policy) -> HeadInputs:
        """Hidden states of a micro-batch, the head's weight and its copy."""
        model = nnx.merge(policy.graphdef, policy.params)
        dtype, weight = model.dtype, (model.embed if model.head is None else model.head).get_value()
        hidden = (self.shape.micro, self.shape.length, policy.architecture.hidden_size)
        copy = weight if weight.dtype == dtype else self.array(weight.shape, dtype, LOGICAL_AXES["head"])
        return HeadInputs(self.array(hidden, dtype, ("batch", "time", "hidden")), weight, copy)

    def gradients(self) -> Params:
        """The gradients of an update: float32 if it sums several micro-batches, else in the parameters' dtypes."""
        whole = self.shape.micro == self.shape.total
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype if whole else jnp.float32, sharding=x.sharding),
            self.policy.trained,
        )


class RolloutPrograms:
    """The programs of a run's rollouts, and their shapes.

    The cache holds so many `tokens` over all devices; None: as many as all slots have at their limit.
    """

    def __init__(self, training: Programs, rollout: RolloutConfig, tokens: int | None = None) -> None:
        self.policy, self.model, self.array = training.policy, training.model, training.array
        self.rollout, self.tokens, self.shards = rollout, tokens, self.model.layout.row_shards
        config = training.config
        evaluated = config.task.heldout_of() * max(1, config.eval.samples) if config.eval and config.task else 0
        rows, shards = max(evaluated, training.demands.completions), self.shards
        self.slots = shards * max(1, min(-(-rows // shards), (rollout.max_slots or rows) // shards))
        """The number of sequences decoded at a time, in training or evaluation."""

    def prefill(self) -> Program:
        """The prefill of the widest batch of prompts; its keys, values and states are kept until slots are free."""
        width = self.rollout.max_prompt_length
        rows = prompts_a_batch(self.model, self.slots // self.shards, width) * self.shards
        prompts, lengths = (self.array(shape, jnp.int32, ("batch",)) for shape in ((rows, width), (rows,)))
        return jax.jit(partial(slots.prefill, self.policy.graphdef)), (self.policy.params, prompts, lengths)

    def decode(self) -> Program:
        """A chunk of decode steps in the most slots, with the largest cache."""
        rows, counts = self.slots, self.pages()
        ints, live = (self.array((rows,), dtype, ("batch",)) for dtype in (jnp.int32, jnp.bool))
        scalar, stop = self.array((), jnp.int32, ()), self.array((len(self.policy.stop_ids),), jnp.int32, (None,))
        stream = slots.Stream(stop, scalar, scalar, self.array((), jnp.bool, ()))
        # `slots.decode` is only a part of the compiled program, so its donated arguments don't count.
        function = partial(slots.decode, decoding_graphdef(self.model), options=self.rollout)
        pages, tail = self.tables(), abstract_cache(self.model, [rows] * len(counts), slots.CHUNK)
        state = slots.Slots(ints, ints, ints, ints, ints, live)
        caches = tail, self.states(), self.cache(), pages
        arguments = (self.weights()[0], *caches, state, stream, scalar)
        return jax.jit(function, donate_argnums=(1, 2)), arguments

    def extend(self) -> Program:
        """The prefill of a piece of a reply in all slots, with the largest cache; cache and states are donated."""
        ints = self.array((self.slots,), jnp.int32, ("batch",))
        shapes = (self.slots, (PIECE - 2) // page_size(self.rollout.total_length) + 2), (self.slots, PIECE)
        places, tokens = (self.array(shape, jnp.int32, ("batch",)) for shape in shapes)
        function = partial(slots.extend, decoding_graphdef(self.model))
        pages, caches = self.tables(), (self.cache(), self.states())
        arguments = self.weights()[0], *caches, pages, (places,) * len(pages), ints, tokens, ints, ints
        return jax.jit(function, donate_argnums=(1, 2)), arguments

    def pages(self) -> list[int]:
        """The pages of each kind of layers, over all devices."""
        tokens = None if self.tokens is None else self.tokens // self.shards
        counts = pool_pages(self.model, self.rollout, self.slots // self.shards, tokens)
        return [self.shards * count for count in counts]

    def tables(self) -> tuple[Pages, ...]:
        """The page tables of each kind of layers."""
        counts = zip(self.pages(), pool_pages(self.model, self.rollout, slots=1), strict=True)
        shapes = [((count,), (count,), (self.slots, most)) for count, most in counts]
        return tuple(Pages(*(self.array(shape, jnp.int32, ("batch",)) for shape in each)) for each in shapes)

    def cache(self) -> Cache:
        return abstract_cache(self.model, self.pages(), page_size(self.rollout.total_length))

    def states(self) -> tuple[DeltaState, ...]:
        """The states of delta nets of all slots."""
        return abstract_states(self.model, self.slots)

    def weights(self) -> tuple[DecodingWeights, Params]:
        """The results of `abstract_decoding_weights`: the decoding weights and the shared parameters."""
        return abstract_decoding_weights(self.model, self.policy.params, self.rollout.weights == "int8")

    def prefilled(self) -> Prefilled:
        """The layers' cache and states of a batch of prompts."""
        rows, width = self.prefill()[1][1].shape
        cache = abstract_cache(self.model, [rows] * len(self.model.config.kinds), width)
        return Prefilled(cache, abstract_states(self.model, rows))


def known_by_name(source: str | None) -> bool:
    """Whether the sizes of a model are known without a file."""
    return source in PRESETS and not Path(source).is_dir()
