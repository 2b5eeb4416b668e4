"""The trainer's interface to the head, for the hidden states of a batch. No other file of `mllm` calls the head."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

import lm_head
from lm_head import EngineChoice, HeadSharding, TokenLogprobs
from mllm.config.model import HeadConfig, ModelConfig
from mllm.config.run import BatchShape
from mllm.data.batch import Batch
from mllm.errors import UserError
from mllm.model.architecture import Architecture
from mllm.model.layout import LOGICAL_AXES
from mllm.parallel.mesh import sharding


class HeadInputs(NamedTuple):
    """A model's arrays for the head: hidden states, the vocabulary matrix, and its copy, which is multiplied."""

    hidden: Float[Array, "B T D"]
    weight: Float[Array, "V D"]
    copy: Float[Array, "V D"]


class Head:
    """The head's functions with the settings of a run; UserError if `head.impl` is for other devices."""

    def __init__(self, config: HeadConfig, mesh: Mesh, temperature: float = 1.0) -> None:
        """`temperature` is the sampler's, since the policy is the distribution that is sampled from."""
        impl, platform = config.impl or "", mesh.devices.flat[0].platform
        needed = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}.get(impl, platform)
        if needed != platform:
            needs = f"{impl} needs a {needed.upper()}"
            raise UserError(f"head.impl: {needs}, and the devices here are of the kind {platform}: remove it")
        self.workspace = None if config.workspace_mib is None else config.workspace_mib * 2**20
        self.options: dict[str, Any] = {
            "temperature": temperature,
            "impl": config.impl,
            "sharding": head_sharding(mesh),
        }

    def logprobs(self, states: HeadInputs, batch: Batch) -> TokenLogprobs:
        """Log-probability, lse and entropy of each label, [B, T] each, in nats; 0 where `weights` is 0."""
        options = {"where": batch.weights > 0, "weight_copy": states.copy, "dtype": states.hidden.dtype}
        return lm_head.token_logprobs(states.hidden, states.weight, batch.labels, **options, **self.options)

    def loss(
        self,
        states: HeadInputs,
        batch: Batch,
        objective: Callable[..., Array],
        *operands: Array,
        teacher: HeadInputs | None = None,
        **divergence: Any,
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        """The weighted sum of `objective(logprob, entropy, *operands)`, and the tokens' statistics without gradient.

        With a `teacher` the objective may name the `divergence` from it, of the given `kind` and `beta`.
        """
        teacher_arrays: dict[str, Any] = (
            {} if teacher is None else {"teacher_hidden": teacher.hidden, "teacher_weight": teacher.copy}
        )
        loss, tokens = lm_head.token_loss(
            states.hidden,
            states.weight,
            batch.labels,
            objective,
            *operands,
            weights=batch.weights,
            weight_copy=states.copy,
            workspace=self.workspace,
            dtype=states.hidden.dtype,
            **teacher_arrays,
            **divergence,
            **self.options,
        )
        return loss, jax.lax.stop_gradient(tokens)

    def likeliest(self, states: HeadInputs, where: Bool[Array, "B T"]) -> Int[Array, "B T"]:
        """The likeliest token at each position."""
        options = {"where": where, "dtype": states.hidden.dtype, "sharding": self.options["sharding"]}
        return lm_head.likeliest_tokens(states.hidden, states.copy, **options)


def head_sharding(mesh: Mesh) -> HeadSharding:
    """The shardings of the head's arguments: tokens as the batch, the vocabulary matrix as its parameter."""
    (tokens,) = sharding(mesh, ("batch",)).spec
    vocabulary, features = sharding(mesh, LOGICAL_AXES["head"]).spec
    return HeadSharding(mesh, tokens, vocabulary, features)


def choose_head(
    head: HeadConfig, model: ModelConfig, shape: BatchShape, architecture: Architecture, mesh: Mesh
) -> EngineChoice:
    """The head's implementation in the train step, and why no faster implementation is used."""
    if head.impl is not None:
        return EngineChoice(head.impl, "head.impl asks for it")
    dtype = jnp.dtype(model.dtype)
    hidden = jax.ShapeDtypeStruct((shape.micro, shape.length, architecture.hidden_size), dtype)
    weight = jax.ShapeDtypeStruct((architecture.vocab_size, architecture.hidden_size), model.param_dtype)
    return lm_head.choose_impl(hidden, weight, dtype=dtype, sharding=head_sharding(mesh))
