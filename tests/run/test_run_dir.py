"""A folder belongs to one run: what may change when it resumes, what would make another run of it, and who writes."""

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys

import pytest
from runs import ROOT, changed
from tiny import config

from mllm.errors import UserError
from mllm.run import folder as run_dir


@pytest.mark.parametrize(
    "how",
    [
        {"mesh": {"dp": 2}},
        {"micro_batch_size": 2},
        {"head": {"impl": "full_logits"}},
        {"checkpoint": {"every": 2, "keep": 5}},
        {"log": {"samples": 1}},
        {"run_dir": "elsewhere"},
        {"optimizer": {"max_skipped": 1}},
        {"steps": 8},
    ],
    ids=str,
)
def test_how_a_run_is_carried_out_may_change(tmp_path, how):
    run_dir.write(tmp_path, config())
    run_dir.check(tmp_path, changed(config(), **how))


@pytest.mark.parametrize("name", ["residual_dtype", "long_prompts", "scale_rewards", "reward_timeout"])
def test_a_run_that_is_older_than_a_setting_goes_on_with_a_default_that_changes_nothing(tmp_path, name):
    run_dir.write(tmp_path, config())
    path = tmp_path / "config.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if f"  {name}:" not in line))
    if name in ("residual_dtype", "long_prompts"):
        with pytest.raises(UserError, match=rf"^\w+\.{name}: .* belongs to a run with None, not '"):
            run_dir.check(tmp_path, config())
    else:
        assert run_dir.check(tmp_path, config()) == config()


def test_a_configuration_that_can_not_be_read_is_no_invitation(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: [")
    with pytest.raises(UserError, match=r"config\.yaml: not readable as YAML"):
        run_dir.check(tmp_path, config())


# Who may write


def hold(folder):
    """Another process that holds the folder."""
    program = (
        "import sys; from pathlib import Path; from mllm.run import folder as run_dir\n"
        "with run_dir.lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_that_a_process_holds_is_refused_to_others_until_it_is_killed(tmp_path):
    run_dir.write(tmp_path, config())
    process = hold(tmp_path)
    try:
        message = rf"^run_dir: .* is in use by process {process.pid} on .*; wait for it"
        for _ in range(2):  # a refusal leaves the holder's lock as it was
            with pytest.raises(UserError, match=message), run_dir.lock(tmp_path):
                pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert str(process.pid) in (tmp_path / run_dir.LOCK).read_text()
    with run_dir.lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / run_dir.LOCK).read_text()


def test_a_run_that_has_begun_leaves_an_empty_lock_file_and_goes_on_with_it(tmp_path):
    for _ in range(2):
        with run_dir.lock(tmp_path):
            run_dir.check(tmp_path, config())
            run_dir.write(tmp_path, config())
        assert (tmp_path / run_dir.LOCK).read_bytes() == b""


@pytest.mark.parametrize("there", [".", "there", "there/is/no/folder"])
def test_a_run_that_did_not_begin_leaves_the_folder_as_it_found_it(tmp_path, there):
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with run_dir.lock(tmp_path / there):
        assert (tmp_path / there).is_dir()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_warned_of_and_written(tmp_path, monkeypatch, caplog, number):
    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), run_dir.lock(tmp_path):
        run_dir.write(tmp_path, config())
    assert f"can't be locked ({os.strerror(number)}): let no other run write it" in caplog.text


def test_a_lock_file_that_another_process_removes_before_it_is_locked_is_no_lock(tmp_path, monkeypatch):
    removed = []
    flock = fcntl.flock

    def remove_first(file, operation):
        if not removed:
            removed.append((tmp_path / run_dir.LOCK).unlink())
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with run_dir.lock(tmp_path), pytest.raises(UserError, match="in use by"), run_dir.lock(tmp_path):
        pass
