"""Tools on a run: an export that other programs load, and a picture of its curves; and every tool's --help."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import changed, checksums, newest, run
from tiny import config
from transformers import AutoConfig, PreTrainedTokenizerFast

from mllm.model.load import load_policy
from mllm.model.tokenizer import bytes_tokenizer, stop_ids
from mllm.parallel.mesh import make_mesh
from tools import export, plot

ROOT = Path(__file__).parent.parent.parent
TOOLS = ("bench", "device.py", "export.py", "generate.py", "memory.py", "plot.py", "replay.py", "samples.py", "tune.py")


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


def drawn(**runs):
    """The names of each panel's series, by run."""
    return {topic: [f"{one.run} {one.name}" for one in series] for topic, series in plot.panels(runs).items()}


def test_the_curves_of_a_run_are_drawn_into_its_folder_and_named_in_its_summary(trained, copy, capsys):
    with (copy / "metrics.jsonl").open("a") as file:  # a half-written line doesn't matter
        file.write('{"step": 5, "lo')
    assert plot.main([str(copy)]) == 0
    assert str(copy / "curves.png") in capsys.readouterr().out
    assert list(drawn(run=plot.read_run(copy))) == [
        *("Reward", "Accuracy", "Loss (nats)", "Entropy (nats)", "Tokens per second")
    ]
    timings = [json.loads(line) for line in (copy / "timings.jsonl").read_text().splitlines()]
    _, seconds = plot.seconds_by_phase(plot.read_run(copy))
    assert sum(sums[-1] for sums in seconds.values()) == pytest.approx(
        sum(second for record in timings for key, second in record.items() if key.startswith("time/"))
    )
    shutil.copy(Path(trained.run_dir, "metrics.jsonl"), copy)
    assert run(changed(trained, run_dir=str(copy))) == 0
    assert str(copy / "curves.png") in capsys.readouterr().out


def test_a_panel_has_what_its_runs_have_and_a_topic_of_none_has_no_panel():
    sft = [{"step": 0, "validation/loss": 3.0}, {"step": 1, "loss": 2.0}]
    no_answers = [{"step": 1, "reward": 0.5, "loss": 0.0, "kl": 0.1, "eval/reward": 0.4, "test/reward": 0.3}]
    assert drawn(sft=sft, grpo=no_answers) == {
        "Reward": ["grpo training", "grpo held-out", "grpo test"],
        "Loss (nats)": ["sft training", "sft validation"],  # a policy's own loss says nothing
        "KL to the reference (nats)": ["grpo training"],
    }


def test_accuracies_and_lengths_have_bands():
    accuracy = {f"eval/greedy_accuracy{end}": value for end, value in (("", 0.5), ("_low", 0.4), ("_high", 0.7))}
    lengths = {f"completions/{name}_length": value for name, value in (("mean", 5.0), ("min", 2), ("max", 9))}
    records = [{"step": 0, **accuracy}, {"step": 1, **lengths}]
    series = plot.panels({"run": records})
    assert series["Accuracy"] == [plot.Series("run", "held-out", [0], [0.5], ([0.4], [0.7]))]
    assert series["Completion length (tokens)"] == [plot.Series("run", "training", [1], [5.0], ([2], [9]))]


def test_seconds_add_up_over_the_steps_from_the_one_before_the_first():
    records = [{"step": 0}, {"step": 1, "time/update": 3.0}, {"step": 2, "time/update": 1.0, "time/eval": 0.5}]
    assert plot.seconds_by_phase(records) == ([0, 1, 2], {"update": [0, 3.0, 4.0], "eval": [0, 0, 0.5]})


def test_two_runs_of_one_step_with_every_topic_and_one_folder_name_are_drawn(tmp_path, capsys):
    record = {key: 0.5 for metrics in plot.TOPICS.values() for key in metrics.values()} | {"step": 1}
    record |= {"test/greedy_accuracy_low": 0.4, "test/greedy_accuracy_high": 0.7}
    folders = [tmp_path / name / "run" for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        (folder / "timings.jsonl").write_text('{"step": 1, "time/update": 2.0}\n')
    out = tmp_path / "pictures" / "together.png"
    assert plot.main([*map(str, folders), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"curves             {out}\n"
    assert out.stat().st_size
    assert [plot.name(folder, folders) for folder in folders] == [str(folder) for folder in folders]


def test_a_run_without_a_step_is_not_drawn(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert "metrics.jsonl has nothing to draw yet" in refused(capsys, plot, tmp_path)
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("command", [*TOOLS, "bench head", "bench rollout", "bench train"])
def test_help_is_fast_and_imports_nothing_heavy(command):
    heavy = ("jax", "transformers", "matplotlib", "orbax")
    code = f"import runpy, sys; sys.argv = {['tools/' + command.split()[0], *command.split()[1:], '--help']!r}\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += f"except SystemExit as end: sys.exit(end.code or ' '.join(set({heavy}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
