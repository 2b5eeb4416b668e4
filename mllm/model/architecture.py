"""A decoder's family and sizes, from and to config.json; an unsupported architecture is refused by name."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from mllm.errors import UserError

LARGEST_SIZE = 2**31 - 1  # JAX counts in int32
LARGEST_FLOAT = 10**15
LARGEST = {"num_hidden_layers": 10_000}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

Family = Literal["qwen2", "qwen3", "qwen3_5_text", "llama", "smollm3", "olmo2", "gemma3_text"]
"""A `model_type` of config.json: Qwen2 and Qwen2.5; Qwen3's dense models; Qwen3.5's without images; Llama 3, 3.1 and
3.2; SmolLM3; OLMo 2; and Gemma 3 without images."""
TEXT_PARTS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
"""Vision-language models, with the family of their text part (`text_config`); only the text part is supported."""


class Traits(NamedTuple):
    """The properties of a family, apart from sizes."""

    architecture: str
    """The class of transformers that loads it."""
    fixed: dict[str, Any]
    """Further keys of its config.json, with the only value that is supported."""
    defaults: dict[str, Any]
    """transformers' values for keys that config.json leaves out, where the family has its own."""
    qkv_bias: bool = False
    """Whether the products that make queries, keys and values have a bias."""
    head_norms: Literal["each", "all"] | None = None
    """Whether each head of queries and of keys is normalized before its rotation, or all heads together."""
    norms: Literal["before", "after", "both"] = "before"
    """Where attention and the feed-forward network have a norm: before, after (on their output), or at both places."""
    norms_add_one: bool = False
    """Whether norms multiply by 1 + weight."""
    gemma: bool = False
    """Whether the gate is GELU, the embedding is multiplied by sqrt(hidden_size), and some layers have a window."""
    delta: bool = False
    """Whether some layers are gated delta nets; attention in the other layers then has an output gate."""


SILU: dict[str, Any] = {"hidden_act": "silu"}
NO_WINDOW, NO_BIAS = {"use_sliding_window": False}, {"attention_bias": False}
GEMMA_FIXED = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False, **NO_BIAS}
GEMMA_FIXED |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window_pattern": 6}
GEMMA = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
GEMMA |= {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4_096, "max_position_embeddings": 131_072}
GEMMA |= {"rope_theta": 1_000_000, "rope_local_base_freq": 10_000}
DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "head_dim": 256,
}
DELTA |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "partial_rotary_factor": 0.25}
DELTA_FIXED: dict[str, Any] = SILU | NO_BIAS | {"attn_output_gate": True}
SMOLLM3 = {"rope_theta": 2e6, "tie_word_embeddings": True}
FAMILIES: dict[Family, Traits] = {
    "qwen2": Traits("Qwen2ForCausalLM", SILU | NO_WINDOW, {}, qkv_bias=True),
    "qwen3": Traits("Qwen3ForCausalLM", SILU | NO_WINDOW | NO_BIAS, {"head_dim": 128}, head_norms="each"),
    "qwen3_5_text": Traits("Qwen3_5ForCausalLM", DELTA_FIXED, DELTA, head_norms="each", norms_add_one=True, delta=True),
    "llama": Traits("LlamaForCausalLM", SILU | NO_BIAS | {"mlp_bias": False}, {}),
    "smollm3": Traits("SmolLM3ForCausalLM", SILU | NO_WINDOW | NO_BIAS | {"mlp_bias": False}, SMOLLM3),
    "olmo2": Traits("Olmo2ForCausalLM", SILU | NO_BIAS, {"rms_norm_eps": 1e-5}, head_norms="all", norms="after"),
    "gemma3_text": Traits(
        "Gemma3ForCausalLM", GEMMA_FIXED, GEMMA, head_norms="each", norms="both", norms_add_one=True, gemma=True
    ),
}


class RopeScaling(NamedTuple):
    """Llama 3.1's change of the rotary frequencies for long contexts; the names are config.json's."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class DeltaNet(NamedTuple):
    """The sizes of gated delta nets."""

    taps: int
    """The number of tokens that the convolution reads, the current token included."""
    key_dim: int
    value_dim: int
    key_heads: int
    value_heads: int
    """A multiple of the number of key heads: consecutive value heads share a key head."""

    @property
    def keys(self) -> int:
        """The number of elements of a token's keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


