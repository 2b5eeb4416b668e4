"""How far bfloat16 is from float32, and decode steps are from the trainer's pass, on a model of a real one's size.

The model is as wide as SmolLM2-135M (arXiv:2502.02737), nearly as deep, and random, with what makes rounding show in
real models: a few channels that are large in every token, weights of norms that differ from channel to channel, layers
that add little to what the residual stream holds. `python tests/model/rounding.py` prints the table of docs/log.md.
"""

from functools import cache
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mllm.model import decoder
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder, rms_norm
from mllm.model.decoding import abstract_cache, decode_token, decoding_weights, merge
from mllm.model.layout import parameter_name

SIZES = {
    "model_type": "qwen2",
    "vocab_size": 2048,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
CONFIG = Architecture.from_hf(SIZES, "SIZES")
TOKENS = 32
LARGE = np.array([30, -18, 12, -9])
"""What the large channels hold in every token; the others begin with a deviation of 1."""
DEVIATIONS = {"embed": 1, "q_bias": 0.5, "k_bias": 0.5, "v_bias": 0.1}


class Rounding(NamedTuple):
    """The dtypes of products and residual stream, and whether norms round before the scale, too, as they once did."""

    dtype: str = "bfloat16"
    residual_dtype: str = "bfloat16"
    twice: bool = False


EXACT = Rounding("float32", "float32")
BEFORE = Rounding(twice=True)
NOW = Rounding(residual_dtype="float32")


@cache
def parameters() -> nnx.State:
    rng = np.random.default_rng(0)
    large = rng.choice(CONFIG.hidden_size, len(LARGE), replace=False)
    growth = np.sqrt(1 + np.sum(LARGE**2) / CONFIG.hidden_size)

    def make(path, leaf):
        name = parameter_name(path).removeprefix("layers.")
        values = rng.standard_normal(leaf.shape, np.float32)
        if name.endswith("norm"):  # gives each channel a size near 1
            values = growth * np.exp(0.4 * values)
            values[..., large] = growth / np.abs(LARGE)
        else:
            values *= DEVIATIONS.get(name, leaf.shape[-1] ** -0.5)
        if name in ("o_weight", "down_weight"):
            values *= 0.15
        if name == "embed":
            values[:, large] = LARGE
        return jnp.asarray(values, jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(make, nnx.state(Decoder.abstract(CONFIG)))


def norm_rounded_twice(x, weight, eps, dtype):
    unscaled = rms_norm(x, nnx.Param(jnp.ones_like(weight[...])), eps, dtype)
    return unscaled * weight[...].astype(dtype)


def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (1, TOKENS)))


def compute(function, rounding, *arguments):
    """The array of `function`, compiled with these norms."""
    norm = norm_rounded_twice if rounding.twice else rms_norm
    with mock.patch.object(decoder, "rms_norm", norm), jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(function)(*arguments))


def abstract_model(rounding):
    return Decoder.abstract(CONFIG, dtype=rounding.dtype, residual_dtype=rounding.residual_dtype)


@cache
def one_pass(rounding: Rounding) -> np.ndarray:
    """The vocabulary's log-probabilities after each of TOKENS tokens, [TOKENS, V], by the model's call."""
    graphdef, _ = nnx.split(abstract_model(rounding))

    def logprobs(params):
        model = nnx.merge(graphdef, params)
        hidden = model(tokens(), jnp.arange(TOKENS)[None], jnp.ones_like(tokens()))[0]
        return vocabulary_logprobs(model, hidden)

    return compute(logprobs, rounding, parameters())


def vocabulary_logprobs(model: Decoder, hidden: jax.Array) -> jax.Array:
    weight = model.head_weight.astype(hidden.dtype)
    return jax.nn.log_softmax(jnp.einsum("td,vd->tv", hidden, weight, preferred_element_type=jnp.float32))


@cache
def decode_steps(rounding: Rounding) -> np.ndarray:
    """The same by one decode step after the other."""
    model = abstract_model(rounding)
    graphdef, _ = nnx.split(model)

    def logprobs(weights):
        def step(cache, place):
            hidden, cache = decode_token(graphdef, weights, cache, tokens()[:, place], place[None], place)
            return cache, hidden[0]

        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_cache(model, 1, TOKENS))
        _, hidden = jax.lax.scan(step, empty, jnp.arange(TOKENS))
        return vocabulary_logprobs(merge(graphdef, weights, 0), hidden)

    return compute(logprobs, rounding, decoding_weights(graphdef, parameters()))


def error(rounding: Rounding) -> float:
    """How far one pass is from float32: nats a sampled token, on average."""
    return distance(one_pass(rounding), one_pass(EXACT))


def disagreement(rounding: Rounding) -> float:
    """How far steps are from one pass: nats a sampled token, on average."""
    return distance(one_pass(rounding), decode_steps(rounding))


def distance(some: np.ndarray, others: np.ndarray) -> float:
    """The mean of |some - others| over tokens that are sampled as float32 would."""
    return float(np.mean(np.sum(np.exp(one_pass(EXACT)) * np.abs(some - others), axis=-1)))


if __name__ == "__main__":
    print("| products | residual stream | norms round | bfloat16 against float32 | one pass against decode steps |")
    print("| --- | --- | --- | ---: | ---: |")
    for rounding in (BEFORE, BEFORE._replace(residual_dtype="float32"), Rounding(), NOW, EXACT):
        shown = rounding.dtype, rounding.residual_dtype, "twice" if rounding.twice else "once"
        print(f"| {' | '.join(shown)} | {error(rounding):.2g} | {disagreement(rounding):.2g} |", flush=True)
