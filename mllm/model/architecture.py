"""A decoder's family and sizes, from and to config.json; what the decoder does not compute is refused by name.

`PRESETS` has the sizes of published checkpoints, as in their own config.json.
"""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from mllm.errors import UserError

LARGEST_SIZE = 2**31 - 1  # JAX counts in int32
LARGEST_FLOAT = 10**15
LARGEST = {"num_hidden_layers": 10_000}


Family = Literal["qwen2", "qwen3", "llama"]
"""A `model_type` of config.json: Qwen2 and Qwen2.5; Qwen3's dense models; Llama 3, 3.1 and 3.2."""


class Traits(NamedTuple):
    """What distinguishes a family, beside its sizes."""

    architecture: str
    """The class of transformers that loads it."""
    qkv_bias: bool
    """Whether the products that make queries, keys and values have a bias."""
    head_norms: bool
    """Whether each head of queries and of keys is normalized before its rotation."""
    unused: dict[str, Any]
    """Further keys of its config.json, with the only value that is supported."""


NO_WINDOW: dict[str, Any] = {"use_sliding_window": False}
FAMILIES: dict[Family, Traits] = {
    "qwen2": Traits("Qwen2ForCausalLM", True, False, NO_WINDOW),
    "qwen3": Traits("Qwen3ForCausalLM", False, True, {**NO_WINDOW, "attention_bias": False}),
    "llama": Traits("LlamaForCausalLM", False, False, {"attention_bias": False, "mlp_bias": False}),
}


class RopeScaling(NamedTuple):
    """Llama 3.1's change of the rotary frequencies for long contexts; the names are those in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Architecture:
    """The family and sizes of a model, named as in config.json."""

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
    model_type: Family = "qwen2"
    rope_scaling: RopeScaling | None = None

    @property
    def traits(self) -> Traits:
        """What distinguishes the model's family."""
        return FAMILIES[self.model_type]

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any], where: str, *, closed: bool = False) -> "Architecture":
        """The sizes in a config.json, given its content; `where` names it in errors.

        If it is `closed`, as settings that a user wrote, an unknown key is an error, too. UserError is raised
        for another architecture, a key that is missing or of the wrong type, sizes that don't fit together, and
        a setting that this model doesn't have.
        """
        for key in sorted(settings.keys() - KNOWN_KEYS) if closed else ():
            close = difflib.get_close_matches(key, KNOWN_KEYS, n=1)
            raise UserError(f"{where}: {key} is unknown" + (f"; did you mean {close[0]}?" if close else ""))
        # transformers 5 nests all of it in rope_parameters; older files have rope_theta on top, and rope_scaling.
        rope: dict[str, Any] = {}
        kind = "default"
        for name in ("rope_scaling", "rope_parameters"):
            if not isinstance(found := settings.get(name) or {}, Mapping):
                raise UserError(f"{where}: {name} must be a mapping, not {found!r}")
            rope |= found
            kind = found.get("rope_type", found.get("type", kind)) if kind == "default" else kind
        family = check_supported(settings, kind, where)
        # 10,000 is transformers' default.
        values = {**settings, **rope, "rope_theta": rope.get("rope_theta", settings.get("rope_theta", 10_000.0))}

        def positive(key: str, number_type: Any, default: Any = MISSING) -> Any:
            value = values.get(key)
            value = default if value is None else value
            if value is None or value is MISSING:
                raise UserError(f"{where}: {key} is missing")
            largest = LARGEST.get(key, LARGEST_SIZE if number_type is int else LARGEST_FLOAT)
            # Not `value <= 0 or value > largest`: JSON as Python reads it has NaN.
            if isinstance(value, bool) or not isinstance(value, (int, number_type)) or not 0 < value <= largest:
                noun = "whole number" if number_type is int else "number"
                raise UserError(f"{where}: {key} must be a positive {noun} up to {largest}, not {value!r}")
            return number_type(value)

        tied = settings.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise UserError(f"{where}: tie_word_embeddings must be true or false, not {tied!r}")
        hidden, heads = positive("hidden_size", int), positive("num_attention_heads", int)
        # Qwen3's heads have 128 numbers unless the file says otherwise.
        head_dim = positive("head_dim", int, 128 if family == "qwen3" else max(hidden // heads, 1))
        if settings.get("head_dim") is None and family != "qwen3" and hidden % heads:
            raise UserError(f"{where}: hidden_size {hidden} is not divisible by num_attention_heads ({heads})")
        scaling = None
        if kind == "llama3":
            scaling = RopeScaling(
                *(positive(key, number_type) for key, number_type in RopeScaling.__annotations__.items())
            )
        defaults = {"num_key_value_heads": heads, "head_dim": head_dim, "rope_theta": None}
        numbers = {
            field.name: positive(field.name, field.type, defaults.get(field.name, field.default))
            for field in fields(cls)
            if field.type in (int, float)
        }
        config = cls(**numbers, tie_word_embeddings=tied, model_type=family, rope_scaling=scaling)
        if heads % config.num_key_value_heads:
            raise UserError(
                f"{where}: num_attention_heads {heads} is not divisible by num_key_value_heads "
                f"({config.num_key_value_heads})"
            )
        if config.rope_scaling and not config.rope_scaling.low_freq_factor < config.rope_scaling.high_freq_factor:
            raise UserError(f"{where}: rope_parameters: low_freq_factor is not below high_freq_factor")
        if config.head_dim % 2:
            raise UserError(f"{where}: head_dim {config.head_dim} is odd; rotary positions need pairs")
        return config

    def to_hf(self) -> dict[str, Any]:
        """The keys of a config.json that transformers, new and old, loads as this family's model."""
        sizes = {key: value for key, value in asdict(self).items() if key not in ("model_type", "rope_scaling")}
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {"rope_type": "llama3", **self.rope_scaling._asdict()}
        return {
            "architectures": [self.traits.architecture],
            "model_type": self.model_type,
            **sizes,
            "hidden_act": "silu",
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "rope_scaling": None if self.rope_scaling is None else rope,
            "attention_dropout": 0.0,
            **self.traits.unused,
            "use_cache": True,
        }


SMALLEST = Architecture(1, 1, 1, 1, 1, 1, 2, True)
KNOWN_KEYS = frozenset(key for family in FAMILIES for key in replace(SMALLEST, model_type=family).to_hf())
"""The keys that settings of a user's own model may have."""


def check_supported(settings: Mapping[str, Any], rope_type: Any, where: str) -> Family:
    """The model's family; UserError for a setting with which it would compute something else than the decoder does."""
    family = settings.get("model_type", "qwen2")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"{where}: model_type is {family!r}; supported are {', '.join(FAMILIES)}")
    layers = settings.get("layer_types") or []
    if not isinstance(layers, list | tuple):
        raise UserError(f"{where}: layer_types must be a list, not {layers!r}")
    fixed: list[tuple[str, Any, list[Any]]] = [
        ("hidden_act", settings.get("hidden_act", "silu"), ["silu"]),
        ("layer_types", [kind for kind in layers if kind != "full_attention"], [[]]),
        ("rope_parameters.rope_type", rope_type, ["default", "llama3"]),
        ("attention_dropout", settings.get("attention_dropout", 0.0), [0.0]),
        ("quantization_config", settings.get("quantization_config"), [None]),
        *((key, settings.get(key, value), [value]) for key, value in FAMILIES[family].unused.items()),
    ]
    for key, value, supported in fixed:
        if value not in supported:
            choices = " or ".join(map(repr, supported))
            raise UserError(f"{where}: {key} is {value!r}; this model supports only {choices}")
    return family


def published(
    shared: dict[str, Any], hidden: int, mlp: int, layers: int, heads: int, kv_heads: int = 8
) -> Architecture:
    """The sizes of a checkpoint; `shared` are those that it has in common with others of its family."""
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "tie_word_embeddings": hidden < 3_584,
    }
    return Architecture(**sizes | shared)


