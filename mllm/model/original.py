"""Exports the trained text part of a vision-language model, with the original names and untrained parameters.

A server can load the export like the original. Settings and tensors of the vision network, and of the network that
predicts further tokens, are copied unchanged.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mllm.model.architecture import TEXT_PARTS
from mllm.model.folder import read_json
from mllm.model.layout import TENSORS
from mllm.model.tensors import LEARNED, Tensor, open_tensors, texts_part

OWN = re.compile(r"\bmodel\.(?=(layers|embed_tokens|norm)\.)")
COPIED = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Original:
    """A model of texts and images."""

    settings: Mapping[str, Any]
    """Its config.json."""
    prefix: str
    """The prefix of the text part's tensor names."""
    others: Mapping[str, Tensor]
    """The tensors that were not trained."""
    wide: frozenset[str]
    """The tensors that the original stores in float32, by their names in a text model."""
    folder: Path

    @classmethod
    def open(cls, folder: Path) -> "Original | None":
        """The model in a folder; None if it is a text model without other tensors."""
        settings, tensors = read_json(folder / "config.json"), open_tensors(folder)
        trained = texts_part(tensors)
        names = {tensor.name for tensor in trained.values()}
        untrained = {name: tensor for name, tensor in tensors.items() if name not in names}
        if settings.get("model_type") not in TEXT_PARTS and not untrained:
            return None
        wide = frozenset(name for name, tensor in trained.items() if tensor.stored.get_dtype() == "F32")
        prefix = trained[TENSORS["norm"]].name.removesuffix("norm.weight")
        return cls(settings, prefix, untrained, wide, folder)

    def name(self, tensor: str) -> str:
        """The name, in the original, of a tensor of the model of texts, or of an adapter to it."""
        return OWN.sub(self.prefix, tensor)

    def copy_settings(self, folder: Path, ours: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the settings of images; returns the content of config.json, with `ours`, the content for texts."""
        for name in (name for name in COPIED if (self.folder / name).is_file()):
            shutil.copyfile(self.folder / name, folder / name)
        own = {key: value for key, value in self.settings.items() if key != LEARNED}
        if "text_config" not in own:
            return {**own, **ours}
        tied = {"tie_word_embeddings": ours["tie_word_embeddings"]}

        def updated(settings: Mapping[str, Any]) -> dict[str, Any]:
            dtypes = {key: ours["torch_dtype"] for key in ("dtype", "torch_dtype") if key in settings}
            return {**settings, **tied, **dtypes}

        learned = {LEARNED: ours[LEARNED]} if LEARNED in ours else {}
        return {**updated(own), **learned, "text_config": updated(own["text_config"])}
