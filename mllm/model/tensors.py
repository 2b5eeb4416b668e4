"""The tensors of a folder in Hugging Face's layout, by name. Headers are read at once, numbers on demand.

Pickled checkpoints (.bin, .pt) are never opened: loading them can run arbitrary code.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mllm.errors import UserError
from mllm.model.folder import read_json
from mllm.model.layout import TENSORS
from mllm.storage import is_plain

LEARNED = "mllm_learned"
"""The key of config.json and adapter_config.json for the form of the training data; without the key, chats."""
TEXTS = "language_model."
"""The part of tensor names that marks the text part of a vision-language model."""
LEFT_OUT = re.compile(r"mtp\.|(model\.)?visual\.|.*\.rotary_emb\.inv_freq$")
"""The tensors of Qwen3.5's further networks, multi-token prediction and vision; and Llama 2's rotary frequencies."""
HEAD = TENSORS["head"].removesuffix("weight")
CONVOLUTION = TENSORS["delta.conv"].rpartition("{}")[2]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint; indexing it reads a part of it."""

    name: str
    file: Path
    stored: Any
    """safetensors' PySafeSlice, which knows shape and dtype from the file's header."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape; [C, taps] for a convolution of each channel, stored as [C, 1, taps]."""
        shape = tuple(self.stored.get_shape())
        return shape[::2] if self.name.endswith(CONVOLUTION) and shape[1:-1] == (1,) else shape

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        if len(index) == len(self.stored.get_shape()):
            return self.stored[index]
        return self.stored[index[0], :, index[1]][:, 0]


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by name, not yet read. A file is closed when its last tensor is released."""
    if (folder / SINGLE).is_file():
        return open_file(folder / SINGLE)
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickled:
            way_out = "convert them to safetensors with transformers' save_pretrained"
            raise UserError(f"{folder}: only pickled weights ({pickled[0]}), which are never opened; {way_out}")
        raise UserError(f"{folder}: has neither {SINGLE} nor {INDEX}")

    where = folder / INDEX
    files = read_json(where).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{where}: weight_map is missing or not a mapping of tensors to files")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        # Only plain names: an index must not reach into other folders. Links are followed: the hub's cache has them.
        if "/" in name or not is_plain(name):
            raise UserError(f"{where}: {name!r} is not the name of a file in this folder")
        if not name.endswith(".safetensors"):
            raise UserError(f"{where}: {name!r} is no safetensors file, and others are never opened")
        if not os.path.isfile(folder / name):
            raise UserError(f"{folder / name}: this shard is missing; {INDEX} lists it")
        tensors |= open_file(folder / name)
    for tensor, name in files.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise UserError(f"{folder / name}: tensor {tensor} is missing; {INDEX} says that it is there")
    return tensors


def open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file by name, not yet read."""
    try:
        file = safe_open(path, framework="numpy")
        slices = {name: file.get_slice(name) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: truncated or not a safetensors file ({error}); fetch or export it again") from None
    return {name: Tensor(name, path, part) for name, part in slices.items()}


def texts_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a text model, by its own names, also from a vision-language model.

    A vision-language model has its text part below `TEXTS`, except for the head.
    """
    kept = {name: tensor for name, tensor in tensors.items() if not LEFT_OUT.match(name)}
    if any(TEXTS in name for name in kept):
        kept = {name: tensor for name, tensor in kept.items() if TEXTS in name or HEAD in name}
    return {name.replace(TEXTS, ""): tensor for name, tensor in kept.items()}
