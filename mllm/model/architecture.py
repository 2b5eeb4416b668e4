"""A decoder's family and sizes, from and to config.json; what the decoder does not compute is refused by name.

`PRESETS` has the sizes of published checkpoints, as in their own config.json.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from mllm.errors import UserError

LARGEST_SIZE = 2**31 - 1  # JAX counts in int32
LARGEST_FLOAT = 10**15
LARGEST = {"num_hidden_layers": 10_000}
FULL, SLIDING = "full_attention", "sliding_attention"

Family = Literal["qwen2", "qwen3", "llama", "smollm3", "olmo2", "gemma3_text"]
"""A `model_type` of config.json: Qwen2 and Qwen2.5; Qwen3's dense models; Llama 3, 3.1 and 3.2; SmolLM3; OLMo 2; and
Gemma 3 without images."""


class Traits(NamedTuple):
    """What distinguishes a family, beside its sizes."""

    architecture: str
    """The class of transformers that loads it."""
    fixed: dict[str, Any]
    """Further keys of its config.json, with the only value that is supported."""
    defaults: dict[str, Any]
    """The values of transformers for what config.json leaves out, where they are the family's own."""
    qkv_bias: bool = False
    """Whether the products that make queries, keys and values have a bias."""
    head_norms: Literal["each", "all"] | None = None
    """Whether each head of queries and of keys is normalized before its rotation, or all heads together."""
    norms: Literal["before", "after", "both"] = "before"
    """Where attention and the feed-forward network have a norm: before, after (of what is added), or both."""
    gemma: bool = False
    """Whether norms multiply by 1 + weight, the gate is GELU, and the embedding is multiplied by sqrt(hidden_size)."""


SILU: dict[str, Any] = {"hidden_act": "silu"}
NO_WINDOW, NO_BIAS = {"use_sliding_window": False}, {"attention_bias": False}
GEMMA_FIXED = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False, **NO_BIAS}
GEMMA_FIXED |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window_pattern": 6}
GEMMA = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
GEMMA |= {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4_096, "max_position_embeddings": 131_072}
GEMMA |= {"rope_theta": 1_000_000, "rope_local_base_freq": 10_000}
SMOLLM3 = {"rope_theta": 2e6, "tie_word_embeddings": True}
FAMILIES: dict[Family, Traits] = {
    "qwen2": Traits("Qwen2ForCausalLM", SILU | NO_WINDOW, {}, qkv_bias=True),
    "qwen3": Traits("Qwen3ForCausalLM", SILU | NO_WINDOW | NO_BIAS, {"head_dim": 128}, head_norms="each"),
    "llama": Traits("LlamaForCausalLM", SILU | NO_BIAS | {"mlp_bias": False}, {}),
    "smollm3": Traits("SmolLM3ForCausalLM", SILU | NO_WINDOW | NO_BIAS | {"mlp_bias": False}, SMOLLM3),
    "olmo2": Traits("Olmo2ForCausalLM", SILU | NO_BIAS, {"rms_norm_eps": 1e-5}, head_norms="all", norms="after"),
    "gemma3_text": Traits("Gemma3ForCausalLM", GEMMA_FIXED, GEMMA, head_norms="each", norms="both", gemma=True),
}


