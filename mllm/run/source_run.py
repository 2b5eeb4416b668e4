"""A run as another run's `model.source`: its sizes, tokenizer and stop tokens, and the parameters of a checkpoint.

The parameters are the run's masters, in the dtype in which its optimizer updated them; nothing is exported between.
The adapters of a run that trained some are merged into its model.
"""

from dataclasses import dataclass, replace
from functools import partial

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
from mllm.run.checkpoint import Checkpoints
from mllm.store.run_store import CONFIG, RunStore, find_run

OWN = ("dtype", "param_dtype", "remat", "attention", "lora")
"""Settings of a model that are not taken from the run that is its source."""


def load_policy(config: Config, mesh: Mesh) -> Policy:
    """The policy of a configuration, as `mllm.model.load.load_policy`; its `model.source` may also be a run's folder.

    UserError is raised as there, and where the run's own configuration can't be read.
    """
    source = SourceRun.open(config.model)
    if source is None:
        return load.load_policy(config, mesh)
    policy = load.load_policy(config.model_copy(update={"model": source.model}), mesh, source.stop)
    return replace(policy, read=partial(source.read_parameters, config.model.step, policy.stored))


def pin_step(config: Config) -> Config:
    """The configuration with the number of the source's step, which may not be the newest or best one later.

    UserError is raised if `model.step` names no checkpoint, or the source is no run.
    """
    source, step = SourceRun.open(config.model), config.model.step
    if source is None:
        if step is not None:
            raise UserError(f"model.step: {config.model.source} is no run_dir: remove it")
        return config
    model = config.model.model_copy(update={"step": source.choose_step(step)})
    return config.model_copy(update={"model": model})


@dataclass(frozen=True)
class SourceRun:
    """A run with whose parameters a model begins."""

    store: RunStore
    config: Config
    """Its own."""
    model: ModelConfig
    """The model that begins with it, as if the run's own model were its source."""
    stop: tuple[str, ...]
    """Tokens that stop the run's model beside those of its own source."""

    @classmethod
    def open(cls, model: ModelConfig) -> "SourceRun | None":
        """The run that is a model's source; None if it begins with other parameters. UserError as `load_policy`."""
        if not model.source or model.init != "pretrained" or (store := find_run(model.source, "model.source")) is None:
            return None
        config = configs.load(str(store.local(CONFIG)))
        below = cls.open(config.model)
        theirs, stop = (below.model, below.stop) if below else (config.model, ())
        own = {name: getattr(model, name) for name in OWN} | {"tokenizer": model.tokenizer or theirs.tokenizer}
        stop = (*stop, *(config.rollout.stop if config.rollout else ()))
        return cls(store, config, theirs.model_copy(update=own), stop)

    def choose_step(self, step: int | str | None) -> int:
        """The number of the step that `model.step` names; UserError where the run has no such checkpoint."""
        steps = self.store.steps()
        there = f"there are {steps}"
        if not steps or (isinstance(step, int) and step not in steps):
            number = f" {step}" if isinstance(step, int) else ""
            raise UserError(f"model.step: {self.store} has no checkpoint{number}; {there}")
        if step != "best":
            return step if isinstance(step, int) else steps[-1]
        if not self.config.checkpoint.keep_best:
            raise UserError(
                f"model.step: {self.store} has not kept its best checkpoint (checkpoint.keep_best); {there}"
            )
        best = self.store.best_step(steps)
        if best is None:
            raise UserError(f"model.step: no checkpoint of {self.store} has been evaluated; {there}")
        return best

    def read_parameters(self, step: int | str | None, like: Params) -> Params:
        """The parameters of a checkpoint, sharded and of the dtypes as `like`; UserError where there is none."""
        step = self.choose_step(step)
        if len({*gather_objects(step)}) > 1:
            raise UserError(f"model.source: {self.store} was saving just now: try again")
        if self.config.model.lora is not None:
            return self.merged_parameters(step, like)
        dtype = self.config.model.param_dtype
        stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), like)
        _, params = self.checkpoints.restore_params(stored, step)
        return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), params, like)

    def merged_parameters(self, step: int, like: Params) -> Params:
        """The same of a run that trained adapters: they are added to its model's matrices in float32."""
        policy = load_policy(self.config, jax.tree.leaves(like)[0].sharding.mesh)
        if policy.exported != policy.architecture:
            raise UserError(
                f"model.source: {self.store} parted the head from the embedding: give its export (tools/export.py)"
            )
        _, adapters = self.checkpoints.restore_params(policy.trained, step)

        @jax.jit(out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))
        def merge(params: Params) -> Params:
            merged = merge_all_adapters(params, policy.lora)
            return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), merged, like)

        return merge(policy.complete(adapters))

    @property
    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints, which are only read."""
        return Checkpoints(self.store, self.config.checkpoint, read_only=True)