DELTA_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""The names of these sizes in config.json."""


class LayerKind(NamedTuple):
    """The properties of a layer's attention."""

    window: int | None
    """The most tokens that a query attends to, its own included; None: no limit."""
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
    partial_rotary_factor: float = 1.0
    """The share of a head's dims that are rotated, from the first."""
    linear_conv_kernel_dim: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None

    @property
    def rotary_dim(self) -> int:
        """The number of a head's dims that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def delta_net(self) -> "DeltaNet":
        """The sizes of the delta nets; only where the family has them."""
        return DeltaNet(*(getattr(self, key) for key in DELTA_SIZES))

    @property
    def stack_of_layer(self) -> tuple[tuple[str, int], ...]:
        """The stack that each layer's parameters are in, and their index there, by the names in layout.py.

        The stack is `layers`, or `delta` for a delta net.
        """
        names = ["delta" if kind == LINEAR else "layers" for kind in self.layer_types]
        names = names or ["layers"] * self.num_hidden_layers
        return tuple((name, names[:layer].count(name)) for layer, name in enumerate(names))

    def layers_of(self, stack: str) -> tuple[int, ...]:
        """The numbers of the layers in this stack of parameters."""
        return tuple(layer for layer, (name, _) in enumerate(self.stack_of_layer) if name == stack)

    @property
    def period(self) -> int:
        """The least number of layers after which the sequence of stacks repeats."""
        names, count = [name for name, _ in self.stack_of_layer], self.num_hidden_layers
        return next(n for n in range(1, count + 1) if count % n == 0 and names == names[:n] * (count // n))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers with attention: a single kind, or two in Gemma 3 and SmolLM3."""
        full = LayerKind(None, self.rope_theta, self.rope_scaling)
        other = LayerKind(self.sliding_window, self.rope_local_base_freq)  # both None in SmolLM3
        return (full, other) if self.traits.gemma or self.no_rope_layers else (full,)

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """The number of the kind of each layer with attention."""
        if self.layer_types:
            return tuple(int(kind == SLIDING) for kind in self.layer_types if kind != LINEAR)
        return tuple(1 - rotated for rotated in self.no_rope_layers) or (0,) * self.num_hidden_layers

    @property
    def traits(self) -> Traits:
        """The traits of the model's family."""
        return FAMILIES[self.model_type]

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any], where: str, *, closed: bool = False) -> "Architecture":
        """The sizes in a config.json, given its content; `where` names it in errors.

        If it is `closed`, as a user's settings are, an unknown key is an error. UserError is raised for another
        architecture, a missing key, or a value of the wrong type. Sizes that don't fit together, and settings that this
        model doesn't have, are errors as well.
        """
        for key in sorted(settings.keys() - KNOWN_KEYS) if closed else ():
            close = difflib.get_close_matches(key, KNOWN_KEYS, n=1)
            raise UserError(f"{where}: {key} is unknown" + (f"; did you mean {close[0]}?" if close else ""))

        def mapping(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
            if not isinstance(value := settings.get(name) or {}, Mapping):
                raise UserError(f"{where}: {name} must be a mapping, not {value!r}")
            return value

        if isinstance(model_type := settings.get("model_type"), str) and model_type in TEXT_PARTS:
            settings = {**settings, "model_type": TEXT_PARTS[model_type], **mapping(settings, "text_config")}
        family = settings.get("model_type", "qwen2")
        if not isinstance(family, str) or family not in FAMILIES:
            raise UserError(f"{where}: model_type is {family!r}; supported are {', '.join(FAMILIES)}")
        traits = FAMILIES[family]
        settings = {**settings, **{key: value for key, value in traits.defaults.items() if settings.get(key) is None}}
        # transformers 5 nests all of it in rope_parameters, for Gemma 3 a level deeper; older files have rope_theta on
        # top, and rope_scaling.
        rope: dict[str, Any] = {}
        rope_type = "default"
        nested = mapping(settings, "rope_parameters")
        local = mapping(nested, "sliding_attention")
        for part in (mapping(settings, "rope_scaling"), mapping(nested, "full_attention") if traits.gemma else nested):
            rope |= part
            rope_type = part.get("rope_type", part.get("type", rope_type)) if rope_type == "default" else rope_type
        check_supported(settings, traits, rope_type, local, where)
        # 10,000 is transformers' default.
        values = {
            **settings,
            **{key: value for key, value in rope.items() if value is not None},
            "rope_theta": rope.get("rope_theta", settings.get("rope_theta", 10_000.0)),
        }
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
            value = settings.get(key) or default
            if not isinstance(value, list | tuple) or len(value) != layers or any(x not in known for x in value):
                raise UserError(f"{where}: {key} must be a list of {layers}, each {known[0]!r} or {known[1]!r}")
            return tuple(value)

        tied = settings.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise UserError(f"{where}: tie_word_embeddings must be true or false, not {tied!r}")
        hidden, heads = positive("hidden_size", int), positive("num_attention_heads", int)
        head_dim = positive("head_dim", int, max(hidden // heads, 1))
        if settings.get("head_dim") is None and hidden % heads:
            raise UserError(f"{where}: hidden_size {hidden} is not divisible by num_attention_heads ({heads})")
        scaling: RopeScaling | float | None = positive("factor", float) if rope_type == "linear" else None
        if rope_type == "llama3":
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
        elif traits.delta:
            numbers |= {key: positive(key, int) for key in DELTA_SIZES}
            interval = positive("full_attention_interval", int, 4)
            kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
            numbers["layer_types"] = of_layers("layer_types", (FULL, LINEAR), kinds)
        elif family == "smollm3":
            numbers["no_rope_layers"] = of_layers("no_rope_layers", (0, 1))
        config = cls(**numbers, tie_word_embeddings=tied, model_type=family, rope_scaling=scaling)
        if heads % (shared := config.num_key_value_heads):
            raise UserError(f"{where}: num_attention_heads {heads} is not divisible by num_key_value_heads ({shared})")
        if isinstance(scaling, RopeScaling) and not scaling.low_freq_factor < scaling.high_freq_factor:
            raise UserError(f"{where}: rope_parameters: low_freq_factor is not below high_freq_factor")
        if not config.rotary_dim or config.rotary_dim % 2:
            share = f" * partial_rotary_factor {config.partial_rotary_factor}" if traits.delta else ""
            problem = "is odd" if config.rotary_dim % 2 else "is less than 1"
            raise UserError(f"{where}: head_dim {config.head_dim}{share} {problem}; rotary positions need pairs")
        if config.partial_rotary_factor != 1 and not traits.delta:
            raise UserError(
                f"{where}: partial_rotary_factor is {config.partial_rotary_factor}; {family} supports only 1"
            )
        if traits.delta:
            net = config.delta_net
            if FULL not in config.layer_types:
                raise UserError(f"{where}: layer_types has no {FULL!r}; at least one layer must be of that kind")
            if net.value_heads % net.key_heads:
                divisor = f"linear_num_key_heads ({net.key_heads})"
                raise UserError(f"{where}: linear_num_value_heads {net.value_heads} is not divisible by {divisor}")
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
        if self.traits.delta:
            parameters |= {"partial_rotary_factor": sizes["partial_rotary_factor"]}
        else:
            del sizes["partial_rotary_factor"]
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
    """Raise UserError for a setting that the decoder does not compute.

    `local` has the rotary positions of sliding layers.
    """
    layers = settings.get("layer_types") or []
    if not isinstance(layers, list | tuple):
        raise UserError(f"{where}: layer_types must be a list, not {layers!r}")
    known = [FULL, *[SLIDING] * traits.gemma, *[LINEAR] * traits.delta]
    fixed: list[tuple[str, Any, list[Any]]] = [
        ("layer_types", [kind for kind in layers if kind not in known], [[]]),
        ("rope_parameters.rope_type", rope_type, ["default", "linear", "llama3"]),
        ("rope_parameters.sliding_attention.rope_type", local.get("rope_type", "default"), ["default"]),
        ("attention_dropout", settings.get("attention_dropout", 0.0), [0.0]),
        # transformers computes SiLU whatever this says, vLLM a sigmoid where it says so.
        ("output_gate_type", settings.get("output_gate_type", "silu"), ["silu", "swish"]),
        ("quantization_config", settings.get("quantization_config"), [None]),
        *((key, settings.get(key, value), [value]) for key, value in traits.fixed.items()),
    ]
    for key, value, supported in fixed:
        if value not in supported:
            choices = " or ".join(map(repr, supported))
            raise UserError(f"{where}: {key} is {value!r}; this model supports only {choices}")
