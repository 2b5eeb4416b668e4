"""The programs of a run, from shapes alone: what the compiler needs to say how much memory they take.

Nothing is computed and no parameter exists. Each is what the run itself would compile, at its largest: the longest
prompts and completions, a whole batch. `program` is for `mllm.plan.assignment`, which compiles in another process.
Left out: small change such as the optimizer's first state.
"""

from collections.abc import Callable
from functools import partial
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
from mllm.model.decoder import CACHE, LOGICAL_AXES, parameter_name
from mllm.model.layout import gathered_axes
from mllm.model.load import load_policy
from mllm.rl.rollout import DecodeInputs, decode, map_with_axes, prefill
from mllm.train.optimizer import make_optimizer, make_schedule
from mllm.train.step import Forward, abstract_state, make_logprob_pass, make_train_step

Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, trees of jax.ShapeDtypeStruct with shardings."""


def program(mesh: Mesh, *, config: dict[str, Any], name: str, kind: type[Forward] = Forward) -> Program:
    """That of `Programs` with this name; `config` as `Config.model_dump` gives it."""
    return getattr(Programs(Config.model_validate(config), mesh, kind), name)()


class Programs:
    """The programs of one configuration on one mesh, and the shapes that they share.

    Raises:
        UserError: as `load_policy`. A model known by name needs no files.
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

    def prefill(self) -> Program:
        return jax.jit(self.sampling(prefill)), (self.decoding_weights(), self.prompts(), self.decode_inputs())

    def decode(self) -> Program:
        """A turn of the loop; completions and cache take the place of those before."""
        function, arguments = self.prefill()
        state = jax.eval_shape(function, *arguments)
        state = map_with_axes(lambda x, axes: self.array(x.shape, x.dtype, axes), state)
        # What `decode` itself gives away counts for nothing: it is only a part of the program that is compiled.
        turn = jax.jit(self.sampling(decode), donate_argnums=1)
        return turn, (self.decoding_weights(), state, self.decode_inputs(), self.array((), jnp.int32, ()))

    def sampling(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """`prefill` or `decode`, with the run's model and options bound."""
        return partial(program, self.policy.graphdef, options=self.config.rollout, greedy=False)

    def logprob(self) -> Program:
        function = make_logprob_pass(self.policy.graphdef, self.config, self.mesh)
        return function, (self.state.params, self.batch(self.config.batch_size, policies=False))

    def update(self) -> Program:
        schedule = make_schedule(self.config.optimizer, self.config.steps)
        function = make_train_step(self.policy.graphdef, self.optimizer, schedule, self.config, self.mesh, self.kind)
        return function, (self.state, self.batch(self.config.batch_size))

    def head_of_logprob(self) -> Program:
        """The head alone, at a micro-batch."""
        forward = Forward(self.policy.graphdef, self.config, self.mesh)
        return forward.head_logprobs, (*self.head_operands(), self.batch(self.micro_rows, policies=False))

    def head_of_update(self) -> Program:
        """The head alone with its gradients, at a micro-batch."""
        forward = self.kind(self.policy.graphdef, self.config, self.mesh)
        function = jax.value_and_grad(forward.head_loss, (0, 1), has_aux=True)
        return function, (*self.head_operands(), self.batch(self.micro_rows))

    def array(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.layout.sharding(axes))

    def batch(self, rows: int, policies: bool = True) -> Batch:
        """The largest batch; with the log-probabilities under other policies, if the objective asks for them."""
        ints, floats = (self.array((rows, self.length), dtype, ("batch", "time")) for dtype in (jnp.int32, jnp.float32))
        grpo = self.config.grpo
        if grpo is None:
            return Batch(ints, ints, ints, ints, floats)
        old = floats if policies and grpo.num_iterations > 1 else None
        reference = floats if policies and grpo.beta > 0 else None
        return Batch(ints, ints, ints, ints, floats, floats, floats, old, reference)

    @property
    def length(self) -> int:
        """Tokens of a row in training."""
        return self.slots if self.config.data is None else self.config.data.max_length

    @property
    def slots(self) -> int:
        """Tokens of a row in the cache."""
        assert self.config.rollout is not None
        return self.config.rollout.max_prompt_length + self.config.rollout.max_completion_length

    def prompts(self) -> jax.ShapeDtypeStruct:
        assert self.config.rollout is not None
        return self.array((self.decoded_rows, self.config.rollout.max_prompt_length), jnp.int32, ("batch", None))

    def decode_inputs(self) -> DecodeInputs:
        of_rows, scalar = self.array((self.decoded_rows,), jnp.int32, ("batch",)), self.array((), jnp.int32, ())
        stop = self.array((len(self.policy.stop_ids),), jnp.int32, (None,))
        return DecodeInputs(of_rows, of_rows, stop, scalar, scalar, scalar)

    @property
    def decoded_rows(self) -> int:
        """Rows that are decoded at a time, in training or in evaluation."""
        config = self.config
        assert config.rollout is not None
        judged = 0 if config.eval is None or config.task is None else config.eval.prompts or config.task.heldout
        trained = config.batch_size if config.algorithm == "grpo" else 0
        rows = config.rollout.batch_size or max(judged, trained)
        return rows + -rows % self.layout.row_shards

    def decoding_weights(self) -> Any:
        """As `rollout.decoding_weights` lays them out."""

        def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return self.array(leaf.shape, self.model.dtype, gathered_axes(LOGICAL_AXES[parameter_name(path)]))

        return jax.tree_util.tree_map_with_path(place, self.policy.params)

    def head_operands(self) -> tuple[Float[Any, "B T D"], Float[Any, "V D"]]:
        shape = (self.micro_rows, self.length, self.policy.architecture.hidden_size)
        weight = self.model.embed if self.model.head is None else self.model.head
        return self.array(shape, self.model.dtype, ("batch", "time", "hidden")), weight.get_value()

    def gradients(self) -> Any:
        """What an update sums up: in float32 over micro-batches, else as the parameters are."""
        whole = self.micro_rows == self.config.batch_size
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype if whole else jnp.float32, sharding=x.sharding),
            self.policy.params,
        )

    def logits(self) -> jax.ShapeDtypeStruct:
        """What tokens are sampled from."""
        shape = (self.decoded_rows, self.policy.architecture.vocab_size)
        return self.array(shape, jnp.float32, ("batch", "vocab"))

    def cache(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Keys and values of a rollout's rows, as they lie."""
        sizes = self.policy.architecture
        shape = (sizes.num_hidden_layers, self.decoded_rows, self.slots, sizes.num_key_value_heads, sizes.head_dim)
        return (self.array(shape, self.model.dtype, CACHE),) * 2


def without_files(config: Config) -> Config:
    """The configuration with random parameters, if the model's sizes are known by name."""
    model = config.model
    if model.init == "random" or model.source not in PRESETS or Path(model.source).is_dir():
        return config
    return config.model_copy(update={"model": model.model_copy(update={"init": "random", "tokenizer": None})})
