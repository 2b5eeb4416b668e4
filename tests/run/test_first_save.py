"""A run that is killed before its first checkpoint is whole goes on by the same command, wherever the kill falls."""

import os
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from runs import changed, run
from tiny import config

from mllm.run import folder
from mllm.run.checkpoint import Checkpoints
from mllm.run.metrics import RunLog
from mllm.store.log import Log


@contextmanager
def noted(path):
    """The files of a folder before and after every change that Python makes to it."""
    states = []

    def noting(call):
        def change(*arguments):
            for then in (lambda: None, lambda: call(*arguments)):
                result = then()
                files = {}
                for file in path.rglob("*"):
                    with suppress(FileNotFoundError, IsADirectoryError):  # threads write others at the same time
                        files[str(file.relative_to(path))] = file.read_bytes()
                if files not in states:
                    states.append(files)
            return result

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename"):
            patch.setattr(os, name, noting(getattr(os, name)))
        patch.setattr(Log, "append", noting(Log.append))
        yield states


@pytest.mark.slow
@pytest.mark.nightly
def test_a_kill_before_the_first_checkpoint_is_whole_leaves_nothing_that_is_refused(tmp_path):
    """In a bucket: tests/faults/test_campaign.py."""
    place = tmp_path / "run"
    with noted(place) as states:
        done = config("sft", run_dir=str(place), steps=1, eval=None, rollout=None)
        assert run(done) == 0
    left = [files for files in states if "checkpoints/1/document/metadata" not in files]
    assert len(left) > 4
    for number, files in enumerate([*left[:4], *left[4:-4:10], *left[-4:]]):
        settings = changed(done, run_dir=f"{place}-{number}")
        for name, content in files.items():
            Path(settings.run_dir, name).parent.mkdir(parents=True, exist_ok=True)
            Path(settings.run_dir, name).write_bytes(content)
        with folder.claim(settings) as (store, again):
            assert again == settings
            begun = store.is_run()
            with closing(Checkpoints(store, again.checkpoint, begun=begun)), closing(RunLog(store, -1, 1)):
                folder.write(store, again)
                assert store.steps() == []
