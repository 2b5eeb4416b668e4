"""The bar of a long read or write: bytes so far, and how many a second."""

import jax
from tqdm import tqdm

SECONDS = 1.0
"""What is over sooner shows no bar."""


def transfer_bar(what: str, total: int) -> tqdm:
    """A bar of `total` bytes, by all processes; the first shows it."""
    hidden = jax.process_index() != 0
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=SECONDS, disable=hidden, dynamic_ncols=True)
