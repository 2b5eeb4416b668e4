"""Loads a configured model without its parameters; `Policy` reads the parameters later."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mllm.config.model import ModelConfig
from mllm.config.run import RunConfig
from mllm.config.task import Form
from mllm.errors import UserError
from mllm.model import peft, weights
from mllm.model.architecture import Architecture
from mllm.model.attention import AttentionChoice, choose, platform
from mllm.model.decoder import Decoder
from mllm.model.folder import SMALL, local_folder, read_json
from mllm.model.int8 import is_int8, quantize
from mllm.model.layout import Layout, Params, count
from mllm.model.lora import Lora, initial_adapters, split_adapters
from mllm.model.presets import PRESETS
from mllm.model.tokenizer import Tokenizer, check_fits, load_tokenizer, stop_ids, stop_strings
from mllm.storage import is_bucket

MAX_PARAMETERS = 10**13


@dataclass(frozen=True)
class Policy:
    """A model that can be trained or sampled from, without its parameters."""

    architecture: Architecture
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    """The tokens that end a completion."""
    stop_texts: tuple[str, ...]
    """The texts that end a completion, as settings have them."""
    attention: AttentionChoice
    graphdef: nnx.GraphDef
    params: Params
    """The parameters' shapes, dtypes and shardings; with LoRA both adapters and frozen parameters."""
    source: str | None
    """The source of the pretrained parameters, fetched when they are read; None: random parameters."""
    seed: int
    revision: str | None = None
    """The commit of a source on the hub."""
    read: Callable[[], Params] | None = None
    """Reads the parameters, if the source is a run; None: they are read from `source`."""
    lora: Lora | None = None
    adapters: Path | None = None
    """The folder with the initial adapters; None: new adapters that don't change the model."""
    learned: Form | None = None
    """The form of the data that the model was trained on: as its run or export says, else chats if there is a template.
    None: random parameters."""

    def split(self, params: Params) -> tuple[Params, Params]:
        """The trained and the frozen parameters; `join` undoes it."""
        return (params, nnx.State({})) if self.lora is None else split_adapters(params)

    def join(self, trained: Params, frozen: Params) -> Params:
        """All parameters; nothing is copied."""
        return trained if self.lora is None else nnx.merge_state(frozen, trained)

    def complete(self, trained: Params) -> Params:
        """All parameters, from a checkpoint's trained parameters; UserError as for `stored_params`."""
        return trained if self.lora is None else self.join(trained, self.stored_params())

    def rematerialized(self, remat: str) -> "Policy":
        """The policy with another `remat` of its backward pass; `auto` changes nothing."""
        if remat == "auto":
            return self
        model = nnx.merge(self.graphdef, self.params)
        model.remat = remat
        return replace(self, graphdef=nnx.split(model)[0])

    @property
    def trained(self) -> Params:
        """The shapes, dtypes and shardings of the parameters that are trained."""
        return self.split(self.params)[0]

    @property
    def exported(self) -> Architecture:
        """The sizes of the model with merged adapters: a head with an adapter is no longer tied to the embedding."""
        untied = self.lora is not None and "head" in self.lora.targets
        return replace(self.architecture, tie_word_embeddings=False) if untied else self.architecture

    def initial_params(self) -> Params:
        """The parameters that a run begins with, sharded as `params`; UserError if the stored parameters don't fit."""
        if self.lora is None:
            return self.stored_params()
        adapters = (
            peft.load(self.adapters, self.trained, self.architecture)
            if self.adapters
            else initial_adapters(self.trained, self.seed)
        )
        return self.join(adapters, self.stored_params())

    @property
    def stored(self) -> Params:
        """The shapes, dtypes and shardings of the parameters without adapters."""
        return self.params if self.lora is None else self.split(self.params)[1]

    def stored_params(self) -> Params:
        """The stored or random parameters, without adapters; UserError if they don't fit the model."""
        if self.read is not None:
            return self.read()
        if self.source is not None:
            return weights.load(local_folder(self.source, revision=self.revision), self.stored, self.architecture)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.stored)
        dtype = jax.tree.leaves(self.stored)[0].dtype

        def as_stored(leaf: Any, made: jax.Array) -> Any:
            return quantize(made) if is_int8(leaf) else made.astype(leaf.dtype)

        @jax.jit(out_shardings=shardings)
        def create() -> Params:
            made = nnx.state(Decoder(self.architecture, rngs=nnx.Rngs(self.seed), param_dtype=dtype))
            return jax.tree.map(as_stored, self.stored, made, is_leaf=is_int8)

        return create()


