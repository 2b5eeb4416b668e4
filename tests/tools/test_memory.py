"""tools/memory.py: the comparison of its columns, and the table and picture of the sizes that fit."""

import tiny

from mllm.parallel.mesh import make_mesh
from mllm.plan import memory as plan
from mllm.plan.targets import Account, find_devices
from tools import memory


def test_a_column_changes_only_head_and_adapters():
    """The batch holds several micro-batches."""
    config = tiny.config(mesh={"fsdp": 2}, model={"param_dtype": "bfloat16"})
    mesh = make_mesh(config.mesh)
    full, chunked, fused, lora = (memory.with_head(config, head, 4, mesh) for head in memory.HEADS)
    assert (lora.model.lora.rank, fused.model) == (32, config.model)
    assert lora.model_copy(update={"model": config.model}) == fused
    assert [full.head.impl, chunked.head.impl] == ["full_logits", "chunked_logits"]
    assert full.model_copy(update={"head": config.head}) == chunked.model_copy(update={"head": config.head}) == fused
    assert (fused.micro_batch_size, fused.batch_size, fused.head) == (8, 4 * 8, config.head)


def test_a_row_has_the_parts_of_a_plan_and_brackets_where_it_does_not_fit(tmp_path, monkeypatch, capsys):
    _, devices = find_devices(tiny.config("sft"), None)
    monkeypatch.setattr(memory, "find_devices", lambda config, _: (config, devices._replace(memory=3 * 2**30)))
    # A column's head alone, then its update.
    accounts = iter([Account(2**29, x) for peak in (5, 4, 2, 2) for x in (0, peak * 2**30)])
    monkeypatch.setattr(plan, "account_of", lambda *_: next(accounts))
    assert memory.main(["--config", "tiny_sft", "--micro-batches", "8", "--out", str(tmp_path / "memory")]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[4:]]
    peaks = {"full_logits": "(5.00 GiB)", "chunked_logits": "(4.00 GiB)", "fused": "2.00 GiB", "lora": "2.00 GiB"}
    assert [(row[0], *row[-2:]) for row in rows] == [(name, "512.0 MiB", peak) for name, peak in peaks.items()]
    assert (tmp_path / "memory.png").stat().st_size > 0
