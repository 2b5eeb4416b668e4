"""Whatever happens to a run, it ends as if nothing had, and it does not grow: the campaigns, and a short form."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(0),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the campaigns need Linux's /proc"),
]


def test_a_short_campaign_tries_each_fault_and_loses_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "tests/faults/campaign.py", "--short"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("\nnothing lost\n"), done.stdout + done.stderr[-3000:]
    rows = [re.split(r"\s{2,}", line) for line in done.stdout.splitlines()]
    assert sum(int(row[2]) + int(row[3]) for row in rows if row[0] == "kill -9") == 7
    assert {"newest checkpoint", "second start", "power cut", "two signals"} <= {row[0] for row in rows}
    assert (done.returncode, list(tmp_path.glob("campaign_*"))) == (0, [])


@pytest.mark.parametrize(
    "campaign",
    [
        "campaign.py",
        "campaign.py --processes 2 4 --kills 10",
        "campaign.py --processes 1 2 --buckets gs s3 --kills 3",
        "endurance.py",
    ],
)
def test_a_whole_campaign_loses_nothing(campaign, capfd):
    with capfd.disabled():  # shows the progress and the table
        script, *options = campaign.split()
        assert (
            subprocess.run([sys.executable, f"tests/faults/{script}", *options], cwd=ROOT, check=False).returncode == 0
        )
