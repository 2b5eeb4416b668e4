"""The one check of names that come from outside: a bucket's objects, and the files that a stranger's files name."""

import re

PLAIN = re.compile(r"([^./\\][^/\\]*/)*[^./\\][^/\\]*")


def is_plain(name: str) -> bool:
    """Whether a name with slashes can only lead to a file below its folder, and prints as it is.

    Absolute paths, backslashes, control characters and parts that begin with a dot, as `..` does, are none of it.
    """
    return bool(PLAIN.fullmatch(name)) and name.isprintable()
