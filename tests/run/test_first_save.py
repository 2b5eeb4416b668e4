"""A run that is killed before its first checkpoint is whole goes on by the same command, wherever the kill falls."""

import os
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from object_store import BUCKET, object_store
from runs import changed, run
from tiny import config

from mllm.run import folder
from mllm.run.checkpoint import Checkpoints
from mllm.run.metrics import RunLog
from mllm.store.log import Log
from mllm.store.run_store import LOCK


@contextmanager
def on_disk(path):
    """A run's place, the states of it before and after every change that Python makes, and how one is put elsewhere."""
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

    def put(files, place):
        for name, content in files.items():
            Path(place, name).parent.mkdir(parents=True, exist_ok=True)
            Path(place, name).write_bytes(content)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename"):
            patch.setattr(os, name, noting(getattr(os, name)))
        patch.setattr(Log, "append", noting(Log.append))
        yield str(path), states, put


@contextmanager
def in_a_bucket(_):
    """The same in a bucket, after every request. The lease of a killed process expires: it is left out."""
    with object_store() as server:
        states, answer, path = [], server.answer, f"{server.url}/".partition(f"{BUCKET}/")[2]

        def noting(method, *request):
            answered = answer(method, *request)
            if method != "GET":
                states.append({name.removeprefix(f"{path}run/"): of[0] for name, of in server.objects.items()})
            return answered

        def put(files, place):
            run = place.partition(f"{BUCKET}/")[2]
            server.objects |= {f"{run}/{name}": (content, "1") for name, content in files.items() if name != LOCK}

        server.answer = noting
        yield f"{server.url}/run", states, put


@pytest.mark.slow  # each trains
@pytest.mark.parametrize("where", [on_disk, pytest.param(in_a_bucket, marks=pytest.mark.nightly)])
def test_a_kill_before_the_first_checkpoint_is_whole_leaves_nothing_that_is_refused(tmp_path, monkeypatch, where):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with where(tmp_path / "run") as (place, states, put):
        done = changed(config("sft", run_dir=place, steps=1), eval=None, rollout=None)
        assert run(done) == 0
        whole = "checkpoints/1/commit_success.txt" if where is in_a_bucket else "checkpoints/1/document/metadata"
        left = [files for files in states if whole not in files]
        assert len(left) > 4
        left = [*left[:4], *left[4:-4:10], *left[-4:]]  # most of a bucket's are those of arrays
        for number, files in enumerate(left):
            settings = changed(done, run_dir=f"{place}-{number}")
            put(files, settings.run_dir)
            with folder.claim(settings) as (store, again):
                assert again == settings
                begun = store.is_run()
                with closing(Checkpoints(store, again.checkpoint, begun=begun)), closing(RunLog(store, -1, 1)):
                    folder.write(store, again)
                    assert store.steps() == []
