"""Errors that the user can mend, and the one place where a command's errors become lines and exit codes.

Imports nothing heavy: `--help` and errors of the configuration must not wait for JAX.
"""

import argparse
import functools
import importlib
import logging
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

P = ParamSpec("P")

LONGEST = 1500
SECRETS = re.compile(r"""(\bhttps?://)(?:[^\s/'"]*@)?([^\s?#'"]*)(?:[?#][^\s'"]*)?""")
"""A URL; its groups leave out user and password, query and fragment."""
RESTART = 75
"""The exit code (EX_TEMPFAIL) if the same command may resume: another process was lost, or a bucket doesn't answer."""


class UserError(Exception):
    """One line: the key, file or argument at fault, and the way out.

    Control characters are escaped, and the parts of a URL that may be secret are left out.
    """

    def __init__(self, message: str) -> None:
        message = SECRETS.sub(r"\1\2", message)
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
        super().__init__(printable(message))


class TemporaryError(UserError):
    """A failure that may pass by itself; the process ends with `RESTART`."""


class CommonError(UserError):
    """A UserError that all processes raise at the same place."""


class StepError(CommonError):
    """No process can make the next step, but earlier steps can be saved."""


def printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped for a terminal, line ends too unless `keep` has them."""
    return "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)


class LogFormatter(logging.Formatter):
    """Escapes warnings, which quote data, rewards and servers."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


def brief(error: BaseException) -> str:
    """The first line of an error, or the name of its type where it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def need(module: str, extra: str, what: str) -> None:
    """Raise UserError where a module is missing that our `extra` installs; `what` is the subject that needs it."""
    try:
        importlib.import_module(module)
    except ImportError:
        package = module.replace("_", "-")
        raise UserError(f"{what} needs the package {package}: pip install -e '.[{extra}]'") from None


class ArgumentParser(argparse.ArgumentParser):
    """Prints descriptions without reformatting; raises `UserError` for a wrong command line, instead of exiting."""

    def __init__(self, description: str | None, **options: Any) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a command's `main`, which returns its exit code: errors become one line on stderr and a code.

    A `UserError` and lack of memory return 2, a `TemporaryError` 75, Ctrl-C 130. Any other exception is a bug of this
    project and passes through with its traceback.
    """

    @functools.wraps(main)
    def run(*arguments: P.args, **options: P.kwargs) -> int:
        try:
            return main(*arguments, **options)
        except (Exception, KeyboardInterrupt) as error:
            code, line = ending(error)
            if code == 1:
                raise
            if code in (2, RESTART):
                print(f"error: {line}", file=sys.stderr)
            return code

    return run


def ending(error: BaseException) -> tuple[int, str]:
    """The exit code of a process that ends with this error, and the error's line; 1 for a bug."""
    if isinstance(error, UserError):
        return RESTART if isinstance(error, TemporaryError) else 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, MemoryError):
        return 2, "out of memory: this machine has too little for the run"
    jax = sys.modules.get("jax")  # no device can lack memory where it was never imported
    if jax and isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return 2, f"out of memory ({brief(error)}); train.py --plan says what would fit"
    return 1, f"{type(error).__name__}: {printable(brief(error))}"


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a script's `main`, which `command` decorates, and end the process with its exit code."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    sys.exit(main())