QWEN25, QWEN25_FROM_7B, LONG = {"vocab_size": 151_936}, {"vocab_size": 152_064}, {"max_position_embeddings": 131_072}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
LLAMA31 = {"model_type": "llama", "vocab_size": 128_256, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, **LONG}
LLAMA31 |= {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8_192)}
LLAMA32 = {**LLAMA31, "rope_scaling": RopeScaling(32.0, 1.0, 4.0, 8_192)}
BOTH = ("", "-Instruct")
PRESETS: dict[str, Architecture] = {
    **{f"Qwen/Qwen2.5-0.5B{kind}": published(QWEN25, 896, 4_864, 24, 14, 2) for kind in BOTH},
    "Qwen/Qwen2.5-1.5B": published(QWEN25 | LONG, 1_536, 8_960, 28, 12, 2),
    "Qwen/Qwen2.5-1.5B-Instruct": published(QWEN25, 1_536, 8_960, 28, 12, 2),
    **{f"Qwen/Qwen2.5-3B{kind}": published(QWEN25, 2_048, 11_008, 36, 16, 2) for kind in BOTH},
    "Qwen/Qwen2.5-7B": published(QWEN25_FROM_7B | LONG, 3_584, 18_944, 28, 28, 4),
    "Qwen/Qwen2.5-7B-Instruct": published(QWEN25_FROM_7B, 3_584, 18_944, 28, 28, 4),
    "Qwen/Qwen3-0.6B": published(QWEN3, 1_024, 3_072, 28, 16),
    "Qwen/Qwen3-1.7B": published(QWEN3, 2_048, 6_144, 28, 16),
    "Qwen/Qwen3-4B": published(QWEN3, 2_560, 9_728, 36, 32),
    "Qwen/Qwen3-8B": published(QWEN3, 4_096, 12_288, 36, 32),
    **{f"meta-llama/Llama-3.2-1B{kind}": published(LLAMA32, 2_048, 8_192, 16, 32) for kind in BOTH},
    **{f"meta-llama/Llama-3.2-3B{kind}": published(LLAMA32, 3_072, 8_192, 28, 24) for kind in BOTH},
    **{f"meta-llama/Llama-3.1-8B{kind}": published(LLAMA31, 4_096, 14_336, 32, 32) for kind in BOTH},
}
"""The sizes of published checkpoints, by their hub ids: of others the hub has them."""
