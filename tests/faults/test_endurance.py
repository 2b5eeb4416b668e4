"""A long run stays as it was: in short, and the verdict on what grows."""

import ctypes
import random
import subprocess
import sys
from pathlib import Path

import endurance
import pytest
from endurance import LIMITS, judge
from runs import ROOT

MIB = 2**20


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists() or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="needs Linux with glibc",
)
def test_a_short_run_compiles_nothing_again_and_leaves_nothing_open():
    done = subprocess.run(
        [sys.executable, "tests/faults/endurance.py", "--steps", "100"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    for name in ("file handles", "children", "live arrays", "compilations"):  # pools of threads still fill
        (row,) = (line for line in done.stdout.splitlines() if line.startswith(name))
        assert row.endswith("flat"), done.stdout + done.stderr[-2000:]


def noisy(slope, noise, steps=1500):
    """200 MiB and `slope` bytes a step, with noise and rare outliers as a busy machine makes them."""
    rng = random.Random(0)
    return [200 * MIB + slope * i + rng.gauss(0, noise) + (rng.random() < 0.05) * 20 * noise for i in range(steps)]


@pytest.mark.parametrize(
    ("slope", "noise", "says"), [(0, 20_000, "flat"), (8192, 20_000, "grows"), (4300, 5e6, "can't tell")]
)
def test_memory_is_judged_by_its_slope_and_how_sure_that_is(slope, noise, says):
    verdict = judge(noisy(slope, noise), LIMITS["memory in use"])
    assert verdict.says == says
    assert verdict.low <= verdict.slope <= verdict.high


def test_one_handle_a_hundred_steps_is_growth():
    assert judge([40 + step // 100 for step in range(1500)], LIMITS["file handles"]).says == "grows"
    assert judge([40 + (step % 50 < 5) for step in range(1500)], LIMITS["file handles"]).says == "flat"


def test_too_few_steps_are_refused_in_one_line(capsys):
    assert endurance.main(["--steps", "3"]) == 2
    assert capsys.readouterr().err == "error: --steps: 3: give an even number from 40\n"
