"""What the user can mend: `train.py` and the tools print it as one line and exit with 2."""

import argparse
from typing import NoReturn

LONGEST = 1500
"""Characters of a message; of a longer one the middle is left out."""


class UserError(Exception):
    """One line: the key, file or argument at fault, and the way out.

    What a message quotes may come from a stranger's file, so line breaks and whatever else a terminal would obey are
    written as escapes.
    """

    def __init__(self, message: str) -> None:
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


class StepError(UserError):
    """A step can't be made, in all processes alike; what was done before it can be saved."""


class ArgumentParser(argparse.ArgumentParser):
    """Says what is wrong with a command line as everything else is said: by a `UserError`, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)
