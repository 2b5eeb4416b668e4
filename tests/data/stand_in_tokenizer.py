"""A stand-in for a tokenizer in other processes; its file imports nothing of the project."""

import os
import sys


class ImportsTokenizer:
    """It encodes whether JAX was imported, and ends its process on request."""

    eos_token_id, bos_token_id, added_tokens_decoder = 0, None, {}

    def encode(self, text, **_):
        if text == "die":
            os._exit(9)
        return [1 + ("jax" in sys.modules)]
