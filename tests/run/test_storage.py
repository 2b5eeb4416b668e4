"""A disk that is full, read-only or forbidden stops a run with one line, and costs nothing that was whole."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from runs import ROOT, arguments, assert_same_end, changed, checkpoints, run
from test_checkpoint import POSITION, assert_equal, kept, like, make_state, save
from tiny import config

from mllm.config.schema import CheckpointConfig
from mllm.errors import UserError
from mllm.run import folder as run_dir
from mllm.run.checkpoint import BEST, Checkpoints
from mllm.run.metrics import RunLog
from mllm.run.storage import Appended, fault, unwritable

SETTINGS = config("sft", steps=4, checkpoint={"every": 2, "keep": 1}, eval=None, task={"heldout": 16}, rollout=None)


@contextmanager
def files_of_at_most(size):
    """No file of this process may grow past `size` bytes: writing fails with EFBIG, as it would on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# The message

REFUSALS = {
    errno.ENOSPC: "(No space left on device); make room, and",
    errno.EDQUOT: "(Disk quota exceeded); make room, or have the quota raised, and",
    errno.EFBIG: "(File too large); allow larger files there, and",
    errno.EACCES: "(Permission denied); allow access there, and",
    errno.EROFS: "(Read-only file system); allow writing there, and",
    errno.EIO: "(Input/output error); mend that, and",
}


def as_python_says(number):
    return OSError(number, os.strerror(number), "/some/file")


def as_tensorstore_says(number):
    return ValueError(f"RESOURCE_EXHAUSTED: Failed to open: {os.strerror(number)} [os_error_code='{number}'] [spec]")


def as_the_cause_of_another(number):
    error = RuntimeError("a save failed")
    error.__cause__ = as_tensorstore_says(number)
    return error


@pytest.mark.parametrize("said", [as_python_says, as_tensorstore_says, as_the_cause_of_another])
@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_a_refusal_is_said_with_its_remedy_and_what_the_run_goes_on_from(tmp_path, said, number):
    for name in ("8", "10", "12.orbax-checkpoint-tmp", "damaged_14"):
        (tmp_path / name).mkdir()
    message = str(unwritable(Path("run/12"), fault(said(number)), tmp_path))
    assert message == f"run/12: can't be written {REFUSALS[number]} the same command goes on from checkpoint 10"
    assert "\n" not in message


def test_what_is_no_fault_of_the_disk_is_not_taken_for_one():
    assert fault(ValueError("INVALID_ARGUMENT: shape")) is None
    assert fault(None) is None


# Checkpoints


