"""tools/memory.py: what the columns share, and how figures are shown."""

import tiny

from mllm.parallel.mesh import make_mesh
from mllm.plan import memory as plan
from tools import memory, memory_rows

PARTS = dict.fromkeys(memory_rows.PARTS, 2**30)


def row(head, micro, peak):
    sizes = {"peak": peak * 2**30, "head_alone": 2**29, "parts": PARTS}
    return {"head": head, "micro_batch": micro, "fits": peak < 3, **sizes}


def test_a_column_changes_nothing_but_head_and_adapters_and_the_batch_holds_several_micro_batches():
    config = tiny.config(mesh={"fsdp": 2}, model={"param_dtype": "bfloat16"})
    mesh = make_mesh(config.mesh)
    full_logits, fused, lora = (memory_rows.with_head(config, head, 4, mesh) for head in memory_rows.HEADS)
    assert (lora.model.lora.rank, fused.model) == (32, config.model)
    assert lora.model_copy(update={"model": config.model}) == fused
    own = lora.model.lora.model_copy(update={"rank": 3})
    with_own = config.model_copy(update={"model": lora.model.model_copy(update={"lora": own})})
    assert [memory_rows.with_head(with_own, head, 4, mesh).model.lora for head in memory_rows.HEADS] == [
        None,
        None,
        own,
    ]
    assert full_logits.head.impl == "full_logits"
    assert full_logits.model_copy(update={"head": config.head}) == fused
    assert (fused.micro_batch_size, fused.batch_size, fused.head) == (8, 4 * 8, config.head)


def test_the_table_brackets_what_does_not_fit():
    peaks = {"full_logits": (2, 4), "fused": (1, 2), "lora": (1, 1)}
    rows = [row(head, size, peak) for head in memory_rows.HEADS for size, peak in zip((1, 8), peaks[head], strict=True)]
    lines = memory_rows.table(rows, 3 * 2**30).splitlines()
    assert lines[2] == "| 1 | 2.00 GiB | 1.00 GiB | 1.00 GiB | 512.0 MiB | 512.0 MiB | 512.0 MiB |"
    assert lines[3] == "| 8 | (4.00 GiB) | 2.00 GiB | 1.00 GiB | 512.0 MiB | 512.0 MiB | 512.0 MiB |"


def test_the_picture_has_a_panel_for_each_head(tmp_path):
    rows = [row(head, 1, 5) for head in memory_rows.HEADS]
    memory.draw(rows, "one", 3 * 2**30, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 0


def test_full_logits_add_at_least_themselves_to_an_update_without_a_head():
    architecture = {**tiny.ARCHITECTURE, "vocab_size": 20_000}
    config = tiny.config("sft", model={"architecture": architecture})
    devices = plan.find_devices(config.mesh, None)
    larger = memory_rows.with_head(config, "full_logits", 16, devices.mesh)
    without, whole = (memory_rows.account(larger, devices, head, "update").peak for head in ("none", "full_logits"))
    assert whole - without > 4 * 20_000 * 16 * larger.data.max_length
