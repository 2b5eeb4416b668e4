"""The fused LM head: log-probabilities, losses and gradients without [tokens, vocabulary] logits (docs/head.md)."""

from . import libtpu  # noqa: F401  its settings are made before JAX loads libtpu
from .api import EngineChoice, choose_impl, token_logprobs, token_loss
from .divergence import divergence_loss, token_divergence
from .layout import HeadSharding
from .softmax import TokenLogprobs
from .top_k import top_k_logprobs

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