@pytest.mark.parametrize("settings", [{"keep": 1}, {"keep": 1, "keep_best": True}, {"keep": 2}], ids=str)
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path, settings):
    metrics = {BEST: 0.5}
    save(tmp_path, [1], {1: metrics}, **settings)
    with (
        pytest.raises(UserError, match=r"2: can't be written \(File too large\).* goes on from checkpoint 1$"),
        files_of_at_most(200),
    ):
        save(tmp_path, [2], {2: metrics}, **settings)
    assert kept(tmp_path) == [1]
    save(tmp_path, [2], {2: metrics}, **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"][-settings["keep"] :]
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        assert_equal(checkpoints.restore(like()).state, make_state(value=2))


def begin(checkpoints):
    checkpoints.save(3, make_state(value=3), POSITION, "", {})


@pytest.mark.parametrize("notice", [begin, Checkpoints.poll, Checkpoints.wait, Checkpoints.close])
def test_whatever_comes_next_says_that_the_checkpoint_before_did_not_fit_and_closing_is_then_silent(tmp_path, notice):
    save(tmp_path, [1])
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    with files_of_at_most(200):
        checkpoints.save(2, make_state(value=2), POSITION, "", {})
        while checkpoints.manager.is_saving_in_progress():
            time.sleep(0.01)
    with pytest.raises(UserError, match=r"2: can't be written .* goes on from checkpoint 1$"):
        notice(checkpoints)
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_checkpoint_of_which_nothing_fits_is_said_once(tmp_path):
    save(tmp_path, [1])
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    with files_of_at_most(0):
        checkpoints.save(2, make_state(value=2), POSITION, "", {})
        with pytest.raises(UserError, match=r"2: can't be written \(File too large\)"):
            checkpoints.wait()
        checkpoints.close()
    assert kept(tmp_path) == [1]


def test_nothing_is_said_while_all_goes_well(tmp_path):
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        checkpoints.poll()
        checkpoints.save(1, make_state(value=1), POSITION, "", {})
        while not kept(tmp_path):
            checkpoints.poll()
        checkpoints.wait()
        checkpoints.poll()


def test_a_folder_that_can_not_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/checkpoints: can't be written \(Not a directory\)"):
        Checkpoints(tmp_path / "file" / "checkpoints", CheckpointConfig())


def forbidden(folder):
    """What is forbidden, to a process whose rights end somewhere."""
    save(folder, [1, 2, 3])
    folder.chmod(0o555)
    with pytest.raises(UserError, match=r"4: can't be written \(Permission denied\); .* goes on from checkpoint 3$"):
        save(folder, [4])

    (folder / "3" / "params").chmod(0)
    with closing(Checkpoints(folder, CheckpointConfig())) as checkpoints:
        with pytest.raises(
            UserError, match=r"3: can't be read \(.*\), nor put aside as damaged_3 \(Permission denied\)"
        ):
            checkpoints.restore(like())
        assert kept(folder) == [2, 3]
        folder.chmod(0o755)
        assert checkpoints.restore(like()).step == 2
    assert (folder / "damaged_3").exists()

    (folder / "2").chmod(0)
    with (
        closing(Checkpoints(folder, CheckpointConfig())) as checkpoints,
        pytest.raises(UserError, match=r"none of its 1 checkpoints can be read .*Permission denied"),
    ):
        checkpoints.restore(like())
    assert kept(folder) == [2]
    for closed in (folder / "2", folder / "damaged_3" / "params"):
        closed.chmod(0o755)

    secret = folder / "secret"
    secret.mkdir(0)
    with pytest.raises(UserError, match=r"^run_dir: .* can't be read \(Permission denied\); .* give another folder$"):
        run_dir.check(secret, SETTINGS)
    with pytest.raises(UserError, match=r"^run_dir: .* can't be written \(Permission denied\)"), run_dir.lock(secret):
        pass


def test_what_is_forbidden_to_read_is_put_aside_and_what_is_forbidden_to_write_is_said(tmp_path):
    mortal = []
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("nothing is forbidden to root, and there is no setpriv to end that")
        mortal = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    program = "import sys, pathlib, test_storage; test_storage.forbidden(pathlib.Path(sys.argv[1]))"
    process = subprocess.run(
        [*mortal, sys.executable, "-c", program, str(tmp_path / "checkpoints")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, process.stdout


# What a run says of itself


def write(log):
    log.write(1, {"loss": 1.0}, [{"completion": "1"}])


def write_timings(log):
    log.write_timings(1, {"tokens_per_second": 1.0}, {})


@pytest.mark.parametrize(
    ("name", "use"),
    [("metrics.jsonl", write), ("samples.jsonl", write), ("timings.jsonl", write_timings), ("tensorboard", write)],
)
def test_a_record_that_does_not_fit_is_said(tmp_path, capfd, name, use):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    log = RunLog(tmp_path, None, 1)
    file = log.board.file if name == "tensorboard" else log.files[name]
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), file.file.fileno())
    place = rf"{name}\S*: can't be written \(No space left on device\); make room, .* from checkpoint 3$"
    with pytest.raises(UserError, match=place):
        use(log)
    with pytest.raises(UserError, match=rf"{name}\S*: can't be written \(Invalid argument\)"):
        log.close()  # which no buffer tries a second time: /dev/full can't be synced
    assert "Traceback" not in capfd.readouterr().err


def test_half_a_record_is_not_taken_for_a_whole_one(tmp_path):
    file = Appended(tmp_path / "metrics.jsonl", tmp_path)
    with files_of_at_most(20), pytest.raises(UserError, match=r"can't be written \(File too large\)"):
        file.append(b"x" * 30)
    file.close()


# Whole runs


def train(settings, *prefix):
    return subprocess.run(
        [*prefix, sys.executable, "train.py", *arguments(settings)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def refusal(process):
    """The one line that a run ends with that can't go on."""
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert process.stderr.splitlines()[-1] == line
    return line


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    settings = changed(SETTINGS, run_dir=str(tmp_path_factory.mktemp("undisturbed") / "run"))
    assert run(settings) == 0
    return settings


def test_a_run_whose_checkpoint_does_not_fit_ends_with_one_line_and_resumes_to_the_bit(undisturbed, tmp_path):
    settings = changed(SETTINGS, run_dir=str(tmp_path / "run"))
    assert run(changed(settings, steps=2)) == 0
    said = refusal(train(settings, "sh", "-c", 'ulimit -f 40; "$@"', "sh"))  # blocks of 512 bytes
    assert "checkpoints/4: can't be written (File too large)" in said
    assert said.endswith("the same command goes on from checkpoint 2")
    assert checkpoints(settings) == [2]
    assert run(settings) == 0
    assert_same_end(settings, undisturbed)


IN_A_ROOM = """
mount -t tmpfs -o size="$1" room "$3" && cp -r "$4/." "$3" && mount -o "remount,$2" "$3" || exit 99
room=$3 begun=$4; shift 4
"$@"
echo $? > "$begun.code"
mount -o remount,rw,size=64m "$room"
"$@" > /dev/null || exit 98
cp -r "$room" "$begun.ended"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "mode", "reason"),
    [("64m", "ro", "Read-only file system"), ("700k", "rw", "No space left on device")],
)
def test_a_run_resumes_to_the_bit_when_its_disk_has_room_again(undisturbed, tmp_path, size, mode, reason):
    """In a mount of its own."""
    room, begun = tmp_path / "room", tmp_path / "begun"
    room.mkdir()
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "room", room], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here (unshare -rm)")
    assert run(changed(SETTINGS, run_dir=str(begun), steps=2)) == 0
    settings = changed(SETTINGS, run_dir=str(room))
    process = train(settings, "unshare", "-rm", "sh", "-c", IN_A_ROOM, "sh", size, mode, str(room), str(begun))
    assert process.returncode == 0, process.stderr
    assert Path(f"{begun}.code").read_text() == "2\n"
    assert reason in process.stderr
    assert_same_end(changed(settings, run_dir=f"{begun}.ended"), undisturbed)
