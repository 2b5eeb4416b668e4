"""The sizes of published checkpoints, as in their own config.json."""

from collections.abc import Mapping
from typing import Any

from mllm.model.architecture import Architecture

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def published(shared: Mapping[str, Any], *sizes: int) -> Architecture:
    """The sizes of a checkpoint, in the order of `SIZES`; `shared` are the settings that its family shares."""
    tied = {"tie_word_embeddings": sizes[0] < 3_584}
    return Architecture.from_hf({"rope_theta": 1e6, **tied, **dict(zip(SIZES, sizes, strict=True)), **shared}, "")


QWEN25, QWEN25_FROM_7B, LONG = {"vocab_size": 151_936}, {"vocab_size": 152_064}, {"max_position_embeddings": 131_072}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
LLAMA3 = {"model_type": "llama", "vocab_size": 128_256, "rope_theta": 500_000, "rms_norm_eps": 1e-5, **LONG}
SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8_192}
LLAMA31, LLAMA32 = ({**LLAMA3, "rope_scaling": {"rope_type": "llama3", "factor": by, **SCALING}} for by in (8, 32))
GEMMA1B = {"model_type": "gemma3_text", "vocab_size": 262_144, "sliding_window": 512, "max_position_embeddings": 32_768}
GEMMA4B = {"model_type": "gemma3_text", "sliding_window": 1_024, "rope_scaling": {"rope_type": "linear", "factor": 8}}
QWEN35 = {"model_type": "qwen3_5_text", "vocab_size": 248_320, "head_dim": 256, "max_position_embeddings": 262_144}
QWEN35 |= {"rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
V = "linear_num_value_heads"
BOTH = ("", "-Instruct")
PRESETS: dict[str, Architecture] = {
    **{f"Qwen/Qwen2.5-0.5B{suffix}": published(QWEN25, 896, 4_864, 24, 14, 2) for suffix in BOTH},
    "Qwen/Qwen2.5-1.5B": published(QWEN25 | LONG, 1_536, 8_960, 28, 12, 2),
    "Qwen/Qwen2.5-1.5B-Instruct": published(QWEN25, 1_536, 8_960, 28, 12, 2),
    **{f"Qwen/Qwen2.5-3B{suffix}": published(QWEN25, 2_048, 11_008, 36, 16, 2) for suffix in BOTH},
    "Qwen/Qwen2.5-7B": published(QWEN25_FROM_7B | LONG, 3_584, 18_944, 28, 28, 4),
    "Qwen/Qwen2.5-7B-Instruct": published(QWEN25_FROM_7B, 3_584, 18_944, 28, 28, 4),
    "Qwen/Qwen3-0.6B": published(QWEN3, 1_024, 3_072, 28, 16, 8),
    "Qwen/Qwen3-1.7B": published(QWEN3, 2_048, 6_144, 28, 16, 8),
    "Qwen/Qwen3-4B": published(QWEN3, 2_560, 9_728, 36, 32, 8),
    "Qwen/Qwen3-8B": published(QWEN3, 4_096, 12_288, 36, 32, 8),
    **{f"Qwen/Qwen3.5-0.8B{suffix}": published(QWEN35 | {V: 16}, 1_024, 3_584, 24, 8, 2) for suffix in ("", "-Base")},
    **{f"Qwen/Qwen3.5-2B{suffix}": published(QWEN35 | {V: 16}, 2_048, 6_144, 24, 8, 2) for suffix in ("", "-Base")},
    **{f"Qwen/Qwen3.5-4B{suffix}": published(QWEN35 | {V: 32}, 2_560, 9_216, 32, 16, 4) for suffix in ("", "-Base")},
    **{f"Qwen/Qwen3.5-9B{suffix}": published(QWEN35 | {V: 32}, 4_096, 12_288, 32, 16, 4) for suffix in ("", "-Base")},
    "Qwen/Qwen3.5-27B": published(QWEN35 | {V: 48}, 5_120, 17_408, 64, 24, 4),
    **{f"meta-llama/Llama-3.2-1B{suffix}": published(LLAMA32, 2_048, 8_192, 16, 32, 8) for suffix in BOTH},
    **{f"meta-llama/Llama-3.2-3B{suffix}": published(LLAMA32, 3_072, 8_192, 28, 24, 8) for suffix in BOTH},
    **{f"meta-llama/Llama-3.1-8B{suffix}": published(LLAMA31, 4_096, 14_336, 32, 32, 8) for suffix in BOTH},
    **{f"google/gemma-3-270m{suffix}": published(GEMMA1B, 640, 2_048, 18, 4, 1) for suffix in ("", "-it")},
    **{f"google/gemma-3-1b{suffix}": published(GEMMA1B, 1_152, 6_912, 26, 4, 1) for suffix in ("-pt", "-it")},
    **{f"google/gemma-3-4b{suffix}": published(GEMMA4B, 2_560, 10_240, 34, 8, 4) for suffix in ("-pt", "-it")},
}
"""The sizes of published checkpoints by their hub ids; for other ids the hub is asked."""
