"""Processes begin together, give the results of one process, write them once, and end with one line and exit code."""

import math
import os
import pickle
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from rollouts import GROUP, SquareRewards, grpo_source, sequences
from runs import (
    arguments,
    assert_same_metrics,
    changed,
    join_group,
    newest,
    outputs,
    records,
    run,
    spawn,
    start_group,
)
from states import like, make_state, opened, save
from tiny import EXAMPLES, FIXTURES, METHODS, config, load_weights

import train
from mllm.config.data import DataConfig
from mllm.config.model import MeshConfig
from mllm.data import cache
from mllm.data import records as data_records
from mllm.data.source import FrozenModels
from mllm.errors import RESTART, CommonError, StepError, UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel import group as group_module
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.parallel.processes import RowShare, gather_objects, local_rows, raise_everywhere
from mllm.run.checkpoint import by_name
from mllm.run.checksum import checksums
from mllm.run.store import RunStore, lock_run, tool_run
from mllm.sampler import trajectories
from mllm.stopwatch import Stopwatch

MESH = {"dp": 2, "fsdp": 2, "tp": 2}
TIED = FIXTURES / "tied"
LOSS = {"loss_type": "gspo", "importance_sampling": "sequence_mask", "dual_clip": 3.0}
GRPO = config(
    steps=6,
    mesh={"fsdp": 2, "tp": 2},
    grpo={"dynamic_sampling": 3, "updates_per_generation": 2, **LOSS},
    task={"rewards": [{"name": "user_rewards:seldom"}]},
    rollout={"max_slots": 4, "top_p": 0.95, "temperature": 0.7},
    checkpoint={"every": 2},
    log={"samples": 6},
)


# Training


@pytest.mark.nightly
def test_a_run_resumes_with_other_processes_and_devices(tmp_path):
    """The examples stay the same."""
    data = {"source": str(EXAMPLES / "sums.jsonl"), "epochs": 1, "cache": str(tmp_path / "cache")}
    one, many = (
        config("sft", run_dir=str(tmp_path / name), mesh=MESH, data=data, task=None, rollout=None, eval=None, steps=6)
        for name in ("one", "many")
    )
    for processes, devices, steps, mesh in ((4, 2, 2, MESH), (2, 2, 4, {"dp": 2, "fsdp": 2, "tp": 1})):
        outputs(start_group(["train.py", *arguments(changed(many, steps=steps, mesh=mesh))], processes, devices))
    assert run(changed(many, mesh={"dp": 1, "fsdp": 4, "tp": 2})) == 0
    assert run(one) == 0
    assert_same_metrics(many, one)
    assert newest(many).position == newest(one).position


RUNS = {"grpo": GRPO, **{name: METHODS[name] for name in ("turns", "distill", "dpo")}}


@pytest.mark.nightly
@pytest.mark.parametrize("method", RUNS)
def test_two_processes_log_the_values_of_one_process(method, tmp_path):
    """A signal to one of them: tests/faults/test_campaign.py."""
    one, two = (changed(RUNS[method], run_dir=str(tmp_path / name)) for name in ("one", "two"))
    devices = math.prod(one.mesh.model_dump().values()) // 2
    outputs(start_group(["train.py", *arguments(two)], 2, devices))
    assert run(one) == 0
    assert_same_metrics(two, one)
    assert tool_run(one.run_dir).read("samples.jsonl") == tool_run(two.run_dir).read("samples.jsonl")
    if method == "grpo":
        lines = records(one)
        assert max(line["dynamic_sampling/rounds"] for line in lines) == 3
        assert any(0 < line["dynamic_sampling/frac_groups_kept"] < 0.5 for line in lines)
        assert all(0.5 < line["sampling/kept_probability/mean"] < 1 for line in lines)


# Rows of each process


