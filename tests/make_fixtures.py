"""Makes tests/fixtures: tiny checkpoints of each family as transformers saves them, the logits that it computes, and
its greedy completions; and adapters of two of them, as peft saves them.

Run it where torch and peft are installed, which the project itself never needs: `python tests/make_fixtures.py`. The
result is committed (transformers 5.23, torch 2.13, peft 0.21, CPU). tests/fixtures/tiny_sft is what
`python tools/export.py runs/tiny_sft --dtype bfloat16` writes after `tiny_sft.yaml`, and tests/fixtures/tiny_grpo what
it writes of runs/tiny_grpo after `tiny_grpo.yaml`.

Every parameter is drawn wide, biases and norms too: with a fresh model's zeros, ones and deviations of 0.02
a wrong layer would hardly show in the logits.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

FIXTURES = Path(__file__).parent / "fixtures"
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BATCH, TIME = 2, 12
LIMIT, STOPS = 40, [5, 71]


def make(
    name: str,
    kind: type[PretrainedConfig] = Qwen2Config,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **settings: object,
) -> None:
    config = kind(**{**SIZES, "max_position_embeddings": 64, **settings})
    center = 0.0 if kind is Gemma3TextConfig else 1.0  # Gemma's norms multiply by 1 more than their parameter
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(center if "norm" in key else 0.0, 0.25, generator=generator)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)

    # Read back, as a user would: `model.to(bfloat16)` has rounded the frequencies of the rotary positions,
    # too.
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, config.vocab_size, (BATCH, TIME), generator=generator)
    positions = torch.arange(TIME) + torch.tensor([[0], [7]])
    with torch.no_grad():
        logits = saved(tokens, attention_mask=torch.ones_like(tokens), position_ids=positions, use_cache=False).logits
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens.numpy().astype(np.int32),
        positions=positions.numpy().astype(np.int32),
        logits=logits.numpy(),
        **greedy_completions(saved),
    )


def greedy_completions(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Prompts of 1 to 9 tokens and transformers' greedy completions, -1 behind the ends; two tokens end them."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 96, (1, length), generator=generator) for length in (1, 9, 4, 9, 2, 6, 3)]
    settings = {"do_sample": False, "max_new_tokens": LIMIT, "pad_token_id": 0, "eos_token_id": STOPS}
    completions = []
    for prompt in prompts:
        whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        completions.append(whole[0, prompt.shape[1] :].tolist())
    padded = [completion + [-1] * (LIMIT - len(completion)) for completion in completions]
    return {
        "prompts": np.array([prompt[0].tolist() + [-1] * (9 - prompt.shape[1]) for prompt in prompts], np.int32),
        "completions": np.array(padded, np.int32),
    }


def make_adapters(name: str, base: str, seed: int, *others: str) -> None:
    """`others` are adapted modules beside the layers'."""
    generator = torch.Generator().manual_seed(seed)
    expected = np.load(FIXTURES / base / "expected.npz")
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / base, dtype=torch.float32, attn_implementation="eager")
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = LoraConfig(r=3, lora_alpha=6, target_modules=[*layers, *others], task_type="CAUSAL_LM")
    model = get_peft_model(model, settings).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(0, 0.25, generator=generator)
        tokens, positions = (torch.from_numpy(expected[key]).long() for key in ("tokens", "positions"))
        logits = model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=positions, use_cache=False
        ).logits
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(FIXTURES / name)
    (FIXTURES / name / "README.md").unlink()
    np.savez_compressed(FIXTURES / name / "expected.npz", logits=logits.numpy())


if __name__ == "__main__":
    tied = {"num_key_value_heads": 4, "tie_word_embeddings": True}
    untied = {"num_key_value_heads": 4, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
    grouped = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    rotation = {"rope_theta": 500.0, "rope_type": "default"}
    scaled = rotation | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama = {"head_dim": 32, "rope_parameters": scaled | {"original_max_position_embeddings": 32}}
    make("tied", seed=0, **tied)
    make("untied_sharded", seed=1, max_shard_size="40KB", **untied)
    make("grouped_bfloat16", seed=2, dtype=torch.bfloat16, rope_parameters=rotation, **grouped)
    make("qwen3", Qwen3Config, seed=3, head_dim=16, **grouped)
    make("llama", LlamaConfig, seed=4, **(grouped | llama | {"tie_word_embeddings": False}))
    # Queries look back over fewer tokens than the fixture's rows have, in layers on both sides of a full one.
    windows = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
    bases = {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
    bases["full_attention"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    gemma = {"head_dim": 16, "query_pre_attn_scalar": 24, "rope_parameters": bases, "num_hidden_layers": 3}
    make("gemma3", Gemma3TextConfig, seed=6, **(grouped | gemma | windows))
    make("smollm3", SmolLM3Config, seed=7, rope_parameters=rotation, no_rope_layers=[1, 0], pad_token_id=0, **grouped)
    make("olmo2", Olmo2Config, seed=8, **(grouped | {"pad_token_id": 0, "tie_word_embeddings": False}))
    make_adapters("peft", "untied_sharded", 5, "lm_head")
    make_adapters("peft_gemma3", "gemma3", 9)
