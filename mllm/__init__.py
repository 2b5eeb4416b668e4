"""A compact JAX trainer for Qwen2.5: SFT and GRPO around a fused LM-head loss."""