class RopeScaling(NamedTuple):
    """Llama 3.1's change of the rotary frequencies for long contexts; the names are those in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class LayerKind(NamedTuple):
    """What distinguishes the attention of some layers."""

    window: int | None
    """How many tokens a query attends to at most, its own the last of them; None: no limit."""
    rope_theta: float | None
    """The base of the rotary frequencies; None: nothing is rotated."""
    rope_scaling: RopeScaling | float | None = None


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
    rope_scaling: RopeScaling | float | None = None
    """A number divides all frequencies (arXiv:2306.15595)."""
    query_pre_attn_scalar: int | None = None
    sliding_window: int | None = None
    rope_local_base_freq: float | None = None
    layer_types: tuple[str, ...] = ()
    no_rope_layers: tuple[int, ...] = ()

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers: one, or two in Gemma 3 and SmolLM3."""
        full = LayerKind(None, self.rope_theta, self.rope_scaling)
        other = LayerKind(self.sliding_window, self.rope_local_base_freq)  # both None in SmolLM3
        return (full, other) if self.layer_types or self.no_rope_layers else (full,)

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """The number of each layer's kind."""
        if self.layer_types:
            return tuple(int(kind == SLIDING) for kind in self.layer_types)
        return tuple(1 - rotated for rotated in self.no_rope_layers) or (0,) * self.num_hidden_layers

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

        def mapping(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
            if not isinstance(found := settings.get(name) or {}, Mapping):
                raise UserError(f"{where}: {name} must be a mapping, not {found!r}")
            return found

        if settings.get("model_type") == "gemma3":  # a model of texts and images, of which the texts' part is made
            settings = {**settings, "model_type": "gemma3_text", **mapping(settings, "text_config")}
        family = settings.get("model_type", "qwen2")
        if not isinstance(family, str) or family not in FAMILIES:
            raise UserError(f"{where}: model_type is {family!r}; supported are {', '.join(FAMILIES)}")
        traits = FAMILIES[family]
        settings = {**settings, **{key: x for key, x in traits.defaults.items() if settings.get(key) is None}}
        # transformers 5 nests all of it in rope_parameters, for Gemma 3 a level deeper; older files have rope_theta on
        # top, and rope_scaling.
        rope: dict[str, Any] = {}
        kind = "default"
        nested = mapping(settings, "rope_parameters")
        local = mapping(nested, "sliding_attention")
        for found in (mapping(settings, "rope_scaling"), mapping(nested, "full_attention") if traits.gemma else nested):
            rope |= found
            kind = found.get("rope_type", found.get("type", kind)) if kind == "default" else kind
        check_supported(settings, traits, kind, local, where)
        # 10,000 is transformers' default.
        values = {**settings, **rope, "rope_theta": rope.get("rope_theta", settings.get("rope_theta", 10_000.0))}
        values |= {"rope_local_base_freq": local.get("rope_theta", settings.get("rope_local_base_freq"))}

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

        def of_layers(key: str, known: Sequence[Any], default: Any = None) -> tuple:
            found = settings.get(key) or default
            if not isinstance(found, list | tuple) or len(found) != layers or any(one not in known for one in found):
                raise UserError(f"{where}: {key} must be a list of {layers}, each {known[0]!r} or {known[1]!r}")
            return tuple(found)

        tied = settings.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise UserError(f"{where}: tie_word_embeddings must be true or false, not {tied!r}")
        hidden, heads = positive("hidden_size", int), positive("num_attention_heads", int)
        head_dim = positive("head_dim", int, max(hidden // heads, 1))
        if settings.get("head_dim") is None and hidden % heads:
            raise UserError(f"{where}: hidden_size {hidden} is not divisible by num_attention_heads ({heads})")
        scaling: RopeScaling | float | None = positive("factor", float) if kind == "linear" else None
        if kind == "llama3":
            scaling = RopeScaling(*(positive(*number) for number in RopeScaling.__annotations__.items()))
        defaults = {"num_key_value_heads": heads, "head_dim": head_dim, "rope_theta": None}
        numbers = {
            field.name: positive(field.name, field.type, defaults.get(field.name, field.default))
            for field in fields(cls)
            if field.type in (int, float)
        }
        layers = numbers["num_hidden_layers"]
        if traits.gemma:
            numbers |= {key: positive(key, int) for key in ("query_pre_attn_scalar", "sliding_window")}
            numbers["rope_local_base_freq"] = positive("rope_local_base_freq", float)
            kinds = [FULL if layer % 6 == 5 else SLIDING for layer in range(layers)]
            numbers["layer_types"] = of_layers("layer_types", (FULL, SLIDING), kinds)
        elif family == "smollm3":
            numbers["no_rope_layers"] = of_layers("no_rope_layers", (0, 1))
        config = cls(**numbers, tie_word_embeddings=tied, model_type=family, rope_scaling=scaling)
        if heads % (shared := config.num_key_value_heads):
            raise UserError(f"{where}: num_attention_heads {heads} is not divisible by num_key_value_heads ({shared})")
        if isinstance(scaling, RopeScaling) and not scaling.low_freq_factor < scaling.high_freq_factor:
            raise UserError(f"{where}: rope_parameters: low_freq_factor is not below high_freq_factor")
        if config.head_dim % 2:
            raise UserError(f"{where}: head_dim {config.head_dim} is odd; rotary positions need pairs")
        return config

    def to_hf(self) -> dict[str, Any]:
        """The keys of a config.json that transformers, new and old, loads as this family's model."""
        sizes = {key: value for key, value in asdict(self).items() if value is not None and value != ()}
        scaling = self.rope_scaling
        rope: dict[str, Any] = {"rope_type": "default"}
        if isinstance(scaling, RopeScaling):
            rope = {"rope_type": "llama3", **scaling._asdict()}
        elif scaling is not None:
            rope = {"rope_type": "linear", "factor": scaling}
        parameters = {**rope, "rope_theta": self.rope_theta}
        if self.traits.gemma:
            local = {"rope_type": "default", "rope_theta": self.rope_local_base_freq}
            parameters = {"full_attention": parameters, "sliding_attention": local}
        return {
            **sizes,
            "architectures": [self.traits.architecture],
            "rope_parameters": parameters,
            "rope_scaling": None if scaling is None else rope,
            "attention_dropout": 0.0,
            **self.traits.fixed,
            "use_cache": True,
        }


SMALLEST = Architecture(1, 1, 1, 1, 1, 1, 2, True)
KNOWN_KEYS = frozenset(field.name for field in fields(Architecture)).union(
    *(replace(SMALLEST, model_type=family).to_hf() for family in FAMILIES)
)
"""The keys that settings of a user's own model may have."""


def check_supported(
    settings: Mapping[str, Any], traits: Traits, rope_type: Any, local: Mapping[str, Any], where: str
) -> None:
    """Raise UserError for a setting with which the model would compute something else than the decoder does.

    `local` has the rotary positions of sliding layers.
    """
    layers = settings.get("layer_types") or []
    if not isinstance(layers, list | tuple):
        raise UserError(f"{where}: layer_types must be a list, not {layers!r}")
    known = [FULL, SLIDING] if traits.gemma else [FULL]
    fixed: list[tuple[str, Any, list[Any]]] = [
        ("layer_types", [kind for kind in layers if kind not in known], [[]]),
        ("rope_parameters.rope_type", rope_type, ["default", "linear", "llama3"]),
        ("rope_parameters.sliding_attention.rope_type", local.get("rope_type", "default"), ["default"]),
        ("attention_dropout", settings.get("attention_dropout", 0.0), [0.0]),
        ("quantization_config", settings.get("quantization_config"), [None]),
        *((key, settings.get(key, value), [value]) for key, value in traits.fixed.items()),
    ]
    for key, value, supported in fixed:
        if value not in supported:
            choices = " or ".join(map(repr, supported))
            raise UserError(f"{where}: {key} is {value!r}; this model supports only {choices}")


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def published(shared: Mapping[str, Any], *sizes: int) -> Architecture:
    """The sizes of a checkpoint, in the order of `SIZES`; `shared` are those that others of its family have, too."""
    tied = {"tie_word_embeddings": sizes[0] < 3_584}
    return Architecture.from_hf({"rope_theta": 1e6, **tied, **dict(zip(SIZES, sizes, strict=True)), **shared}, "")


QWEN25, QWEN25_FROM_7B, LONG = {"vocab_size": 151_936}, {"vocab_size": 152_064}, {"max_position_embeddings": 131_072}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
LLAMA3 = {"model_type": "llama", "vocab_size": 128_256, "rope_theta": 500_000, "rms_norm_eps": 1e-5, **LONG}
SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8_192}
LLAMA31, LLAMA32 = ({**LLAMA3, "rope_scaling": {"rope_type": "llama3", "factor": by, **SCALING}} for by in (8, 32))
GEMMA1B = {"model_type": "gemma3_text", "vocab_size": 262_144, "sliding_window": 512, "max_position_embeddings": 32_768}
GEMMA4B = {"model_type": "gemma3_text", "sliding_window": 1_024, "rope_scaling": {"rope_type": "linear", "factor": 8}}
BOTH = ("", "-Instruct")
PRESETS: dict[str, Architecture] = {
    **{f"Qwen/Qwen2.5-0.5B{kind}": published(QWEN25, 896, 4_864, 24, 14, 2) for kind in BOTH},
    "Qwen/Qwen2.5-1.5B": published(QWEN25 | LONG, 1_536, 8_960, 28, 12, 2),
    "Qwen/Qwen2.5-1.5B-Instruct": published(QWEN25, 1_536, 8_960, 28, 12, 2),
    **{f"Qwen/Qwen2.5-3B{kind}": published(QWEN25, 2_048, 11_008, 36, 16, 2) for kind in BOTH},
    "Qwen/Qwen2.5-7B": published(QWEN25_FROM_7B | LONG, 3_584, 18_944, 28, 28, 4),
    "Qwen/Qwen2.5-7B-Instruct": published(QWEN25_FROM_7B, 3_584, 18_944, 28, 28, 4),
    "Qwen/Qwen3-0.6B": published(QWEN3, 1_024, 3_072, 28, 16, 8),
    "Qwen/Qwen3-1.7B": published(QWEN3, 2_048, 6_144, 28, 16, 8),
    "Qwen/Qwen3-4B": published(QWEN3, 2_560, 9_728, 36, 32, 8),
    "Qwen/Qwen3-8B": published(QWEN3, 4_096, 12_288, 36, 32, 8),
    **{f"meta-llama/Llama-3.2-1B{kind}": published(LLAMA32, 2_048, 8_192, 16, 32, 8) for kind in BOTH},
    **{f"meta-llama/Llama-3.2-3B{kind}": published(LLAMA32, 3_072, 8_192, 28, 24, 8) for kind in BOTH},
    **{f"meta-llama/Llama-3.1-8B{kind}": published(LLAMA31, 4_096, 14_336, 32, 32, 8) for kind in BOTH},
    **{f"google/gemma-3-270m{kind}": published(GEMMA1B, 640, 2_048, 18, 4, 1) for kind in ("", "-it")},
    **{f"google/gemma-3-1b{kind}": published(GEMMA1B, 1_152, 6_912, 26, 4, 1) for kind in ("-pt", "-it")},
    **{f"google/gemma-3-4b{kind}": published(GEMMA4B, 2_560, 10_240, 34, 8, 4) for kind in ("-pt", "-it")},
}
"""The sizes of published checkpoints, by their hub ids: of others the hub has them."""
