"""Errors become one line on stderr and an exit code, at one place."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
from jax.errors import JaxRuntimeError

from mllm.errors import UserError, command


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (UserError("a\nb\x1b[2J"), 2, "error: a\\nb\\x1b[2J"),
        (KeyboardInterrupt(), 130, ""),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: 9\nmore"), 2, "error: out of memory (RESOURCE_EXHAUSTED: 9); train.py"),
        (ValueError("RESOURCE_EXHAUSTED: disk"), 1, ""),
    ],
)
def test_user_errors_are_one_line_and_bugs_a_traceback(error, code, printed, capsys):
    @command
    def main() -> int:
        raise error

    with pytest.raises(type(error)) if code == 1 else nullcontext():
        assert main() == code
    stderr = capsys.readouterr().err
    assert stderr.startswith(printed)
    assert stderr.count("\n") == bool(printed)


def test_a_script_warns_in_one_format_and_exits_with_its_code():
    code = """
import logging
from mllm.errors import command, run_main
logging.basicConfig(format="other %(message)s")

@command
def main():
    logging.getLogger("mllm.data").warning("line %s is skipped", "3\\x1b[2J\\x9b\\u202e")
    logging.getLogger("mllm.data").info("not shown")
    return 7

run_main(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "WARNING: line 3\\x1b[2J\\x9b\\u202e is skipped\n")
