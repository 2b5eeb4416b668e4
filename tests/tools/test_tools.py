"""A run becomes a folder that other programs load, and a picture that somebody looks at."""

import json
import shutil
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from runs import changed, checksums, newest, run
from tiny import config
from transformers import AutoConfig, PreTrainedTokenizerFast

import train
from mllm.model import weights
from mllm.model.load import load_policy
from mllm.model.tokenizer import bytes_tokenizer, load_tokenizer, stop_ids
from mllm.parallel.mesh import make_mesh
from tools import export, plot


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The configuration of a short run with checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    settings = config("sft", run_dir=str(folder / "trained"), checkpoint={"every": 2})
    assert run(settings) == 0
    return settings


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of the run, to be spoilt or exported."""
    shutil.copytree(trained.run_dir, tmp_path / "run")
    return tmp_path / "run"


def load(folder):
    settings = config("sft", model={"init": "pretrained", "source": str(folder), "architecture": None})
    return load_policy(settings, make_mesh(settings.mesh)).initial_params()


def refused(capsys, tool, *arguments):
    """The one line that the tool says instead of doing anything."""
    assert tool.main([str(argument) for argument in arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors


# tools/export.py


def test_an_export_holds_the_newest_parameters_to_the_bit(trained, copy, capsys):
    assert export.main([str(copy)]) == 0
    assert capsys.readouterr().out == f"step 4 of {copy} is exported to {copy / 'export'}\n"
    exported, params = load(copy / "export"), newest(trained).train.params
    for leaf, same in zip(jax.tree.leaves(exported), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(leaf, same)


def test_an_older_step_is_exported_on_request(copy):
    assert export.main([str(copy)]) == 0
    at_4 = jax.tree.leaves(load(copy / "export"))
    assert export.main([str(copy), "--step", "2"]) == 0
    at_2 = jax.tree.leaves(load(copy / "export"))
    assert not all(np.array_equal(one, other) for one, other in zip(at_2, at_4, strict=True))


def test_bfloat16_halves_the_export(copy):
    assert export.main([str(copy), "--dtype", "bfloat16"]) == 0
    half = (copy / "export" / "model.safetensors").stat().st_size
    assert export.main([str(copy)]) == 0
    assert half < 0.6 * (copy / "export" / "model.safetensors").stat().st_size


def test_an_export_leaves_the_run_as_it_was(copy):
    before = checksums(copy)
    assert export.main([str(copy)]) == 0
    assert {path: sum_ for path, sum_ in checksums(copy).items() if not path.startswith("export")} == before


def test_transformers_reads_the_configuration_and_the_tokenizer(copy):
    assert export.main([str(copy)]) == 0
    folder = copy / "export"
    architecture = AutoConfig.from_pretrained(folder)
    assert architecture.model_type == "qwen2"
    assert architecture.architectures == ["Qwen2ForCausalLM"]
    assert (architecture.vocab_size, architecture.hidden_size, architecture.tie_word_embeddings) == (260, 32, True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = "12+34=46 − ½ 字"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == bytes_tokenizer().encode(text)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == list(stop_ids(bytes_tokenizer()))


def test_an_export_is_where_another_run_begins(copy, tmp_path):
    assert export.main([str(copy)]) == 0
    folder = copy / "export"
    assert load_tokenizer(str(folder)).get_vocab() == bytes_tokenizer().get_vocab()
    assert weights.read_config(folder).hidden_size == 32
    source = {"init": "pretrained", "source": str(folder), "architecture": None}
    second = changed(config("sft", run_dir=str(tmp_path / "second"), steps=1), model=source)
    assert run(second) == 0
    first_evaluation, last = (
        json.loads(Path(path, "metrics.jsonl").read_text().splitlines()[place])
        for path, place in ((second.run_dir, 0), (copy, -1))
    )
    for key in ("eval/greedy_accuracy", "eval/greedy_mean_length"):
        assert first_evaluation[key] == last[key]


def test_a_folder_that_is_no_run_is_not_exported(tmp_path, capsys):
    assert f"{tmp_path / 'nowhere'}: no config.yaml" in refused(capsys, export, tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_checkpoints_is_not_exported(copy, capsys):
    shutil.rmtree(copy / "checkpoints")
    before = checksums(copy)
    assert f"{copy / 'checkpoints'}: no checkpoint" in refused(capsys, export, copy)
    assert checksums(copy) == before


def test_a_step_without_checkpoint_is_answered_with_those_that_there_are(copy, capsys):
    assert "no checkpoint 3; there are [2, 4]" in refused(capsys, export, copy, "--step", 3)
    assert not (copy / "export").exists()


def test_a_damaged_checkpoint_leaves_an_earlier_export_as_it_was(copy, capsys):
    assert export.main([str(copy), "--step", "2"]) == 0
    before = checksums(copy / "export")
    for path in (copy / "checkpoints" / "4" / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    capsys.readouterr()
    assert f"{copy / 'checkpoints' / '4'}: can't be read" in refused(capsys, export, copy)
    assert checksums(copy / "export") == before


# tools/plot.py


def assert_is_a_picture(path, columns, rows):
    """Of so many panels, and with something in each of them."""
    picture = plt.imread(path)[..., :3]
    height, width, _ = picture.shape
    assert abs(width - 598 * columns) <= 2
    assert abs(height - 416 * rows) <= 2
    return picture


def test_the_curves_of_a_run_are_drawn_into_its_folder(copy, capsys):
    assert plot.main([str(copy)]) == 0
    assert str(copy / "curves.png") in capsys.readouterr().out
    picture = assert_is_a_picture(copy / "curves.png", columns=3, rows=2)
    # Accuracy, loss, entropy and speed: four of six places.
    places = [part for band in np.array_split(picture, 2) for part in np.array_split(band, 3, axis=1)]
    assert [bool(part.std() > 0.01) for part in places] == [True] * 4 + [False] * 2


def test_a_second_run_has_a_colour_of_its_own(trained, copy, tmp_path):
    alone, together = tmp_path / "alone.png", tmp_path / "pictures" / "together.png"
    assert plot.main([str(copy), "--out", str(alone)]) == 0
    assert plot.main([str(copy), trained.run_dir, "--out", str(together)]) == 0
    colour = np.array([1.0, 0.498, 0.055])  # matplotlib's second
    near = [np.abs(assert_is_a_picture(path, 3, 2) - colour).max(axis=-1) < 0.02 for path in (alone, together)]
    assert near[0].sum() == 0
    assert near[1].sum() > 100


@pytest.mark.parametrize("spoil", ["missing", "empty"])
def test_a_folder_without_metrics_is_not_drawn(copy, capsys, spoil):
    (copy / "metrics.jsonl").unlink()
    if spoil == "empty":
        (copy / "metrics.jsonl").touch()
    assert f"{copy}: no metrics.jsonl with a line in it" in refused(capsys, plot, copy)
    assert not (copy / "curves.png").exists()


def test_metrics_without_a_curve_are_said_to_be_so(copy, capsys):
    (copy / "metrics.jsonl").write_text('{"step": 0}\n')
    (copy / "timings.jsonl").unlink()
    assert "run: metrics.jsonl has nothing to draw yet" in refused(capsys, plot, copy)


def test_a_half_written_last_line_does_not_matter(copy):
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert plot.main([str(copy)]) == 0


def test_a_picture_that_can_not_be_written_is_said(copy, capsys):
    assert "curves.xyz" in refused(capsys, plot, copy, "--out", copy / "curves.xyz")
    assert str(copy / "config.yaml") in refused(capsys, plot, copy, "--out", copy / "config.yaml" / "a.png")


def test_the_summary_names_the_curves(trained, copy, capsys):
    assert plot.main([str(copy)]) == 0
    capsys.readouterr()
    assert run(changed(trained, run_dir=str(copy))) == 0
    assert str(copy / "curves.png") in capsys.readouterr().out


def test_help_is_there():
    for tool in (train, export, plot):
        with pytest.raises(SystemExit) as leaving:
            tool.main(["--help"])
        assert leaving.value.code == 0
