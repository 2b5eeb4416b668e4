"""A compact JAX trainer for Qwen2.5 and its kin: SFT, GRPO, DPO and distillation around a fused LM-head loss.

    from mllm import UserError, load_config, train

    config = load_config("tiny_sft.yaml", ["steps=40", "run_dir=runs/mine"])  # a path, or a file in configs/
    exit_code = train(config)  # 0: done; the same call resumes

`UserError` is raised for every mistake that the user can mend; its text is one line. `train` is the loop in train.py,
as `python train.py` calls it. Outside the main thread, `train` does not handle signals. The names are imported on their
first use, because reward processes import this package and must start without JAX.
"""

import os
from importlib import import_module, util
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

# Only transformers' tokenizers are used; it would warn at every start that there is no torch for its models.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> Any:
    if name == "UserError":
        return import_module("mllm.errors").UserError
    if name == "load_config":
        return import_module("mllm.config.load").load
    if name == "train":
        return script().train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def script() -> ModuleType:
    """The module train.py, beside this package in a checkout or an installation."""
    loader = SourceFileLoader("mllm_train", str(Path(__file__).parents[1] / "train.py"))
    module = util.module_from_spec(ModuleSpec("mllm_train", loader))
    loader.exec_module(module)
    return module


def main() -> None:
    """The console command `mllm-train`, which is `python train.py`."""
    module = script()
    module.run_main(module.main)
