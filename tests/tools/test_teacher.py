"""tools/teacher.py: lists that training learns from as from the teacher, resumable, and refused for other data."""

import json
from pathlib import Path

import numpy as np
import pytest
from runs import arguments, changed, records, run
from tiny import config

from mllm.data import teacher_lists
from mllm.errors import UserError
from tools import teacher

TEACHER = {"source": str(Path(__file__).parent.parent / "fixtures" / "tiny_grpo"), "dtype": "float32"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Distillation of 40 sums from a teacher in memory."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    sums = [
        {"question": f"{a}+{b}+{c}=", "answer": f"{a + b + c}"} for a, b, c in rng.integers(1, 10, (40, 3)).tolist()
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))
    data = {"source": str(folder / "sums.jsonl"), "max_length": 32, "cache": str(folder / "cache"), "shuffle": True}
    parts = {"task": None, "rollout": None, "eval": None, "data": data, "distill": {"kind": "forward_kl"}}
    return config("distill", steps=2, run_dir=str(folder / "run"), teacher=TEACHER, **parts)


def stored(settings, out, *options):
    return teacher.main([*arguments(settings), "--out", str(out), "--top-k", "250", *options])


@pytest.mark.slow
def test_training_from_lists_of_almost_all_tokens_is_that_with_the_teacher(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(teacher_lists, "DOCUMENTS", 16)
    out = tmp_path / "lists"
    assert stored(settings, out) == 0
    assert "40 documents, 250 tokens at each of " in capsys.readouterr().out
    names = [f"{number:05}.arrayrecord" for number in range(3)]
    assert sorted(path.name for path in out.iterdir()) == [*names, "teacher.json"]

    whole = (out / names[1]).read_bytes()
    (out / names[1]).unlink()
    from_lists = changed(
        settings, teacher=None, distill={"teacher_logprobs": str(out)}, run_dir=str(tmp_path / "from_lists")
    )
    assert run(from_lists) == 2
    assert "00001.arrayrecord is missing; tools/teacher.py writes it" in capsys.readouterr().err
    (out / names[0]).write_bytes(b"kept")  # what is there is not made again
    assert stored(settings, out) == 0
    assert ((out / names[0]).read_bytes(), (out / names[1]).read_bytes()) == (b"kept", whole)
    (out / names[0]).unlink()
    assert stored(settings, out) == 0

    assert run(settings) == run(from_lists) == 0
    for mine, yours in zip(records(from_lists), records(settings), strict=True):
        assert mine["loss"] == pytest.approx(yours["loss"], rel=1e-3)
        assert mine["kl"] == pytest.approx(yours["kl"], rel=1e-3)
        assert mine["grad_norm"] == pytest.approx(yours["grad_norm"], rel=1e-3)
        assert mine["entropy"] > 1
        assert 0 <= mine["teacher_agreement"] <= 1

    assert stored(settings, out, "--top-k", "9") == 2
    assert "is of another top_k: give another place" in capsys.readouterr().err
    assert run(changed(from_lists, run_dir=str(tmp_path / "texts"), chat_template="never")) == 2
    assert "distill.teacher_logprobs: " in (said := capsys.readouterr().err)
    assert "is of other examples, tokens or data.max_length than data's (40 then, 40 now)" in said


def test_what_can_t_be_stored_is_one_line(settings, tmp_path, capsys):
    task = changed(settings, task={"name": "arithmetic"}, data={"source": "task", "max_length": 8, "cache": None})
    assert stored(task, tmp_path / "x") == 2
    assert "give one with algorithm: distill, a teacher, and data of files" in capsys.readouterr().err
    assert stored(settings, tmp_path / "x", "--top-k", "261") == 2
    assert "--top-k: 261: give a number from 1 to 260" in capsys.readouterr().err
    (tmp_path / "other").write_text("")
    with pytest.raises(UserError, match=r"has other files and no teacher\.json"):
        teacher_lists.read_summary(tmp_path, "--out")
