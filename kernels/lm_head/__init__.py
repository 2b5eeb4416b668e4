"""The fused LM head: log-probabilities, losses and gradients without [tokens, vocabulary] logits (docs/head.md)."""

from . import libtpu  # noqa: F401  its settings are made before JAX loads libtpu
from .api import EngineChoice, choose_impl, token_logprobs, token_loss
from .divergence import divergence_loss
from .layout import HeadSharding
from .likeliest import likeliest_tokens
from .logits import logits_logprobs
from .softmax import TokenLogprobs

__all__ = [
    "EngineChoice",
    "HeadSharding",
    "TokenLogprobs",
    "choose_impl",
    "divergence_loss",
    "likeliest_tokens",
    "logits_logprobs",
    "token_logprobs",
    "token_loss",
]
