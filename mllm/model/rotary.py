"""Rotary positions (arXiv:2104.09864): pairs of a head's numbers are rotated by angles that grow with the position.

Letters: B batch, T time, N heads, H size of a head, R = H/2 rotated pairs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from mllm.model.architecture import LayerKind, RopeScaling


def rotary(positions: Int[jax.Array, "B T"], kind: LayerKind, head_dim: int) -> Float[jax.Array, "2 B T 1 R"]:
    """The cosines and sines of position * theta^(-2i/H), float32 (arXiv:2104.09864, section 3.2.2).

    Where nothing is rotated they are 1 and 0. Llama 3.1 divides low frequencies by a factor: those of wavelengths that
    fit less than `low_freq_factor` times into the context that it was first trained with; in between the division sets
    in linearly (arXiv:2407.21783, section 3.4.2, and its published reference code).
    """
    exponents = -jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = jnp.zeros_like(exponents) if kind.rope_theta is None else kind.rope_theta**exponents
    if isinstance(scaling := kind.rope_scaling, RopeScaling):
        fits = scaling.original_max_position_embeddings * frequencies / (2 * jnp.pi)
        kept = (fits - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = jnp.clip(kept, 0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    elif scaling is not None:
        frequencies = frequencies / scaling
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(x: Float[jax.Array, "B T N H"], rotation: Float[jax.Array, "2 B T 1 R"]) -> Float[jax.Array, "B T N H"]:
    """Rotate the pairs (i, i + H/2), as Hugging Face's checkpoints have them; the paper pairs neighbors."""
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)
