"""The programs of a run, from shapes alone: what the compiler needs to say how much memory they take.

Each is what the run itself would compile, at its largest: the longest prompts and completions, a whole batch.
"""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float

from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.model.architecture import PRESETS
from mllm.model.layout import Params, map_with_axes
from mllm.model.load import load_policy
from mllm.rl import rollout
from mllm.rl.rollout import DecodeInputs, DecodeState
from mllm.train.optimizer import make_optimizer, make_schedule
from mllm.train.step import Forward, abstract_state, make_logprob_pass, make_train_step

Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, trees of jax.ShapeDtypeStruct with shardings."""


def program(mesh: Mesh, *, config: dict[str, Any], name: str) -> Program:
    """The program of `Programs` with this name; `config` as `Config.model_dump` gives it."""
    return getattr(Programs(Config.model_validate(config), mesh), name)()


class Programs:
    """The programs of one configuration on one mesh, and the shapes that they share; UserError as `load_policy`.

    `kind` is how the update calls the model and the head; tools/memory.py compares several.
    """

    def __init__(self, config: Config, mesh: Mesh, kind: type[Forward] = Forward) -> None:
        self.config = config
        self.mesh = mesh
        self.kind = kind
        self.policy = load_policy(without_files(config), mesh)
        self.optimizer = make_optimizer(config.optimizer, config.steps)
        self.state = abstract_state(self.policy.params, self.optimizer)
        self.model = nnx.merge(self.policy.graphdef, self.policy.params)
        self.layout = self.model.layout
        self.micro_rows = config.micro_batch_size or config.batch_size

    # --- the programs -------------------------------------------------------------------------------------------------

    def prefill(self) -> Program:
        """The prompts of a rollout into the cache."""
        assert self.config.rollout is not None
        prompts = self.array((self.decoded_rows, self.config.rollout.max_prompt_length), jnp.int32, ("batch", None))
        return jax.jit(self.sampling(rollout.prefill)), (self.decoding_weights(), prompts, self.decode_inputs())

    def decode(self) -> Program:
        """A chunk of the decode loop; completions and cache take the place of the ones before."""
        # `rollout.decode` is only a part of the program that is compiled, so what it donates doesn't count.
        chunk = jax.jit(self.sampling(rollout.decode), donate_argnums=1)
        return chunk, (self.decoding_weights(), self.decode_state, self.decode_inputs(), self.array((), jnp.int32, ()))

    def sampling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`rollout.prefill` or `rollout.decode`, with the run's model and options bound."""
        return partial(function, self.policy.graphdef, options=self.config.rollout, greedy=False)

    def logprob(self) -> Program:
        """The log-prob pass over a rollout."""
        function = make_logprob_pass(self.policy.graphdef, self.config, self.mesh)
        return function, (self.state.params, self.batch(self.config.batch_size, policies=False))

    def update(self) -> Program:
        """The train step."""
        schedule = make_schedule(self.config.optimizer, self.config.steps)
        function = make_train_step(self.policy.graphdef, self.optimizer, schedule, self.config, self.mesh, self.kind)
        return function, (self.state, self.batch(self.config.batch_size))

    def head_of_logprob(self) -> Program:
        """The head alone, on a micro-batch of the log-prob pass."""
        forward = Forward(self.policy.graphdef, self.config, self.mesh)
        return forward.head_logprobs, (*self.head_operands(), self.batch(self.micro_rows, policies=False))

    def head_of_update(self) -> Program:
        """The head alone with its gradients, on a micro-batch of the update."""
        forward = self.kind(self.policy.graphdef, self.config, self.mesh)
        function = jax.value_and_grad(forward.head_loss, (0, 1), has_aux=True)
        return function, (*self.head_operands(), self.batch(self.micro_rows))

    # --- their shapes -------------------------------------------------------------------------------------------------

    def array(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        return self.layout.abstract(shape, dtype, axes)

    def batch(self, rows: int, policies: bool = True) -> Batch:
        """The largest batch; with the log-probabilities under other policies, if the objective needs them."""
        ints, floats = (self.array((rows, self.length), dtype, ("batch", "time")) for dtype in (jnp.int32, jnp.float32))
        grpo = self.config.grpo
        if grpo is None:
            return Batch(ints, ints, ints, ints, floats)
        old = floats if policies and grpo.num_iterations > 1 else None
        reference = floats if policies and grpo.beta > 0 else None
        return Batch(ints, ints, ints, ints, floats, floats, floats, old, reference)

    @property
    def length(self) -> int:
        if self.config.data is not None:
            return self.config.data.max_length
        assert self.config.rollout is not None
        return self.config.rollout.max_prompt_length + self.config.rollout.max_completion_length

    @property
    def decoded_rows(self) -> int:
        """Rows that are decoded at a time, in training or in evaluation."""
        config = self.config
        assert config.rollout is not None
        evaluated = 0 if config.eval is None or config.task is None else config.eval.prompts or config.task.heldout
        rows = config.rollout.batch_size or max(evaluated, config.batch_size if config.algorithm == "grpo" else 0)
        return rows + -rows % self.layout.row_shards

    def decode_inputs(self) -> DecodeInputs:
        per_row, scalar = self.array((self.decoded_rows,), jnp.int32, ("batch",)), self.array((), jnp.int32, ())
        stop = self.array((len(self.policy.stop_ids),), jnp.int32, (None,))
        return DecodeInputs(per_row, per_row, stop, scalar, scalar, scalar)

    @cached_property
    def decode_state(self) -> DecodeState:
        """What the decode loop carries."""
        function, arguments = self.prefill()
        state = jax.eval_shape(function, *arguments)
        return map_with_axes(lambda x, axes: self.array(x.shape, x.dtype, axes), rollout.STATE_AXES, state)

    def decoding_weights(self) -> Params:
        """The parameters as `rollout.decoding_weights` gives them."""
        return self.layout.abstract_gathered(self.policy.params, self.model.dtype)

    def head_operands(self) -> tuple[Float[Any, "B T D"], Float[Any, "V D"]]:
        shape = (self.micro_rows, self.length, self.policy.architecture.hidden_size)
        weight = self.model.embed if self.model.head is None else self.model.head
        return self.array(shape, self.model.dtype, ("batch", "time", "hidden")), weight.get_value()

    def gradients(self) -> Params:
        """The gradients that an update sums up: in float32 over micro-batches, else as the parameters are."""
        whole = self.micro_rows == self.config.batch_size
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype if whole else jnp.float32, sharding=x.sharding),
            self.policy.params,
        )

    def logits(self) -> jax.ShapeDtypeStruct:
        return self.array((self.decoded_rows, self.policy.architecture.vocab_size), jnp.float32, ("batch", "vocab"))

    def cache(self) -> tuple[Float[Any, "L B S K H"], Float[Any, "L B S K H"]]:
        return self.decode_state.cache.keys, self.decode_state.cache.values


def without_files(config: Config) -> Config:
    """The configuration with random parameters, if the model's sizes are known by name."""
    model = config.model
    if model.init == "random" or model.source not in PRESETS or Path(model.source).is_dir():
        return config
    return config.model_copy(update={"model": model.model_copy(update={"init": "random", "tokenizer": None})})
