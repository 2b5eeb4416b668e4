"""The fused LM head: log-probabilities, losses and gradients without [tokens, vocabulary] logits (docs/head.md)."""

from kernels.lm_head.api import EngineChoice, choose_impl, token_logprobs, token_loss, token_loss_and_gradients
from kernels.lm_head.divergence import divergence_loss, token_divergence
from kernels.lm_head.sharded import HeadSharding
from kernels.lm_head.softmax import TokenLogprobs

__all__ = [
    "EngineChoice",
    "HeadSharding",
    "TokenLogprobs",
    "choose_impl",
    "divergence_loss",
    "token_divergence",
    "token_logprobs",
    "token_loss",
    "token_loss_and_gradients",
]
