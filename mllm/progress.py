"""A progress bar for long reads and writes: bytes so far, and bytes a second."""

import sys

from tqdm import tqdm

SECONDS = 1.0
LARGE = 2**30


def transfer_bar(what: str, total: int) -> tqdm:
    """A bar of `total` bytes, which all processes make and process 0 shows.

    Where stderr is no terminal, there is a line about a large transfer instead.
    """
    import jax  # here, since processes that only tokenize import this file

    hidden = jax.process_index() != 0 or not sys.stderr.isatty()
    if jax.process_index() == 0 and hidden and total >= LARGE:
        print(f"{what}: {total / 2**30:.1f} GiB", file=sys.stderr, flush=True)
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=SECONDS, disable=hidden, dynamic_ncols=True)
