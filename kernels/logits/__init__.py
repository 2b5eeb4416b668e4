"""Log-probabilities and entropies of logits that already exist."""

from kernels.logits.api import logits_logprobs

__all__ = ["logits_logprobs"]
