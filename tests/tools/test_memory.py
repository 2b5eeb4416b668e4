"""tools/memory.py: the comparison of its columns, and the table and picture of the sizes that fit."""

from itertools import chain, repeat

import tiny

from mllm.parallel.mesh import make_mesh
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


def test_head_memory_is_the_peak_over_an_update_without_a_head(tmp_path, monkeypatch, capsys):
    """Peaks that do not fit are in brackets."""
    _, devices = find_devices(tiny.config("sft"), None)
    monkeypatch.setattr(memory, "find_devices", lambda config, _: (config, devices._replace(memory=3 * 2**30)))
    # An update without a head, then each column's update and its head. Adapters have their own update without a head.
    peaks = chain.from_iterable([[1], *([peak, 0] for peak in (5, 4, 2)), [1, 2, 0]])
    accounts = map(Account, repeat(2**29), (peak * 2**30 for peak in peaks))
    monkeypatch.setattr(memory, "account_of", lambda *_: next(accounts))
    assert memory.main(["--config", "tiny_sft", "--micro-batches", "8", "--out", str(tmp_path / "memory")]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[4:]]
    assert [(row[0], *row[-3:]) for row in rows] == [
        ("full_logits", "4.00 GiB", "(5.00 GiB)", "512.0 MiB"),
        ("chunked_logits", "3.00 GiB", "(4.00 GiB)", "512.0 MiB"),
        ("fused", "1.00 GiB", "2.00 GiB", "512.0 MiB"),
        ("lora", "1.00 GiB", "2.00 GiB", "512.0 MiB"),
    ]
    assert (tmp_path / "memory.png").stat().st_size > 0
