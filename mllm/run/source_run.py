"""Loads a model from another run, without an export.

The run's folder has the sizes, the tokenizer and the stop tokens. Its checkpoints have the parameters, in the run's
`param_dtype`. Adapters are merged into the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from mllm.config import load as configs
from mllm.config.model import ModelConfig
from mllm.config.run import RunConfig
from mllm.errors import CommonError, UserError
from mllm.model import load, peft
from mllm.model.compute_copy import Rounding
from mllm.model.folder import commit_of
from mllm.model.int8 import is_int8, quantize
from mllm.model.layout import Params, map_parameters
from mllm.model.load import Policy
from mllm.model.lora import merge_all_adapters
from mllm.model.tokenizer import Tokenizer
from mllm.model.weights import narrow
from mllm.parallel.processes import from_writer
from mllm.run.checkpoint import by_name, restore_params
from mllm.run.store import CONFIG, RunStore, find_run


def load_policy(config: RunConfig, mesh: Mesh, model: ModelConfig | None = None) -> Policy:
    """As `mllm.model.load.load_policy`, but the model's source may also be a run."""
    model = model or config.model
    source = source_run(model)
    if source is None:
        return load.load_policy(config, mesh, model)
    own = model.model_copy(update={"source": str(source.folder), "step": None})
    policy = load.load_policy(config, mesh, own)
    return replace(policy, read=partial(read_parameters, source, model.step, policy.stored, own))


def load_own_policy(store: RunStore, config: RunConfig, mesh: Mesh) -> Policy:
    """The policy that a run trains, read from its own folder. Only the base of adapters is read from elsewhere."""
    lora = config.model.lora and config.model.lora.model_copy(update={"source": None})
    folder = {"source": str(store.folder), "init": "pretrained", "architecture": None, "tokenizer": None}
    model = config.model.model_copy(update={**folder, "step": None, "revision": None, "lora": lora})
    policy = load.load_policy(config, mesh, model)
    base = config.model.model_copy(update={"lora": lora})
    return replace(policy, read=lambda: load_policy(config, mesh, base).stored_params())


def pin(model: ModelConfig) -> dict[str, Any]:
    """The settings that pin a model: the step or commit of its source, and the rank and scale of its adapters."""
    pinned: dict[str, Any] = {}
    if model.lora and model.lora.source:
        stored = asdict(peft.chosen(model.lora, ())[0])
        given = {name for name, value in model.lora if value is not None}
        pinned["lora"] = model.lora.model_copy(update={name: stored[name] for name in stored.keys() - given})
    if (run := source_run(model)) is not None:
        return pinned | {"step": choose_step(run, model.step, "model.step")}
    if model.init != "pretrained" or not model.source:
        return pinned
    return pinned | {"revision": commit_of(model.source, model.revision, "model.source")}


def source_run(model: ModelConfig) -> RunStore | None:
    """The run that is a model's source; None if the source is no run.

    UserError is raised if the source is no run and `model.step` is given.
    """
    if not model.source or model.init != "pretrained":
        return None
    store = find_run(model.source, "model.source")
    if store is None and model.step is not None:
        raise UserError(f"model.step: no run is at {model.source}: give its run_dir, or remove the step")
    return store


def choose_step(store: RunStore, step: int | str | None, key: str) -> int:
    """The number of the checkpoint `step`, in all processes; UserError, which names `key`, if it is missing."""
    number, steps = step, from_writer(store.steps)
    if not steps:
        raise CommonError(f"{key}: {store} has no checkpoint yet: start it again, or set checkpoint.every")
    if step == "best":  # where it is not kept, the best that is left need not be the best
        kept = steps if configs.load_run(store.folder / CONFIG).checkpoint.keep_best else []
        number = from_writer(lambda: store.best_step(kept))
    elif step is None or step == "newest":
        step, number = "newest", max(steps, default=None)
    if not isinstance(number, int) or number not in steps:
        why = ", as checkpoint.keep_best keeps one" * (step == "best")
        raise CommonError(f"{key}: {store} has no checkpoint {step}{why}; there are {steps}")
    return number


def read_parameters(store: RunStore, step: int | str | None, like: Params, model: ModelConfig) -> Params:
    """The parameters of a checkpoint, with the shardings and dtypes of `like`; UserError if it is missing.

    Adapters are merged in float32. `model` says how matrices are rounded to a narrower dtype.
    """
    policy = load_own_policy(store, configs.load_run(store.folder / CONFIG), jax.tree.leaves(like)[0].sharding.mesh)
    if policy.exported != policy.architecture:
        fault = f"{store} parted the head from the embedding"
        raise UserError(f"model.source: {fault}: give its export (tools/export.py)")
    trained = restore_params(store, policy.trained, choose_step(store, step, "model.step"))
    if policy.lora is None:
        return narrowed(trained, like, model)

    @jax.jit(out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))
    def merge(params: Params) -> Params:
        return narrowed(merge_all_adapters(params, policy.lora), like, model)

    return merge(policy.complete(trained))


def narrowed(params: Params, like: Params, model: ModelConfig) -> Params:
    """The parameters in the dtypes of `like`; narrower matrices become the model's compute copies, or int8."""
    wanted, dithered = by_name(like, is_int8), Rounding.of(model).dithered

    def rounded(leaf: Array, name: str) -> Any:
        target = wanted[name]
        if is_int8(target):
            return jax.jit(quantize, out_shardings=jax.tree.map(lambda x: x.sharding, target))(leaf)
        return leaf if leaf.dtype == target.dtype else narrow(leaf, Rounding(target.dtype, dithered), name)

    return map_parameters(rounded, params)


# The teacher: a second, frozen policy, loaded like the student


@contextmanager
def naming_teacher() -> Iterator[None]:
    """Let errors of loading a model name the teacher."""
    try:
        yield
    except UserError as error:
        text = str(error)
        raise UserError(f"teacher{'' if text.startswith('model.') else ': '}{text.removeprefix('model')}") from None


def load_teacher(config: RunConfig, mesh: Mesh, student: Tokenizer) -> Policy | None:
    """The teacher of a configuration, without its parameters; None without a teacher.

    UserError is raised as by `load_policy`, and if an id of the student's tokenizer is another token of the teacher's.
    """
    if (teacher := config.frozen_teacher) is None:
        return None
    with naming_teacher():
        policy = load_policy(config, mesh, teacher.model(config.model))
    check_tokens(teacher.source, student, policy.tokenizer)
    return policy


def pin_all(config: RunConfig) -> RunConfig:
    """A new run's configuration with its model and its teacher pinned, as `pin` does."""
    changes: dict[str, Any] = {"model": config.model.model_copy(update=pin(config.model))}
    if (teacher := config.frozen_teacher) is not None:
        with naming_teacher():
            changes["teacher"] = teacher.model_copy(update=pin(teacher.model(config.model)))
    return config.model_copy(update=changes)


def check_tokens(source: str, student: Tokenizer, teacher: Tokenizer) -> None:
    """UserError if an id of the student's tokenizer is a different token, or unused, in the teacher's tokenizer."""
    tokens = {number: token for token, number in teacher.get_vocab().items()}
    for number, token in sorted((number, token) for token, number in student.get_vocab().items()):
        if (other := tokens.get(number)) != token:
            fault = f"{source}: token {number} is {other!r} there, and {token!r} of the student's tokenizer"
            raise UserError(f"teacher.source: {fault}; give a teacher with the student's tokens")
