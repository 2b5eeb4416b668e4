"""heartbeat.json says what a run does, and when it last said so."""

import json
import time

from mllm.parallel import watch
from mllm.run.heartbeat import NAME, Heartbeat
from mllm.store.run_store import RunStore


def test_the_file_is_replaced_while_the_run_lives_and_not_before_it_has_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "BEAT", 0.02)
    path = tmp_path / NAME
    with Heartbeat() as heartbeat:
        time.sleep(0.1)
        assert not path.exists()
        heartbeat.store = RunStore(tmp_path)
        heartbeat.mark(7, "update")
        seen = set()
        for _ in range(500):
            if path.exists():
                (process,) = json.loads(path.read_text())["processes"]
                assert (process["process"], process["step"], process["phase"]) == (0, 7, "update")
                assert process["since"] <= process["time"] <= time.time()
                seen.add((process["time"], process["since"]))
            time.sleep(0.01)
            if len(seen) > 2:
                break
        assert len(seen) > 2
        assert len({since for _, since in seen}) == 1
    left = path.read_text()
    time.sleep(0.1)
    assert path.read_text() == left
