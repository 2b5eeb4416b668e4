"""A progress bar for long reads and writes: bytes so far, and bytes a second."""

import jax
from tqdm import tqdm

SECONDS = 1.0


def transfer_bar(what: str, total: int) -> tqdm:
    """A bar of `total` bytes, which all processes make and process 0 shows."""
    hidden = jax.process_index() != 0
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=SECONDS, disable=hidden, dynamic_ncols=True)
