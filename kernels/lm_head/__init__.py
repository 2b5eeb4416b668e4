"""The fused LM head: log-probabilities, losses and gradients without [tokens, vocabulary] logits (docs/head.md)."""

from kernels.lm_head.api import EngineChoice, choose_impl, token_logprobs, token_loss
from kernels.lm_head.sampling import sample_tokens
from kernels.lm_head.sharded import HeadSharding
from kernels.lm_head.softmax import TokenLogprobs
from kernels.lm_head.top_k import top_k_logprobs

__all__ = [
    "EngineChoice",
    "HeadSharding",
    "TokenLogprobs",
    "choose_impl",
    "sample_tokens",
    "token_logprobs",
    "token_loss",
    "top_k_logprobs",
]
