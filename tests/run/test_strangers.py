"""A stranger's run or model: a reader runs no code of it, and writes into no folder but the reader's own."""

import importlib.util
import json
from pathlib import Path

import pytest
from runs import edit
from tiny import config

from mllm.config import places
from mllm.data.tasks.load import function_records
from mllm.errors import UserError
from mllm.model.folder import replacing
from mllm.model.tokenizer import bytes_tokenizer, load_tokenizer
from mllm.run import folder as run_dir
from mllm.run.source_run import source_run
from mllm.run.store import RunStore
from tools import export, plot, samples


@pytest.fixture
def stranger(tmp_path):
    """The folder of a run with a log of each kind."""
    (folder := tmp_path / "stranger").mkdir()
    run_dir.write(RunStore(folder), config(run_dir=str(folder)))
    sample = {"step": 1, "prompt": "1+1=", "completion": "2", "rewards": {}, "reward": None, "advantage": 0.0}
    for name, record in {"metrics": {"step": 1, "loss": 1.0}, "samples": sample}.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_no_module_of_a_run_that_is_read_can_be_imported(stranger, monkeypatch):
    """Neither this process nor the rewards' can import it. Python looks for a sitecustomize at a start."""
    monkeypatch.setattr(places, "MODULES", [])
    for name in ("stranger_module", "sitecustomize"):
        (stranger / f"{name}.py").write_text("raise SystemExit('code was run')\n")
    assert source_run(config(model={"init": "pretrained", "architecture": None, "source": str(stranger)}).model)
    assert export.main([str(stranger), "--adapter"]) == 2  # it has none
    with places.importable():
        assert importlib.util.find_spec("stranger_module") is None
    with pytest.raises(UserError, match="No module named 'stranger_module'"):
        function_records("stranger_module:problems")
    assert str(stranger) not in places.MODULES  # the PYTHONPATH of the rewards' process


@pytest.mark.parametrize(("tool", "name"), [(samples, "samples.html"), (plot, "curves.png")])
def test_a_tool_writes_its_file_in_the_place_of_a_link(stranger, tmp_path, tool, name):
    (mine := tmp_path / "mine").write_text("mine")
    (stranger / name).symlink_to(mine)
    assert tool.main([str(stranger)]) == 0
    assert mine.read_text() == "mine"
    assert (stranger / name).stat().st_size > 1000


@pytest.mark.parametrize(("options", "name"), [([], "export"), (["--adapter"], "adapter")])
def test_an_export_does_not_follow_a_link_in_the_run(stranger, tmp_path, capsys, options, name):
    with replacing(tmp_path / "mine") as model:
        (model / "config.json").write_text("mine")
    (stranger / name).symlink_to(tmp_path / "mine")
    assert export.main([str(stranger), *options]) == 2
    assert f"error: {stranger / name}: is a link, in a run that may be another's:" in capsys.readouterr().err
    assert (tmp_path / "mine/config.json").read_text() == "mine"


def tokenizer_with(folder, **settings):
    """The folder of a tokenizer with more settings."""
    bytes_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", **settings)
    return str(folder)


def test_an_export_holds_no_file_that_a_tokenizer_names(tmp_path):
    named = [{"name": name, "template": "{{ 1 }}"} for name in ("default", "../../mine", "tool_use")]
    tokenizer = load_tokenizer(tokenizer_with(tmp_path / "model", chat_template=named))
    assert set(tokenizer.chat_template) == {"default", "tool_use"}
    for _ in range(2):  # the second replaces the first
        with replacing(tmp_path / "export") as folder:
            tokenizer.save_pretrained(folder)
    assert [path.name for path in tmp_path.glob("export/*/*")] == ["tool_use.jinja"]
    assert not [*tmp_path.rglob("mine*")]


def test_a_tokenizer_is_read_from_no_other_folder(tmp_path):
    model, other = Path(tokenizer_with(tmp_path / "model")), tmp_path / "other/tokenizer.1.0.0.json"
    other.parent.mkdir()
    other.write_text((model / "tokenizer.json").read_text().replace("<|im_end|>", "<|of the other|>"))
    tokenizer = load_tokenizer(tokenizer_with(model, tokenizer_file=str(other)))
    assert "<|of the other|>" not in tokenizer.get_vocab()
    message = r"none can be read from .*fast_tokenizer_files in tokenizer_config.json may name files elsewhere: remove"
    with pytest.raises(UserError, match=rf"^model.tokenizer: {message}"):
        load_tokenizer(tokenizer_with(model, fast_tokenizer_files=[f"../other/{other.name}"]))
