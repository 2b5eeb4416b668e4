"""Makes tests/fixtures: tiny Qwen2 checkpoints as transformers saves them, and the logits that it computes.

Run it where torch is installed, which the project itself never needs: `python tests/make_fixtures.py`. The
result is committed (transformers 5.23, torch 2.13, CPU).

Every parameter is drawn wide, biases and norms too: with a fresh model's zeros, ones and deviations of 0.02
a wrong layer would hardly show in the logits.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

FIXTURES = Path(__file__).parent / "fixtures"
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BATCH, TIME = 2, 12


def make(name: str, *, dtype: torch.dtype, max_shard_size: str, seed: int, **settings: object) -> None:
    config = Qwen2Config(**SIZES, max_position_embeddings=64, **settings)
    generator = torch.Generator().manual_seed(seed)
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.25, generator=generator)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)

    # Read back, as a user would: `model.to(bfloat16)` has rounded the frequencies of the rotary positions,
    # too.
    saved = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, config.vocab_size, (BATCH, TIME), generator=generator)
    positions = torch.arange(TIME) + torch.tensor([[0], [7]])
    with torch.no_grad():
        logits = saved(tokens, attention_mask=torch.ones_like(tokens), position_ids=positions, use_cache=False).logits
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens.numpy().astype(np.int32),
        positions=positions.numpy().astype(np.int32),
        logits=logits.numpy(),
    )


if __name__ == "__main__":
    make(
        "tied",
        dtype=torch.float32,
        max_shard_size="1GB",
        seed=0,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    make(
        "untied_sharded",
        dtype=torch.float32,
        max_shard_size="40KB",
        seed=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
    )
    make(
        "grouped_bfloat16",
        dtype=torch.bfloat16,
        max_shard_size="1GB",
        seed=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
