"""Writes a run's newest parameters as a Hugging Face folder: python tools/export.py RUN [--step N] [--dtype bfloat16]

RUN/export then holds config.json, generation_config.json, safetensors and the tokenizer; transformers loads it, and so
does another run as its `model.source`. Adapters are merged into the model. An earlier export is replaced as a whole, or
not at all.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mllm import errors
from mllm.errors import UserError

if TYPE_CHECKING:
    from mllm.config.schema import Config
    from mllm.model.layout import Params
    from mllm.model.load import Policy


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run_dir")
    parser.add_argument("--step", type=int, help="the checkpoint's; default: the newest")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: that of the computation")
    options = parser.parse_args(arguments)
    step = export(options.run, options.step, options.dtype)
    print(f"step {step} of {options.run} is exported to {options.run / 'export'}")
    return 0


def restore(run: Path, step: int | None, dtype: str | None = None) -> "tuple[Config, Policy, int, Params]":
    """A run's configuration, its policy on one device, and the step and parameters of its newest, or this, checkpoint.

    With a `dtype` the policy computes in this one, and its residual stream in float32.
    UserError is raised if the folder is no run, or has no such checkpoint.
    """
    if not os.path.isfile(run / "config.yaml"):
        raise UserError(f"{run}: no config.yaml; give a run_dir")
    from mllm.config import load as configs
    from mllm.config.model import MeshConfig
    from mllm.parallel.mesh import make_mesh
    from mllm.run.source_run import load_policy, reading

    changed = [f"model.dtype={dtype}", "model.residual_dtype=float32"] if dtype else []
    config = configs.load(str(run / "config.yaml"), changed)
    policy = load_policy(config, make_mesh(MeshConfig()))
    with reading(run, config) as checkpoints:
        step, params = checkpoints.restore_params(policy.trained, step)
    return config, policy, step, policy.complete(params)


def export(run: Path, step: int | None, dtype: str | None) -> int:
    """Write RUN/export; returns the step that it holds."""
    import jax.numpy as jnp

    from mllm.model import weights
    from mllm.model.lora import merge_all_adapters

    config, policy, step, params = restore(run, step)
    weights.save(
        run / "export",
        policy.exported,
        merge_all_adapters(params, policy.lora),
        dtype=jnp.dtype(dtype or config.model.dtype),
        stop_ids=policy.stop_ids,
        pad_id=policy.tokenizer.pad_token_id,
        also=policy.tokenizer.save_pretrained,
    )
    return step


if __name__ == "__main__":
    errors.run_main(main)
