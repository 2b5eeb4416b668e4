"""Pseudo-random permutations of a range of which nothing is stored. This file does not import JAX."""

import hashlib


def permute_index(index: int, size: int, key: str = "") -> int:
    """The image of `index` under the pseudo-random permutation of range(size) that `key` names; nothing is stored.

    Four Feistel rounds permute the next power of four, and repeating them until the result is in range restricts the
    permutation to `size` (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 3).
    """
    half = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    keyed = hashlib.blake2b(key.encode(), digest_size=16)
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            mixer = keyed.copy()
            mixer.update(turn.to_bytes(1, "little") + right.to_bytes(16, "little"))
            left, right = right, left ^ (int.from_bytes(mixer.digest(), "little") & mask)
        index = left << half | right
        if index < size:
            return index
