"""Runs in a bucket whose requests fail at random, until 200 have failed; each ends as one on a disk."""

import os
import signal
from collections import Counter
from random import Random

import pytest
from object_store import object_store
from runs import assert_same_end, run
from tiny import config

from mllm.store import bucket

FAULTS = ("429", "503", "reset", "lost", "late")
WANTED = 200
SHARE = 0.2
"""The share of requests that fail."""


@pytest.mark.faults
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_nothing_is_lost_by_requests_that_fail(scheme, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket, "RETRIES", {"max_retries": 12, "initial_delay": "5ms", "max_delay": "50ms"})
    settings = {"steps": 8, "checkpoint": {"every": 2}, "eval": None, "rollout": None}
    on_disk = config("sft", run_dir=str(tmp_path / "disk"), **settings)
    assert run(on_disk) == 0
    dice, counts, ended, stopped = Random(0), Counter(), 0, 0
    with object_store(scheme) as store:
        while counts.total() < WANTED:
            store.renew()
            in_bucket = config("sft", run_dir=f"{store.url}/run", **settings)
            stops = iter([lambda: os.kill(os.getpid(), signal.SIGTERM)])

            def fault(method, path, store=store, stops=stops):
                if any("checkpoints/2.json" in path for path in store.written):
                    next(stops, lambda: None)()
                return dice.choice(FAULTS) if dice.random() < SHARE else None

            store.fault = fault
            assert run(in_bucket) in (143, 0)
            stopped += len(store.written) > 0 and next(stops, None) is None
            assert run(in_bucket) == 0
            assert_same_end(on_disk, in_bucket)
            counts += store.faults
            ended += 1
    print(f"{scheme}: {ended} runs, {stopped} stopped and resumed; {counts.total()} requests failed: {dict(counts)}")
