"""A residual stream in float32 halves, at least, what bfloat16 costs: against float32, and between steps and one pass.

The model is deep and random, with what makes rounding show in real ones: channels that are large in every token,
norms' weights that differ from channel to channel, layers that add little to what the residual stream holds.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny import ARCHITECTURE

from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.model.decoding import abstract_cache, decode_token, decoding_weights
from mllm.model.layout import parameter_name

SIZES = {"hidden_size": 128, "num_hidden_layers": 16, "tie_word_embeddings": False}
CONFIG = Architecture.from_hf({**ARCHITECTURE, **SIZES}, "test")
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (1, 24)))
LARGE = {5: 30, 40: -18, 70: 12}
"""What the large channels hold in every token; the others begin with a deviation of 1."""


def parameters() -> nnx.State:
    rng, channels, sizes = np.random.default_rng(0), [*LARGE], np.array([*LARGE.values()])
    growth = np.sqrt(1 + np.sum(sizes**2) / CONFIG.hidden_size)

    def make(path, leaf):
        name = parameter_name(path).removeprefix("layers.")
        values = rng.standard_normal(leaf.shape, np.float32)
        if name.endswith("norm"):  # gives each channel a size near 1
            values = growth * np.exp(0.4 * values)
            values[..., channels] = growth / np.abs(sizes)
        elif name == "embed":
            values[:, channels] = sizes
        else:
            values *= leaf.shape[-1] ** -0.5 * (0.15 if name in ("o_weight", "down_weight") else 1)
        return jnp.asarray(values, jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(make, nnx.state(Decoder.abstract(CONFIG)))


def logprobs(dtype: str, residual_dtype: str, in_steps: bool = False) -> np.ndarray:
    """The vocabulary's log-probabilities after each token, [T, V], by one pass or one decode step after the other."""
    model = Decoder.abstract(CONFIG, dtype=dtype, residual_dtype=residual_dtype)
    graphdef, _ = nnx.split(model)
    places = jnp.arange(TOKENS.shape[1])

    def step(weights, cache, place):
        hidden, cache = decode_token(graphdef, weights, cache, TOKENS[:, place], place[None], place)
        return cache, hidden[0]

    @jax.jit
    def run(params):
        if in_steps:
            weights = decoding_weights(graphdef, params)
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_cache(model, 1, len(places)))
            _, hidden = jax.lax.scan(partial(step, weights), empty, places)
        else:
            hidden = nnx.merge(graphdef, params)(TOKENS, places[None], jnp.ones_like(TOKENS))[0]
        weight = nnx.merge(graphdef, params).head_weight.astype(hidden.dtype)
        return jax.nn.log_softmax(jnp.einsum("td,vd->tv", hidden, weight, preferred_element_type=jnp.float32))

    return np.asarray(run(parameters()))


def test_a_residual_stream_in_float32_halves_what_bfloat16_costs():
    """In nats a token that is sampled as float32 would, on average."""
    exact = logprobs("float32", "float32")

    def cost(got, expected=exact):
        return np.mean(np.sum(np.exp(exact) * np.abs(got - expected), axis=-1))

    narrow, wide = (logprobs("bfloat16", residual) for residual in ("bfloat16", "float32"))
    assert 0.005 < cost(narrow) < 0.1, "real models have 0.02 to 0.03"
    assert cost(wide) < cost(narrow) / 2
    assert cost(wide, logprobs("bfloat16", "float32", in_steps=True)) < cost(narrow) / 2
