"""The fused LM head: log-probabilities, losses and gradients without [tokens, vocabulary] logits (docs/head.md)."""

from kernels.lm_head.api import EngineChoice, choose_impl, token_logprobs, token_loss
from kernels.lm_head.divergence import divergence_loss, token_divergence
from kernels.lm_head.layout import HeadSharding
from kernels.lm_head.softmax import TokenLogprobs
from kernels.lm_head.top_k import top_k_logprobs

__all__ = [
    "EngineChoice",
    "HeadSharding",
    "TokenLogprobs",
    "choose_impl",
    "divergence_loss",
    "token_divergence",
    "token_logprobs",
    "token_loss",
    "top_k_logprobs",
]
