"""Writes a run's newest parameters as a Hugging Face folder: python tools/export.py RUN [--step N] [--dtype bfloat16]

RUN/export, or the folder --out, then has config.json, generation_config.json, safetensors and the tokenizer.
transformers loads the folder, and so does another run as its `model.source`. The adapters of a run with `model.lora`
are merged into the model. With --adapter they are written alone as RUN/adapter, in PEFT's format, which another run
takes as its `model.lora.source`. With bfloat16, matrices are rounded as the run rounds them: dithered, unless it says
otherwise. An earlier export is replaced whole, or not at all. RUN and FOLDER may be in buckets. There an export that
was cut off has no config.json, so it is no model.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mllm import errors
from mllm.errors import UserError
from mllm.run.store import CONFIG, find_run

if TYPE_CHECKING:
    from mllm.config.run import RunConfig
    from mllm.model.layout import Params
    from mllm.model.load import Policy
    from mllm.model.original import Original


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a run_dir")
    parser.add_argument("--out", metavar="FOLDER", help="default: export, or adapter, in the run")
    parser.add_argument("--step", type=int, help="the checkpoint's; default: the newest")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: that of the computation")
    alone = "a run with model.lora: its adapters alone, in float32"
    parser.add_argument("--adapter", action="store_true", help=alone)
    options = parser.parse_args(arguments)
    if options.adapter and options.dtype:
        raise UserError("--dtype: adapters are exported as they are trained, in float32: leave it out")
    from mllm.model.folder import refuse_foreign_files

    out = options.out or f"{options.run.rstrip('/')}/{'adapter' if options.adapter else 'export'}"
    if not options.out and os.path.islink(out):
        raise UserError(f"{out}: is a link, in a run that may be another's: give the folder that it leads to as --out")
    refuse_foreign_files(out)
    config, policy, step, params = restore(options.run, options.step, adapter=options.adapter)
    if options.adapter:
        note = f", adapters of {save_adapter(config, policy, params, out)}"
    else:
        line = save_model(config, policy, step, params, options.dtype or config.model.dtype, options.run, out)
        note = f".{line}" if line else ""
    print(f"step {step} of {options.run} is exported to {out}{note}")
    return 0


def save_model(
    config: "RunConfig", policy: "Policy", step: int, params: "Params", dtype: str, run: str, out: str
) -> str:
    """Write the model's folder; returns a line of its README for who samples from it."""
    from mllm.model import weights
    from mllm.model.compute_copy import Rounding
    from mllm.model.folder import README, REPLACED
    from mllm.model.lora import merge_all_adapters
    from mllm.model.tokenizer import save_tokenizer

    merged, dithered = merge_all_adapters(params, policy.lora), Rounding.of(config.model).dithered
    line = ""
    rounding = "dithered" if dithered else "rounded to nearest"
    note = {"float32": "; whoever loads them in bfloat16 rounds them to nearest", "bfloat16": f", {rounding}"}[dtype]
    if policy.learned == "texts" and policy.tokenizer.chat_template:
        line = " It has learned texts: give it prompts without the chat template."
    text = f"{REPLACED}# Step {step} of {run}\n\nThe parameters are {dtype}{note}.{line}\n\n"
    text += f'    transformers.AutoModelForCausalLM.from_pretrained(FOLDER, torch_dtype="{dtype}")\n'

    def add_files(folder: Path) -> None:
        save_tokenizer(policy.tokenizer, folder)
        (folder / README).write_text(text, encoding="utf-8")

    weights.save(
        out,
        policy.exported,
        merged,
        dtype=dtype,
        dithered=dithered,
        stop_ids=policy.stop_ids,
        stop_texts=policy.stop_texts,
        pad_id=policy.tokenizer.pad_token_id,
        bos_id=policy.tokenizer.bos_token_id,
        learned=policy.learned,
        also=add_files,
        original=find_original(config, policy),
    )
    return line


def find_original(config: "RunConfig", policy: "Policy") -> "Original | None":
    """The folder with images that a Qwen3.5 was trained from: an export has its names and its other tensors.

    UserError is raised if it is not there any more.
    """
    if not policy.architecture.traits.delta:
        return None
    from mllm.config import load as configs
    from mllm.model.folder import local_folder
    from mllm.model.original import Original
    from mllm.run.source_run import source_run

    while (run := source_run(config.model)) is not None:
        config = configs.load_run(run.folder / CONFIG)
    model = config.model
    if model.init == "random" or model.source is None:
        return None
    return Original.open(local_folder(model.source, last_resort="put it back", revision=model.revision))


def restore(
    run: str, step: int | None, dtype: str | None = None, adapter: bool = False
) -> "tuple[RunConfig, Policy, int, Params]":
    """A run's configuration, its policy on one device, and the step and parameters of its newest, or this, checkpoint.

    With a `dtype` the policy computes in it. With `adapter` the parameters are the adapters alone. UserError is raised
    if the folder is no run, has no such checkpoint, or has no adapters to export.
    """
    if (store := find_run(run, "RUN")) is None:
        raise UserError(f"{run}: no config.yaml; give a run_dir")
    from mllm.config import load as configs
    from mllm.config.model import MeshConfig
    from mllm.parallel.mesh import make_mesh
    from mllm.run.checkpoint import restore_params
    from mllm.run.source_run import choose_step, load_own_policy

    overrides = [f"model.dtype={dtype}"] if dtype else []
    overrides += ["model.compute_rounding=dithered"] if dtype == "float32" else []  # nothing is rounded then
    config = configs.load_run(store.folder / CONFIG, overrides)
    if adapter and config.model.lora is None:
        raise UserError(f"--adapter: {run} trained the whole model (no model.lora): leave it out")
    policy = load_own_policy(store, config, make_mesh(MeshConfig(fsdp=1)))
    step = choose_step(store, step, "--step")
    params = restore_params(store, policy.trained, step)
    return config, policy, step, params if adapter else policy.complete(params)


def save_adapter(config: "RunConfig", policy: "Policy", adapters: "Params", out: str) -> str:
    """Write the adapters' folder; returns the model without adapters, in words."""
    from mllm.model import peft

    assert policy.lora is not None
    source = config.model.source if config.model.init == "pretrained" else None
    of_a_run = source is not None and find_run(source, "model.source") is not None
    base = f"{source}/export" if of_a_run else source
    peft.save(out, policy.architecture, policy.lora, adapters, base, policy.learned, find_original(config, policy))
    if of_a_run:
        return f"{base}, which tools/export.py {source} --step {config.model.step} writes"
    return base or "random parameters"


if __name__ == "__main__":
    errors.run_main(main)
