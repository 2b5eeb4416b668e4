"""The fused LM head: log-probabilities, losses and gradients without [tokens, vocabulary] logits."""

from kernels.lm_head.api import token_logprobs, token_loss
from kernels.lm_head.contract import TokenLogprobs
from kernels.lm_head.sharded import HeadSharding
from kernels.logits.api import logits_logprobs

__all__ = ["HeadSharding", "TokenLogprobs", "logits_logprobs", "token_logprobs", "token_loss"]