def test_messages_between_processes_are_json_never_unpickled(monkeypatch):
    """Numbers arrive to the bit."""
    value = {"numbers": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, math.nan, 2**80], "text": "\ud800\n\0"}
    others = iter((lambda frame: frame.replace(b"[0, ", b"[1, ", 1), lambda frame: pickle.dumps(1).ljust(len(frame))))

    def gather(sent):
        size, frame = sent
        return np.int32([size, size]), np.stack([frame, np.frombuffer(next(others)(frame.tobytes()), np.uint8)])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    assert repr(gather_objects(value)) == repr([value, value])
    with pytest.raises(ValueError, match=r"codec|Expecting"):
        gather_objects(value)


def check_rows_and_reading(path):
    """In each of two processes: settings are compared, rows shared, and each reads its part of data and weights."""
    with pytest.raises(CommonError, match=r"^seed: process 1 has 1, process 0 0: give all the same$"):
        join_group(seed=int(os.environ["JAX_PROCESS_ID"]))
    process = jax.process_index()
    assert gather_objects({"process": process}) == [{"process": 0}, {"process": 1}]
    assert gather_objects("x" * 5000 * process) == ["", "x" * 5000]

    for mesh_config, share in (
        (MeshConfig(dp=8, fsdp=1), RowShare(process, 2)),
        (MeshConfig(**MESH), RowShare(process, 2)),
        (MeshConfig(fsdp=1, tp=8), RowShare(0, 1)),
    ):
        mesh = make_mesh(mesh_config)
        rows = RowShare.of_mesh(mesh)
        assert rows == share
        whole = np.arange(16 * 3).reshape(16, 3)
        mine = np.split(whole, rows.count)[rows.index]
        laid_out = shard_batch(mesh, mine)
        assert laid_out.shape == whole.shape
        np.testing.assert_array_equal(local_rows(laid_out), mine)
        np.testing.assert_array_equal(np.concatenate(rows.gather(local_rows(laid_out).tolist())), whole)

    with pytest.raises(UserError, match=r"^process 1: no such tokenizer$"), raise_everywhere():  # noqa: PT012
        if process == 1:
            raise UserError("no such tokenizer")

    source = f"{TIED}/{('config', 'generation_config')[process]}.json"
    settings = DataConfig(source=source, max_length=32)
    with pytest.raises(UserError, match=r"^data\.source: process 1 and process 0 have different examples"):
        cache.cached_documents(data_records.Origin("data.source", source), settings, Renderer(bytes_tokenizer()))

    source = grpo_source(rewards=SquareRewards(range(GROUP - 1, 2 * GROUP)))  # one of process 0, all of process 1
    source.rows = RowShare(process, 2)
    three = [next(source.prompts) for _ in range(3)]
    given = {"step": 0, "first_sequence": 0, "rows": source.rows, "watch": Stopwatch()}
    scored = trajectories.sample_trajectories(source.sampler, SquareRewards(), three, np.float32(0), **given)
    assert [one.rewards for one in scored] == [[("value", i)] for i in (0, 1, 4)]
    with pytest.raises(StepError, match=r"exact_match raised 5 times, first: too many"):
        source.next(np.float32(0), 0, Stopwatch(), FrozenModels())
    source.rewards = SquareRewards()
    own = len(sequences(source.next(np.float32(0), 0, Stopwatch(), FrozenModels()).batch))
    assert sum(gather_objects(own)) == 2 * GROUP

    loaded, other = (checksums(by_name(load_weights(TIED, **mesh))) for mesh in (MESH, {"fsdp": 8}))
    assert loaded == other

    store = RunStore(path)
    with lock_run(store) if process == 0 else nullcontext():
        save(store, *(make_state(step, MeshConfig(fsdp=8)) for step in (1, 2)))
        with opened(store) as checkpoints:
            state = checkpoints.restore(like(MeshConfig(**MESH)))
        assert state.step == 2
        same = checksums(by_name(make_state(2, MeshConfig(**MESH)).train))
        assert checksums(by_name(state.train)) == same
        if process == 0:
            for file in Path(store.folder, "checkpoints/2/state/d").iterdir():
                file.write_bytes(bytes(file.stat().st_size))
        gather_objects(None)
        with opened(store) as checkpoints:  # damage that only one process can find is damage for both
            assert checkpoints.restore(like(MeshConfig(fsdp=8))).step == 1


