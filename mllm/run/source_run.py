"""A run as another run's `model.source`: its sizes, tokenizer and stop tokens, and the parameters of a checkpoint.

The parameters are the run's masters, in the dtype in which its optimizer updated them; nothing is exported between.
The adapters of a run that trained some are merged into its model.
"""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from mllm.config import load as configs
from mllm.config.model import ModelConfig
from mllm.config.schema import Config
from mllm.errors import UserError
from mllm.model import load
from mllm.model.layout import Params
from mllm.model.load import Policy
from mllm.model.lora import merge_all_adapters
from mllm.parallel.processes import gather_objects
from mllm.run.bucket_copy import find_run
from mllm.run.checkpoint import Checkpoints
from mllm.run.storage import saved_steps

OWN = ("dtype", "residual_dtype", "param_dtype", "remat", "attention", "lora")
"""Settings of a model that are not taken from the run that is its source."""


def load_policy(config: Config, mesh: Mesh) -> Policy:
    """The policy of a configuration, as `mllm.model.load.load_policy`; its `model.source` may also be a run's folder.

    UserError is raised as there, and where the run's own configuration can't be read.
    """
    source = source_run(config.model)
    if source is None:
        return load.load_policy(config, mesh)
    model, stop = model_of(config.model)
    policy = load.load_policy(config.model_copy(update={"model": model}), mesh, stop)
    return replace(policy, read=partial(read_parameters, source, config.model.step, policy.stored))


def source_run(model: ModelConfig) -> Path | None:
    """The folder of the run whose parameters the model begins with; None if it begins with others."""
    if not model.source or model.init != "pretrained":
        return None
    return find_run(model.source, "model.source")


def model_of(model: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model without a run for its source, as the run's configuration has it, and further tokens that stop it."""
    source = source_run(model)
    if source is None:
        return model, ()
    theirs = configs.load(str(source / "config.yaml"))
    found, stop = model_of(theirs.model)
    own = {name: getattr(model, name) for name in OWN} | {"tokenizer": model.tokenizer or found.tokenizer}
    return found.model_copy(update=own), (*stop, *(theirs.rollout.stop if theirs.rollout else ()))


def pin_step(config: Config) -> Config:
    """The configuration with the number of the source's step, which may not be the newest or best one later.

    UserError is raised if `model.step` names no checkpoint, or the source is no run.
    """
    source, step = source_run(config.model), config.model.step
    if source is None:
        if step is not None:
            raise UserError(f"model.step: {config.model.source} is no run_dir: remove it")
        return config
    model = config.model.model_copy(update={"step": choose_step(source, step)})
    return config.model_copy(update={"model": model})


def choose_step(run: Path, step: int | str | None) -> int:
    """The number of the step that `model.step` names; UserError where the run has no such checkpoint."""
    steps, config = saved_steps(run / "checkpoints"), configs.load(str(run / "config.yaml"))
    if not steps or (isinstance(step, int) and step not in steps):
        raise UserError(
            f"model.step: {run} has no checkpoint{f' {step}' if isinstance(step, int) else ''}; there are {steps}"
        )
    if step != "best":
        return step if isinstance(step, int) else steps[-1]
    if not config.checkpoint.keep_best:
        raise UserError(f"model.step: {run} has not kept its best checkpoint (checkpoint.keep_best); there are {steps}")
    with reading(run, config) as checkpoints:
        best = checkpoints.best_step(steps)
    if best is None:
        raise UserError(f"model.step: no checkpoint of {run} has been evaluated; there are {steps}")
    return best


def read_parameters(run: Path, step: int | str | None, like: Params) -> Params:
    """The parameters of a run's checkpoint, sharded and of the dtypes as `like`; UserError where there is none."""
    step, config = choose_step(run, step), configs.load(str(run / "config.yaml"))
    if len({*gather_objects(step)}) > 1:
        raise UserError(f"model.source: {run} was saving just now: try again")
    if config.model.lora is not None:
        return merged_parameters(run, step, config, like)
    stored = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, config.model.param_dtype, sharding=leaf.sharding), like
    )
    with reading(run, config) as checkpoints:
        _, params = checkpoints.restore_params(stored, step)
    return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), params, like)


def merged_parameters(run: Path, step: int, config: Config, like: Params) -> Params:
    """The same of a run that trained adapters: they are added to its model's matrices in float32."""
    policy = load_policy(config, jax.tree.leaves(like)[0].sharding.mesh)
    if policy.exported != policy.architecture:
        raise UserError(f"model.source: {run} parted the head from the embedding: give its export (tools/export.py)")
    with reading(run, config) as checkpoints:
        _, adapters = checkpoints.restore_params(policy.trained, step)

    @jax.jit(out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))
    def merge(params: Params) -> Params:
        merged = merge_all_adapters(params, policy.lora)
        return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), merged, like)

    return merge(policy.complete(adapters))


@contextmanager
def reading(run: Path, config: Config) -> Iterator[Checkpoints]:
    """A run's checkpoints, which are only read."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns that it can only read
    with closing(Checkpoints(run / "checkpoints", config.checkpoint, read_only=True)) as checkpoints:
        yield checkpoints
