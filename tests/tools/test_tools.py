"""Tools on a run: an export that other programs load, and a picture of its curves; and every tool's --help."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from runs import changed, checksums, newest, run
from tiny import config
from transformers import AutoConfig, PreTrainedTokenizerFast

from mllm.model.load import load_policy
from mllm.model.tokenizer import bytes_tokenizer, load_tokenizer, stop_ids
from mllm.parallel.mesh import make_mesh
from tools import export, plot

ROOT = Path(__file__).parent.parent.parent
TOOLS = ("bench", "export.py", "generate.py", "memory.py", "plot.py", "replay.py", "samples.py", "tune.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The configuration of a short run with checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    settings = config("sft", run_dir=str(folder / "trained"), checkpoint={"every": 2})
    assert run(settings) == 0
    return settings


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of the run, to be changed."""
    shutil.copytree(trained.run_dir, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """A copy of the run with an export of its newest step."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    shutil.copytree(trained.run_dir, folder)
    assert export.main([str(folder)]) == 0
    return folder


def load(folder):
    settings = config("sft", model={"init": "pretrained", "source": str(folder), "architecture": None})
    return load_policy(settings, make_mesh(settings.mesh)).initial_params()


def refused(capsys, tool, *arguments):
    """The one line that the tool prints instead of doing anything."""
    assert tool.main([str(argument) for argument in arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors


# tools/export.py


def test_an_export_holds_the_newest_parameters_to_the_bit_and_leaves_the_run_as_it_was(trained, copy, capsys):
    before = checksums(copy)
    assert export.main([str(copy)]) == 0
    assert capsys.readouterr().out == f"step 4 of {copy} is exported to {copy / 'export'}\n"
    exported, params = load(copy / "export"), newest(trained).train.params
    for leaf, same in zip(jax.tree.leaves(exported), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(leaf, same)
    assert {path: sum_ for path, sum_ in checksums(copy).items() if not path.startswith("export")} == before


def test_an_older_step_and_another_dtype_are_exported_on_request(exported, copy):
    assert export.main([str(copy), "--step", "2", "--dtype", "bfloat16"]) == 0
    at_4, at_2 = (jax.tree.leaves(load(run / "export")) for run in (exported, copy))
    assert not all(np.allclose(one, other, rtol=0.01) for one, other in zip(at_2, at_4, strict=True))
    sizes = [(run / "export" / "model.safetensors").stat().st_size for run in (copy, exported)]
    assert sizes[0] < 0.6 * sizes[1]


def test_transformers_reads_the_configuration_and_the_tokenizer(exported):
    folder = exported / "export"
    architecture = AutoConfig.from_pretrained(folder)
    assert (architecture.model_type, architecture.architectures) == ("qwen2", ["Qwen2ForCausalLM"])
    assert (architecture.vocab_size, architecture.hidden_size, architecture.tie_word_embeddings) == (260, 32, True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = "12+34=46 − ½ 字"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == bytes_tokenizer().encode(text)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == list(stop_ids(bytes_tokenizer()))


def test_another_run_begins_where_the_export_ends(exported, tmp_path):
    folder = exported / "export"
    assert load_tokenizer(str(folder)).get_vocab() == bytes_tokenizer().get_vocab()
    source = {"init": "pretrained", "source": str(folder), "architecture": None}
    second = changed(config("sft", run_dir=str(tmp_path / "second"), steps=1), model=source)
    assert run(second) == 0
    first_evaluation, last = (
        json.loads(Path(path, "metrics.jsonl").read_text().splitlines()[place])
        for path, place in ((second.run_dir, 0), (exported, -1))
    )
    for key in ("eval/greedy_accuracy", "eval/greedy_mean_length"):
        assert first_evaluation[key] == last[key]


def test_a_step_without_checkpoint_is_answered_with_those_that_there_are(copy, capsys):
    assert "no checkpoint 3; there are [2, 4]" in refused(capsys, export, copy, "--step", 3)
    assert not (copy / "export").exists()


def test_a_damaged_checkpoint_leaves_an_earlier_export_as_it_was(exported, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(exported, copy)
    before = checksums(copy / "export")
    for path in (copy / "checkpoints" / "4" / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert f"{copy / 'checkpoints' / '4'}: can't be read" in refused(capsys, export, copy)
    assert checksums(copy / "export") == before


# tools/plot.py


def picture(path):
    """The colors of a picture of three by two panels."""
    pixels = plt.imread(path)[..., :3]
    assert np.abs(np.array(pixels.shape) - (416 * 2, 598 * 3, 3)).max() <= 2
    return pixels


def test_the_curves_of_a_run_are_drawn_into_its_folder_and_named_in_its_summary(trained, copy, capsys):
    with (copy / "metrics.jsonl").open("a") as file:  # a half-written line doesn't matter
        file.write('{"step": 5, "lo')
    assert plot.main([str(copy)]) == 0
    assert str(copy / "curves.png") in capsys.readouterr().out
    # Accuracy, loss, entropy and speed: four of six places.
    bands = np.array_split(picture(copy / "curves.png"), 2)
    places = [part for band in bands for part in np.array_split(band, 3, axis=1)]
    assert [bool(part.std() > 0.01) for part in places] == [True] * 4 + [False] * 2
    shutil.copy(Path(trained.run_dir, "metrics.jsonl"), copy)
    assert run(changed(trained, run_dir=str(copy))) == 0
    assert str(copy / "curves.png") in capsys.readouterr().out


def test_a_second_run_has_a_color_of_its_own(trained, copy, tmp_path):
    alone, together = tmp_path / "alone.png", tmp_path / "pictures" / "together.png"
    assert plot.main([str(copy), "--out", str(alone)]) == 0
    assert plot.main([str(copy), trained.run_dir, "--out", str(together)]) == 0
    color = np.array([1.0, 0.498, 0.055])  # matplotlib's second
    near = [int((np.abs(picture(path) - color).max(axis=-1) < 0.02).sum()) for path in (alone, together)]
    assert near[0] == 0
    assert near[1] > 100


def test_a_run_without_a_step_is_not_drawn(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert "metrics.jsonl has nothing to draw yet" in refused(capsys, plot, tmp_path)
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("command", [*TOOLS, "bench head", "bench rollout", "bench update"])
def test_help_is_fast_and_imports_nothing_heavy(command):
    heavy = ("jax", "transformers", "matplotlib", "orbax")
    code = f"import runpy, sys; sys.argv = {['tools/' + command.split()[0], *command.split()[1:], '--help']!r}\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += f"except SystemExit as end: sys.exit(end.code or ' '.join(set({heavy}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
