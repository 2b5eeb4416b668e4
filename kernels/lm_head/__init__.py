"""The fused LM head: log-probabilities, losses and gradients without [tokens, vocabulary] logits (docs/head.md)."""

from kernels.lm_head.api import Choice, choose_impl, token_logprobs, token_loss
from kernels.lm_head.contract import TokenLogprobs
from kernels.lm_head.likeliest import label_is_likeliest
from kernels.lm_head.sharded import HeadSharding
from kernels.logits.api import logits_logprobs

__all__ = [
    "Choice",
    "HeadSharding",
    "TokenLogprobs",
    "choose_impl",
    "label_is_likeliest",
    "logits_logprobs",
    "token_logprobs",
    "token_loss",
]
