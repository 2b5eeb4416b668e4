"""tools/device.py on a CPU: what fails costs only itself, where trainings differ; what tools/memory.py compares."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from mllm.config import load as configs
from mllm.parallel.mesh import make_mesh
from mllm.plan import memory as plan
from mllm.plan.targets import Account
from tools import device, memory


def test_the_training_has_valid_settings():
    _, _, name, *settings = device.TRAINING
    large, small = (configs.load(name, [*settings, *more]) for more in ([], device.ON_A_CPU))
    assert (large.model.architecture["vocab_size"], small.model.architecture["vocab_size"]) == (151936, 1000)


def finish_run(folder, arrays):
    (folder / "checkpoints" / "3" / "document").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(f"{{}}{len(arrays) * ' '}\n")
    document = {"arrays": arrays, "logs": {}, "digests": {}, "frozen": {}}
    (folder / "checkpoints" / "3" / "document" / "metadata").write_text(json.dumps({"step": 3, **document}))


ONE, OTHER = {"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}


@pytest.mark.parametrize(
    ("codes", "arrays", "exit_code", "said"),
    [
        ((0, 0, 0), (ONE, ONE), 0, "two runs: the same bits"),
        ((0, 0, 1), (ONE, ONE), 1, "--- train.py"),
        ((0, 0, 0), (ONE, OTHER), 1, "two runs: they differ in metrics.jsonl, b, c"),
    ],
)
def test_what_fails_costs_only_itself_and_runs_are_compared(
    codes, arrays, exit_code, said, tmp_path, monkeypatch, capsys
):
    left, arrays = list(codes), list(arrays)

    def run(command, **_):
        if command[1] == "train.py":
            finish_run(Path(command[-1].removeprefix("run_dir=")), arrays.pop(0))
        return SimpleNamespace(returncode=left.pop(0))

    monkeypatch.setattr(device, "start", lambda *_: ([{"platform": "cpu"}], ""))
    monkeypatch.setattr(device.subprocess, "run", run)
    assert device.main(["--out", str(tmp_path)]) == exit_code
    assert not left
    assert capsys.readouterr().out.splitlines()[-1].startswith(said)
    assert device.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --out: {tmp_path / 'one'} exists: give another folder\n"


def test_a_column_changes_nothing_but_head_and_adapters_and_the_batch_holds_several_micro_batches():
    config = tiny.config(mesh={"fsdp": 2}, model={"param_dtype": "bfloat16"})
    mesh = make_mesh(config.mesh)
    full, chunked, fused, lora = (memory.with_head(config, head, 4, mesh) for head in memory.HEADS)
    assert (lora.model.lora.rank, fused.model) == (32, config.model)
    assert lora.model_copy(update={"model": config.model}) == fused
    found = [memory.with_head(lora, head, 4, mesh).model.lora for head in memory.HEADS]
    assert found == [None, None, None, lora.model.lora]
    assert [full.head.impl, chunked.head.impl] == ["full_logits", "chunked_logits"]
    assert full.model_copy(update={"head": config.head}) == chunked.model_copy(update={"head": config.head}) == fused
    assert (fused.micro_batch_size, fused.batch_size, fused.head) == (8, 4 * 8, config.head)


def test_the_table_brackets_what_does_not_fit_and_the_picture_is_written(tmp_path, monkeypatch, capsys):
    devices, peaks = plan.find_devices(tiny.config("sft").mesh, None), iter((5, 4, 2, 1))
    monkeypatch.setattr(plan, "find_devices", lambda *_: devices._replace(memory=3 * 2**30))
    monkeypatch.setattr(memory, "account", lambda *_, **__: Account(0, 0))

    def bar(*_):
        return {**dict.fromkeys(memory.PARTS, 2**30), "peak": next(peaks) * 2**30, "head alone": 2**29}

    monkeypatch.setattr(memory, "bar", bar)
    assert memory.main(["--config", "tiny_sft", "--micro-batches", "8", "--out", str(tmp_path / "memory")]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[4:]]
    found = [["full_logits", "8", "(5.00 GiB)"], ["chunked_logits", "8", "(4.00 GiB)"]]
    found += [["fused", "8", "2.00 GiB"], ["lora", "8", "1.00 GiB"]]
    assert rows == [[*row[:2], *["1.00 GiB"] * 5, row[2], "512.0 MiB"] for row in found]
    assert (tmp_path / "memory.png").stat().st_size > 0