def load_policy(config: RunConfig, mesh: Mesh, model: ModelConfig | None = None) -> Policy:
    """The policy of a configuration, or of another `model` for the same rows; no parameters are read.

    UserError is raised as by `load_model`, and if a row may be longer than the model's positions.
    """
    data, rollout = config.examples, config.rollout
    packed, stop = data is None or data.packing, rollout.stop if rollout else ()
    policy = load_model(model or config.model, mesh, packed=packed, stop=stop, seed=config.seed)
    rows = {"data.max_length": data.max_length} if data else {}
    if rollout is not None:
        sum_of_lengths = "rollout.max_prompt_length + max_completion_length"
        rows["rollout.max_total_length" if rollout.turns > 1 else sum_of_lengths] = rollout.total_length
    longest = policy.architecture.max_position_embeddings
    for key, length in rows.items():
        if length > longest:
            raise UserError(f"{key}: {length} tokens, but the model has max_position_embeddings {longest}: lower it")
    return policy


def load_model(model: ModelConfig, mesh: Mesh, *, packed: bool, stop: Sequence[str] = (), seed: int = 0) -> Policy:
    """The policy of a model; `packed` says whether rows hold several documents, `stop` are texts that end a completion.

    UserError is raised if files of the model or tokenizer are missing, unreadable or don't fit, or the mesh doesn't
    divide the model.
    """
    folder, architecture = find_model(model)
    layout = Layout.of(mesh, architecture)
    attention = choose(model.attention, architecture, mesh, model.dtype, packed)
    lora, adapters = (None, None) if model.lora is None else peft.resolve(model.lora, architecture)
    param_dtype = model.param_dtype if lora is None else model.dtype
    dtypes = {"dtype": jnp.dtype(model.dtype), "param_dtype": jnp.dtype(param_dtype)}
    remat = fastest_remat(mesh) if model.remat == "auto" else model.remat
    attends = {"attention": attention.attention, "own_kernels": model.attention != "xla"}
    options = {"remat": remat, **attends, "layout": layout, "lora": lora}
    dithered = model.compute_rounding == "dithered"
    graphdef, params = nnx.split(Decoder.abstract(architecture, **dtypes, dithered=dithered, **options))
    if count(params) > MAX_PARAMETERS:
        where = "model.architecture" if folder is None else folder / "config.json"
        raise UserError(f"{where}: {count(params):,} parameters are more than any model has: correct its sizes")
    tokenizer = find_tokenizer(model, folder)
    check_fits(tokenizer, architecture.vocab_size)
    return Policy(
        architecture=architecture,
        tokenizer=tokenizer,
        stop_ids=stop_ids(tokenizer, folder, stop),
        stop_texts=tuple(dict.fromkeys((*stop_strings(folder), *stop))),
        attention=attention,
        graphdef=graphdef,
        params=layout.abstract_parameters(params, int8=model.lora is not None and model.lora.base == "int8"),
        source=model.source if model.init == "pretrained" else None,
        seed=seed,
        revision=model.revision,
        lora=lora,
        adapters=adapters,
        learned=find_learned(model, folder, adapters, tokenizer),
    )


def fastest_remat(mesh: Mesh) -> Literal["products", "full"]:
    """The faster kind of rematerialisation on the mesh's devices.

    Kept products save operations and move bytes. On TPUs the bytes cost more than the operations (docs/log.md).
    """
    return "full" if platform(mesh) == "tpu" else "products"


def find_learned(model: ModelConfig, folder: Path | None, adapters: Path | None, tokenizer: Tokenizer) -> Form | None:
    """The form of the data that a model, or its adapters, was trained on; None for random parameters."""
    if model.init != "pretrained" or not folder:
        return None
    recorded = read_json(adapters / peft.CONFIG if adapters else folder / "config.json").get(weights.LEARNED)
    return "texts" if recorded == "texts" or not tokenizer.chat_template else "chats"


def find_tokenizer(model: ModelConfig, folder: Path | None) -> Tokenizer:
    """The tokenizer of a model in a folder; UserError where the files are missing."""
    return load_tokenizer(model.tokenizer or ("bytes" if folder is None else str(folder)))


def find_model(config: ModelConfig) -> tuple[Path | None, Architecture]:
    """The folder with the model's files, fetched if need be, and its sizes; None where random parameters need no files.

    Parameters on the hub or in a bucket are not among the files yet: an error in anything else comes first.
    """
    if config.architecture is not None:
        return None, Architecture.from_hf(config.architecture, "model.architecture", closed=True)
    source = config.source or ""
    if config.init == "random" and not (is_bucket(source) or os.path.isdir(os.path.expanduser(source))):
        if source not in PRESETS:
            known = f"the architectures known by name ({', '.join(PRESETS)})"
            raise UserError(f"model.source: {source} is neither a folder nor one of {known}")
        return None, PRESETS[source]
    folder = local_folder(source, SMALL, revision=config.revision)
    return folder, weights.read_config(folder)
