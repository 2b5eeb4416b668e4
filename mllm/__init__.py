"""A compact JAX trainer for Qwen2.5 and its kin: SFT and GRPO around a fused LM-head loss."""

import os

# Only its tokenizers are used here; it would tell at every start that there is no torch for its models.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
