"""Whatever happens to a run, it ends as if nothing had, and it does not grow: the campaigns."""

import subprocess
import sys
from importlib import import_module

import pytest
from runs import ROOT
from series import SETTINGS, workload


def test_the_rewards_of_a_campaign_are_there():
    for name in SETTINGS.keys() - {"sft"}:
        for reward in workload(name, "run").task.rewards:
            module, function = reward.name.split(":")
            assert hasattr(import_module(module), function)


@pytest.mark.faults
@pytest.mark.timeout(0)
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
        done = subprocess.run([sys.executable, f"tests/faults/{script}", *options], cwd=ROOT, check=False)
    assert done.returncode == 0
