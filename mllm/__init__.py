"""A compact JAX trainer for Qwen2.5 and its kin: SFT, GRPO, DPO and distillation around a fused LM-head loss.

    from mllm import load_config, train

    config = load_config("tiny_sft.yaml", ["steps=40", "run_dir=runs/mine"])  # a path, or a file in configs/
    exit_code = train(config)  # 0: done; the same call resumes

`train` is the loop in train.py, as `python train.py` calls it. Both names are imported on their first use: processes
that compute rewards import this package, too, and must start without JAX.
"""

import os
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

# Only transformers' tokenizers are used; it would warn at every start that there is no torch for its models.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> Any:
    if name == "load_config":
        return import_module("mllm.config.load").load
    if name == "train":
        return script().train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def script() -> ModuleType:
    """train.py, which stands beside this package, whether that is installed or a checkout."""
    spec = util.spec_from_file_location("mllm_train", Path(__file__).parents[1] / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """The console command `mllm-train`, which is `python train.py`."""
    module = script()
    module.run_main(module.main)
