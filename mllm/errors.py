"""The one exception for what the user can mend: `train.py` and the tools print it as one line and exit with 2."""


class UserError(Exception):
    """One line: the key, file or argument at fault, and the way out."""