# How processes end


def fail_in_one():
    """In each of two processes: work, and let process 1 fail in the midst of it."""
    with group_module.ending_together():
        for step in range(1000):
            gather_objects(step)
            if step == 3 and jax.process_index() == 1:
                raise UserError("a line")


def test_files_may_lie_elsewhere_on_another_machine_and_all_else_is_equal(monkeypatch):
    def compared(weight, **others):
        mine, theirs = (
            {"data": {"mix": [{"source": f"{at}/a.jsonl", "weight": 1.0}, {"source": f"{at}/b.jsonl", "weight": x}]}}
            for at, x in (("/here", 1.0), ("/there", weight))
        )
        monkeypatch.setattr(group_module, "gather_objects", lambda settings: [settings, settings | theirs | others])
        group_module.compare(mine)

    compared(1.0)
    with pytest.raises(CommonError, match=r"data\.mix\.weight: process 1 has 9\.0, process 0 1\.0: give all the same"):
        compared(9.0)
    with pytest.raises(CommonError, match=r"mllm: process 1 has 'code of 1', process 0 'code "):
        compared(1.0, mllm="code of 1")


@pytest.mark.slow
def test_each_process_reads_its_part_and_one_failure_ends_all(tmp_path):
    """Both faults share one start. The start takes most of the time. Other faults: tests/faults/test_campaign.py."""
    call = f"test_processes.check_rows_and_reading({str(tmp_path / 'run')!r}) or test_processes.fail_in_one()"
    script = f"import test_processes; from mllm.errors import command, run_main; run_main(command(lambda: {call}))"
    processes = start_group(["-c", script], 2, 4)
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [RESTART, 2], texts
    lines = r"error: another process was lost \(.*\): the same command resumes", "error: a line"
    for output, line in zip(texts, lines, strict=True):
        assert len(re.findall(f"^{line}$", output, re.MULTILINE)) == output.count("error: ") == 1, output


def test_a_bug_in_one_process_is_printed_with_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match=r"^1$"), group_module.ending_together():
        raise KeyError("a key")
    assert re.search(r"Traceback.*\nKeyError: 'a key'\nerror: KeyError: 'a key'", capsys.readouterr().err, re.DOTALL)


@pytest.mark.nightly
def test_a_port_that_is_taken_is_an_error_in_one_line(tmp_path):
    settings = config("sft", run_dir=str(tmp_path / "run"), mesh=MESH)
    command = ["train.py", *arguments(settings), "--processes", "2", "--process", "0", "--coordinator"]
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        (output,) = outputs([spawn([*command, address], subprocess.STDOUT)], 2)
    assert re.fullmatch(rf"error: --coordinator {address}, .*: \[Errno \d+\] Address already in use.*\n", output)
    assert not Path(settings.run_dir).exists()


# How processes find each other


def test_a_flag_that_is_missing_is_named(monkeypatch):
    def initialize(*group, **options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for group, message in (
        ((None, 2, None), "--processes 2: .*defined.; give --coordinator and --process, since JAX finds no cluster"),
        ((None, None, None), "--cluster: .*defined.; give --coordinator and --processes and --process, since"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            group_module.join(group, {})


def test_flags_precede_the_environment_for_processes(monkeypatch):
    """Without both a process is alone."""

    def addresses(*flags):
        options = train.make_parser().parse_args(["--config", "any.yaml", *flags])
        return options.coordinator, options.processes, options.process

    assert addresses() == (None, None, None)
    for name, value in (("COORDINATOR_ADDRESS", "a:1"), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "1")):
        monkeypatch.setenv(f"JAX_{name}", value)
    assert addresses() == ("a:1", 2, 1)
    assert addresses("--coordinator", "b:2", "--processes", "4", "--process", "3") == ("b:2", 4, 3)
