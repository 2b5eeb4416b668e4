"""Published checkpoints by name: their sizes, as in their own config.json."""

from mllm.model.architecture import Architecture, RopeScaling


def qwen25(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, eps: float, length: int) -> Architecture:
    return Architecture(
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


def qwen3(hidden: int, mlp: int, layers: int, heads: int) -> Architecture:
    return Architecture(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=hidden < 4_096,
        max_position_embeddings=40_960,
        model_type="qwen3",
    )


def llama(hidden: int, mlp: int, layers: int, heads: int, scaling: float) -> Architecture:
    return Architecture(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=hidden // heads,
        tie_word_embeddings=hidden < 4_096,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        model_type="llama",
        rope_scaling=RopeScaling(scaling, 1.0, 4.0, 8_192),
    )


BOTH = ("", "-Instruct")
PRESETS: dict[str, Architecture] = {
    # Base and Instruct differ only in the last two columns.
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
    "Qwen/Qwen3-0.6B": qwen3(1_024, 3_072, 28, 16),
    "Qwen/Qwen3-1.7B": qwen3(2_048, 6_144, 28, 16),
    "Qwen/Qwen3-4B": qwen3(2_560, 9_728, 36, 32),
    "Qwen/Qwen3-8B": qwen3(4_096, 12_288, 36, 32),
    "Qwen/Qwen3-14B": qwen3(5_120, 17_408, 40, 40),
    "Qwen/Qwen3-32B": qwen3(5_120, 25_600, 64, 64),
    **{f"meta-llama/Llama-3.2-1B{kind}": llama(2_048, 8_192, 16, 32, 32.0) for kind in BOTH},
    **{f"meta-llama/Llama-3.2-3B{kind}": llama(3_072, 8_192, 28, 24, 32.0) for kind in BOTH},
    **{f"meta-llama/Llama-3.1-8B{kind}": llama(4_096, 14_336, 32, 32, 8.0) for kind in BOTH},
}
