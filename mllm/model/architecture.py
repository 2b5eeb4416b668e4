"""The sizes of Qwen2 models, from and to config.json; settings that no Qwen2.5 checkpoint uses are refused by name."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mllm.errors import UserError

LARGEST_SIZE = 2**31 - 1  # JAX counts in int32
LARGEST_FLOAT = 10**15
LARGEST = {"num_hidden_layers": 10_000}


@dataclass(frozen=True)
class Qwen2Config:
    """The sizes of a model, named as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    initializer_range: float = 0.02

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any], where: str, *, closed: bool = False) -> "Qwen2Config":
        """The sizes in a config.json, given its content; `where` names it in errors.

        If it is `closed`, as settings that a user wrote, an unknown key is an error, too. UserError is raised
        for another architecture, a key that is missing or of the wrong type, sizes that don't fit together, and
        a setting that this model doesn't have.
        """
        known = PRESETS["Qwen/Qwen2.5-0.5B"].to_hf().keys() if closed else settings.keys()
        for key in sorted(settings.keys() - known):
            close = difflib.get_close_matches(key, known, n=1)
            raise UserError(f"{where}: {key} is unknown" + (f"; did you mean {close[0]}?" if close else ""))
        rope = settings.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            raise UserError(f"{where}: rope_parameters must be a mapping, not {rope!r}")
        refuse_unsupported(settings, rope, where)
        # transformers 5 nests rope_theta there, older files have it on top; 10,000 is transformers' default.
        values = {**settings, "rope_theta": rope.get("rope_theta", settings.get("rope_theta", 10_000.0))}

        def positive(key: str, kind: type[int] | type[float], default: int | float | None = None) -> Any:
            value = values.get(key, default)
            if value is None:
                raise UserError(f"{where}: {key} is missing")
            largest = LARGEST.get(key, LARGEST_SIZE if kind is int else LARGEST_FLOAT)
            # Not `value <= 0 or value > largest`: JSON as Python reads it has NaN.
            if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 < value <= largest:
                noun = "whole number" if kind is int else "number"
                raise UserError(f"{where}: {key} must be a positive {noun} up to {largest}, not {value!r}")
            return kind(value)

        tied = settings.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise UserError(f"{where}: tie_word_embeddings must be true or false, not {tied!r}")
        hidden, heads = positive("hidden_size", int), positive("num_attention_heads", int)
        if settings.get("head_dim") is None and hidden % heads:
            raise UserError(f"{where}: hidden_size {hidden} is not divisible by num_attention_heads ({heads})")
        config = cls(
            vocab_size=positive("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=positive("intermediate_size", int),
            num_hidden_layers=positive("num_hidden_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=positive("num_key_value_heads", int, heads),
            head_dim=hidden // heads if settings.get("head_dim") is None else positive("head_dim", int),
            tie_word_embeddings=tied,
            rope_theta=positive("rope_theta", float),
            rms_norm_eps=positive("rms_norm_eps", float, 1e-6),
            max_position_embeddings=positive("max_position_embeddings", int, 32_768),
            initializer_range=positive("initializer_range", float, 0.02),
        )
        if heads % config.num_key_value_heads:
            raise UserError(
                f"{where}: num_attention_heads {heads} is not divisible by num_key_value_heads "
                f"({config.num_key_value_heads})"
            )
        if config.head_dim % 2:
            raise UserError(f"{where}: head_dim {config.head_dim} is odd; rotary positions need pairs")
        return config

    def to_hf(self) -> dict[str, Any]:
        """The keys of a config.json that transformers, new and old, loads as Qwen2ForCausalLM."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            **asdict(self),
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "use_cache": True,
        }


def refuse_unsupported(settings: Mapping[str, Any], rope: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a setting with which the model would compute something else than `Qwen2` does."""
    scaling = settings.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) == "default":
        scaling = None
    layers = settings.get("layer_types") or []
    if not isinstance(layers, list | tuple):
        raise UserError(f"{where}: layer_types must be a list, not {layers!r}")
    for key, value, supported in (
        ("model_type", settings.get("model_type", "qwen2"), "qwen2"),
        ("hidden_act", settings.get("hidden_act", "silu"), "silu"),
        ("use_sliding_window", settings.get("use_sliding_window", False), False),
        ("layer_types", [kind for kind in layers if kind != "full_attention"], []),
        ("rope_parameters.rope_type", rope.get("rope_type", "default"), "default"),
        ("rope_scaling", scaling, None),
        ("attention_dropout", settings.get("attention_dropout", 0.0), 0.0),
        ("quantization_config", settings.get("quantization_config"), None),
    ):
        if value != supported:
            raise UserError(f"{where}: {key} is {value!r}; this model supports only {supported!r}")


def qwen25(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, eps: float, length: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151_936 if hidden < 3_584 else 152_064,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        tie_word_embeddings=hidden < 3_584,
        rms_norm_eps=eps,
        max_position_embeddings=length,
    )


# As in the checkpoints' own config.json; base and Instruct differ only in the last two columns.
PRESETS: dict[str, Qwen2Config] = {
    "Qwen/Qwen2.5-0.5B": qwen25(896, 4_864, 24, 14, 2, 1e-6, 32_768),
    "Qwen/Qwen2.5-0.5B-Instruct": qwen25(896, 4_864, 24, 14, 2, 1e-6, 32_768),
    "Qwen/Qwen2.5-1.5B": qwen25(1_536, 8_960, 28, 12, 2, 1e-6, 131_072),
    "Qwen/Qwen2.5-1.5B-Instruct": qwen25(1_536, 8_960, 28, 12, 2, 1e-6, 32_768),
    "Qwen/Qwen2.5-3B": qwen25(2_048, 11_008, 36, 16, 2, 1e-6, 32_768),
    "Qwen/Qwen2.5-3B-Instruct": qwen25(2_048, 11_008, 36, 16, 2, 1e-6, 32_768),
    "Qwen/Qwen2.5-7B": qwen25(3_584, 18_944, 28, 28, 4, 1e-6, 131_072),
    "Qwen/Qwen2.5-7B-Instruct": qwen25(3_584, 18_944, 28, 28, 4, 1e-6, 32_768),
    "Qwen/Qwen2.5-14B": qwen25(5_120, 13_824, 48, 40, 8, 1e-5, 131_072),
    "Qwen/Qwen2.5-14B-Instruct": qwen25(5_120, 13_824, 48, 40, 8, 1e-6, 32_768),
    "Qwen/Qwen2.5-32B": qwen25(5_120, 27_648, 64, 40, 8, 1e-5, 131_072),
    "Qwen/Qwen2.5-32B-Instruct": qwen25(5_120, 27_648, 64, 40, 8, 1e-6, 32_768),
    "Qwen/Qwen2.5-72B": qwen25(8_192, 29_568, 80, 64, 8, 1e-5, 131_072),
    "Qwen/Qwen2.5-72B-Instruct": qwen25(8_192, 29_568, 80, 64, 8, 1e-6, 32_768),
}
