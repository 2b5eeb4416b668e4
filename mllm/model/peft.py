"""Adapters in PEFT's format (https://huggingface.co/docs/peft): adapter_config.json and adapter_model.safetensors.

Only plain LoRA adapters are read, of one rank, of the products that `LoraConfig` names. Other options of PEFT
(DoRA, ranks of single layers, biases, embeddings, other methods) are refused by the name of their field.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp

from mllm.config.model import LoraConfig, LoraTarget
from mllm.config.task import Form
from mllm.errors import UserError
from mllm.model import weights
from mllm.model.architecture import LARGEST_FLOAT, Architecture
from mllm.model.compute_copy import Rounding
from mllm.model.folder import local_folder, read_json, replacing, write_json
from mllm.model.layout import MATRICES, TENSORS, Params
from mllm.model.lora import Lora
from mllm.model.original import Original
from mllm.model.tensors import open_file

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
MODULES: dict[str, str] = {name.split(".")[-1]: TENSORS[matrix].split(".")[-2] for name, matrix in MATRICES.items()}
"""The name of the module of each product, as `target_modules` has it."""
UNTOUCHED_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the frozen matrices as they are."""
NOT_COMPUTED = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "qalora_group_size", weights.LEARNED),
}
"""Fields without an effect on an adapter's result."""


def resolve(config: LoraConfig, architecture: Architecture) -> tuple[Lora, Path | None]:
    """The configured adapters, and the folder to read them from, if any.

    UserError is raised if the folder is missing, or if its adapters aren't supported or differ from the configuration.
    An adapter of a product that the model doesn't have is an error as well.
    """
    stacks = {stack for stack, _ in architecture.stack_of_layer}
    has = {name.split(".")[-1] for name in MATRICES if name == "head" or name.split(".")[0] in stacks}
    lora, folder = chosen(config, tuple(name for name in get_args(LoraTarget)[:-1] if name in has))
    for name in lora.targets:
        if name not in has:
            products = ", ".join(known for known in get_args(LoraTarget) if known in has)
            raise UserError(f"model.lora.targets: the model has no product {name}, but {products}")
    return lora, folder


def chosen(config: LoraConfig, default: tuple[str, ...]) -> tuple[Lora, Path | None]:
    """As `resolve`, for any model; `default` are the targets if the configuration names no targets."""
    if config.rank and config.alpha and not config.source:
        return Lora(config.rank, config.alpha, config.targets or default, bool(config.rslora)), None
    folder = local_folder(str(config.source), key="model.lora.source", last_resort="leave model.lora.source out")
    stored = read_config(folder)
    for name in ("rank", "alpha", "rslora", "targets"):
        wanted, actual = getattr(config, name), getattr(stored, name)
        if wanted is not None and (sorted(wanted) != sorted(actual) if name == "targets" else wanted != actual):
            wanted, actual = (", ".join(x) if name == "targets" else x for x in (wanted, actual))
            fault = f"the adapters of {config.source} have {actual}, not {wanted}"
            raise UserError(f"model.lora.{name}: {fault}: leave it out")
    return stored, folder


def read_config(folder: Path) -> Lora:
    """The adapters in a folder, by its adapter_config.json; UserError if they aren't supported."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{path}: missing; a folder in PEFT's format has it (tools/export.py RUN --adapter makes one)")
    fields: Any = read_json(path)
    rank, alpha, modules = (fields.get(key) for key in ("r", "lora_alpha", "target_modules"))
    known, untouched = list(MODULES.values()), "what leaves the frozen matrices as they are"
    all_known = isinstance(modules, list) and bool(modules) and all(module in known for module in modules)
    checked = {
        "peft_type": ("LORA", fields.get("peft_type") == "LORA"),
        "r": ("a positive whole number", type(rank) is int and rank > 0),
        "lora_alpha": ("a positive number", type(alpha) in (int, float) and 0 < alpha <= LARGEST_FLOAT),
        "target_modules": (f"a list of {', '.join(known)}", all_known),
        "bias": ("none", fields.get("bias", "none") == "none"),
        "init_lora_weights": (untouched, fields.get("init_lora_weights", True) in UNTOUCHED_BASE),
    }
    unknown = fields.keys() - checked - {"use_rslora"} - NOT_COMPUTED
    checked |= {key: ("none", fields[key] in (None, False, [], {})) for key in unknown}
    for key, (supported, fits) in checked.items():
        if not fits:
            raise UserError(f"{path}: {key} is {fields.get(key)!r}; supported is only {supported}")
    targets = tuple(target for target, module in MODULES.items() if module in modules)
    return Lora(rank, float(alpha), targets, fields.get("use_rslora") is True)


def load(folder: Path, abstract: Params, config: Architecture) -> Params:
    """The adapters with the shapes, dtypes and shardings of `abstract`; UserError as for `weights.load`."""
    if not (folder / FILE).is_file():
        raise UserError(f"{folder / FILE}: missing; other files, as adapter_model.bin, are pickled and never opened")
    tensors = open_file(folder / FILE)
    # PEFT also saves the frozen matrix of an adapted head.
    tensors.pop(f"base_model.model.{MODULES['head']}.base_layer.weight", None)
    return weights.load(folder, abstract, config, tensors, f"{CONFIG} and the model")


def save(
    place: str | Path,
    config: Architecture,
    lora: Lora,
    adapters: Params,
    base: str | None,
    learned: Form | None = None,
    original: Original | None = None,
) -> None:
    """Write a folder that PEFT loads, also in a bucket, in float32; `base` names the model without adapters.

    An earlier export there is replaced whole, or not at all; UserError as for `replacing`.
    """
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": [MODULES[target] for target in lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    } | ({weights.LEARNED: learned} if learned == "texts" else {})
    with replacing(place) as unfinished:
        weights.write_tensors(
            unfinished,
            adapters,
            Rounding(jnp.dtype(jnp.float32)),
            config,
            FILE,
            original and replace(original, others={}),
        )
        write_json(unfinished / CONFIG, content)
