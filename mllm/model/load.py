"""The run's model: architecture, tokenizer, stop ids and first parameters, as the configuration asks for them."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from mllm.config.schema import Config, ModelConfig
from mllm.errors import UserError
from mllm.model import tokenizer as tokenizers
from mllm.model import weights
from mllm.model.architecture import PRESETS, Qwen2Config
from mllm.model.attention import Attention, choose
from mllm.model.decoder import LOGICAL_AXES, Qwen2, parameter_name
from mllm.model.layout import Layout

MOST_PARAMETERS = 10**13


class Policy(NamedTuple):
    config: ModelConfig
    architecture: Qwen2Config
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    graphdef: Any
    params: Any
    """Shapes, dtypes and shardings; nothing is held."""
    folder: Path | None
    """Where the pretrained parameters lie; None: they are random."""
    seed: int

    def initial_params(self) -> Any:
        """The parameters that a run begins with, laid out over the mesh."""
        if self.folder is not None:
            return weights.load(self.folder, self.architecture, self.params)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.params)

        @jax.jit(out_shardings=shardings)
        def create() -> Any:
            return nnx.state(make_model(self.config, self.architecture, nnx.Rngs(self.seed)))

        return create()


def load_policy(config: Config, mesh: Mesh) -> Policy:
    """Read everything but the parameters, and check that it fits together.

    Raises:
        UserError: the model's or tokenizer's files can't be had or don't fit, or the mesh doesn't divide the model,
            or the attention that is asked for can't run.
    """
    model = config.model
    folder = find_folder(model)
    architecture = find_architecture(model, folder)
    check_lengths(config, architecture)
    layout = Layout.of(mesh, architecture)
    packed = config.data is not None and config.data.packing
    attention = choose(model.attention, architecture, mesh, model.dtype, packed)
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: make_model(model, architecture, nnx.Rngs(0), attention, layout))
    )
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    if count > MOST_PARAMETERS:
        raise UserError(
            f"{'model.architecture' if folder is None else folder / 'config.json'}: {count:,} parameters "
            f"are more than any model has: correct its sizes"
        )
    tokenizer = tokenizers.load(find_tokenizer(model, folder))
    tokenizers.check_fits(tokenizer, architecture.vocab_size)
    stop = () if config.rollout is None else config.rollout.stop
    return Policy(
        config=model,
        architecture=architecture,
        tokenizer=tokenizer,
        stop_ids=tokenizers.stop_ids(tokenizer, folder, stop),
        graphdef=graphdef,
        params=lay_out(params, layout),
        folder=folder if model.init == "pretrained" else None,
        seed=config.seed,
    )


def make_model(
    config: ModelConfig,
    architecture: Qwen2Config,
    rngs: nnx.Rngs,
    attention: Attention | None = None,
    layout: Layout | None = None,
) -> Qwen2:
    return Qwen2(
        architecture,
        rngs=rngs,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        remat=config.remat,
        attention=attention,
        layout=layout,
    )


def find_folder(config: ModelConfig) -> Path | None:
    """The folder of the model's files; None where random parameters need none."""
    if config.source is None:
        return None
    if config.init == "random" and not os.path.isdir(os.path.expanduser(config.source)):
        if config.source in PRESETS:
            return None
        raise UserError(
            f"model.source: {config.source} is neither a folder nor one of the architectures known by name "
            f"({', '.join(PRESETS)})"
        )
    return weights.resolve(config.source)


def find_architecture(config: ModelConfig, folder: Path | None) -> Qwen2Config:
    if folder is not None:
        return weights.read_config(folder)
    if config.architecture is not None:
        return Qwen2Config.from_hf(config.architecture, "model.architecture", closed=True)
    assert config.source is not None
    return PRESETS[config.source]


def check_lengths(config: Config, architecture: Qwen2Config) -> None:
    """Raise UserError where a row may be longer than the model's positions were trained for."""
    rows = {} if config.data is None else {"data.max_length": config.data.max_length}
    if config.rollout is not None:
        both = config.rollout.max_prompt_length + config.rollout.max_completion_length
        rows["rollout.max_prompt_length + max_completion_length"] = both
    for key, length in rows.items():
        if length > architecture.max_position_embeddings:
            raise UserError(
                f"{key}: {length} tokens, but the model has max_position_embeddings "
                f"{architecture.max_position_embeddings}: lower it"
            )


def find_tokenizer(config: ModelConfig, folder: Path | None) -> str:
    if config.tokenizer is not None:
        return config.tokenizer
    return "bytes" if folder is None else str(folder)


def lay_out(params: Any, layout: Layout) -> Any:
    """The abstract parameters, each with its sharding from the mesh's table."""

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = LOGICAL_AXES[parameter_name(path)]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.sharding(axes))

    return jax.tree_util.tree_map_with_path(place, params)
