"""What a step of training has to do, by arithmetic: flops of an update, bytes that decoding reads, and devices' peaks.

Model flops are counted as in PaLM's appendix B (arXiv:2204.02311): 6 for each parameter of a matrix product and token,
2 forward and 4 backward, and the same of attention's two products; nothing for what remat computes again. Twice we
count less than it does: attention's products only where the mask lets a query see a key (PaLM: T for each token), and
the head's only of tokens that the loss counts. Looking up embeddings, norms, biases, softmaxes and the optimizer are
not counted.

A step of decoding reads each parameter once, but of the embedding, where it is not the head, only rows; and keys and
values of the tokens so far. Left out: what it writes, activations, and slots of the cache that are still empty.
"""

from collections.abc import Sequence

from mllm.model.architecture import Qwen2Config

PEAKS = (
    ("H100 PCIe", 756.5e12),
    ("H100 NVL", 835.5e12),
    ("H100", 989.4e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("A100", 312e12),
)
"""What a device's kind has in its name, and its bfloat16 flop/s without sparsity by NVIDIA's data sheets; the first
that fits counts."""


def peak(kind: str) -> float | None:
    """Flop/s by the data sheet, None for a device that isn't listed."""
    return next((rate for name, rate in PEAKS if name in kind), None)


def layer_products(config: Qwen2Config) -> int:
    """Parameters of the matrices of all layers."""
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    attention = config.hidden_size * (2 * queries + 2 * keys)
    return config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def visible_pairs(documents: Sequence[int]) -> int:
    """Pairs of a query and a key that it may see, in documents of so many tokens."""
    return sum(length * (length + 1) // 2 for length in documents)


def update_flops(config: Qwen2Config, tokens: int, counted: int, pairs: int) -> int:
    """Of the forward and backward passes of a batch.

    Args:
        tokens: that go through the layers.
        counted: those of them whose loss counts.
        pairs: `visible_pairs` of the batch's documents.
    """
    head = config.vocab_size * config.hidden_size
    products = 6 * (layer_products(config) * tokens + head * counted)
    # Two products of H multiplications and additions for each pair and head.
    return products + 3 * 2 * 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs


def weight_bytes(config: Qwen2Config, itemsize: int) -> int:
    """Of the parameters that a step of decoding reads."""
    hidden, heads = config.hidden_size, config.num_attention_heads + 2 * config.num_key_value_heads
    vectors = config.num_hidden_layers * (2 * hidden + heads * config.head_dim) + hidden
    return itemsize * (layer_products(config) + vectors + config.vocab_size * hidden)


def cache_bytes(config: Qwen2Config, tokens: int, itemsize: int) -> int:
    """Of so many tokens' keys and values."""
    return itemsize * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens
