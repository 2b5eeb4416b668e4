"""Bad input is refused in one line with exit code 2, before anything is compiled, written, or run as code.

In messages `{path}` is the file with the input. The table of models and tokenizers is in bad_models.py.
"""

import gzip
import importlib
import os
import shlex
import shutil
import sys
from pathlib import Path

import jax
import pytest
from bad_models import MODELS, OWN_CODE, pickled
from runs import arguments, checksums
from tiny import TEACHER, config

import train
from mllm.config import places
from mllm.config.load import dump
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh


@pytest.fixture
def model(tmp_path):
    """The folder of a whole model, to be spoilt."""
    return Path(shutil.copytree(TEACHER["source"], tmp_path / "model"))


@pytest.fixture
def refused(tmp_path, capfd, monkeypatch):
    """Calls a module's `main`, which must refuse with one line and leave all files as they are; returns the line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "MODULES", [])
    monkeypatch.setitem(sys.modules, "wandb", None)
    compiled = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)

    def call(module, *command):
        before = checksums(tmp_path)
        assert module.main([str(argument) for argument in command]) == 2
        output, errors = capfd.readouterr()
        *panic, line, end = errors.split("\n")
        assert not panic or "panicked at" in panic[1]  # which a library in Rust prints itself
        assert (output, end) == ("", "")
        assert line.startswith("error: ")
        assert line.isprintable()
        assert len(line) < 2000
        assert checksums(tmp_path) == before
        assert not compiled
        return line

    yield call
    jax.monitoring.unregister_event_duration_listener(listen)


def pretrained(model):
    """The configuration of a run that starts from this model."""
    source = {"init": "pretrained", "source": str(model), "architecture": None}
    return config("sft", run_dir="run", model=source, eval=None, rollout=None)


def finetuned(source):
    """The arguments for SFT on a file."""
    data = {"source": str(source), "epochs": 1}
    return arguments(config("sft", run_dir="run", data=data, task=None, eval=None, rollout=None))


def test_a_configuration_file_without_settings_is_refused(tmp_path, refused):
    (path := tmp_path / "run.yaml").write_text("steps")
    assert f"{path}: expected a mapping" in refused(train, "--config", path)


@pytest.mark.parametrize("name", ["nowhere", "a\0b", "/dev/zero"])
def test_a_missing_configuration_lists_the_shipped_names(name, refused):
    assert "no such file, here or in configs/; configs/ has " in refused(train, "--config", name)


OVERRIDES = {
    # not key=value
    "steps": "steps: expected key.sub=value",
    # of an unknown name, out of bounds
    "steps='9999999999999999999999'": "steps: the number is too large: at most 2147483647",
    "task.name=chess": "task.name: there is no task chess: give arithmetic, gsm8k",
    # settings that contradict the machine or the data
    "log.wandb=project": "log.wandb needs the package wandb: pip install",
    "task.system_prompt='<|im_end|>'": "training prompts of task arithmetic: messages: <|im_end|> is a control token",
    "eval={test: true}": "eval.test: task arithmetic has no test set",
    "task={name: gsm8k, path: nowhere}": "task.path: nowhere/train.jsonl: no such file in {here}/nowhere: give a",
    # the model by its sizes
    "model.architecture={hidden_size: 1000000000, num_attention_heads: 4, vocab_size: 1000000000, "
    "intermediate_size: 4, num_hidden_layers: 1}": "model.architecture: ",
    # a run's folder that holds something else
    "run_dir=thesis/chapter1.tex/run": "run_dir: thesis/chapter1.tex/run can't be written (Not a directory)",
}
"""A setting that spoils a good configuration, and the message."""


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_impossible_setting_is_named(override, tmp_path, refused):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("It was a dark and stormy night.")
    assert OVERRIDES[override].format(here=tmp_path) in refused(train, *arguments(config(run_dir="run")), override)


@pytest.mark.parametrize("what", MODELS)
def test_a_bad_model_or_tokenizer_is_refused_by_its_file(what, model, refused):
    spoil, words = MODELS[what]
    spoil(model)
    assert words.format(model=model) in refused(train, *arguments(pretrained(model)))


def test_a_single_file_is_no_model_and_no_data(tmp_path, refused):
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / "model.bin"
    pickled(path.name)(path.parent)
    source = path.relative_to(tmp_path)  # which might be a hub id
    message = refused(train, *arguments(pretrained(source)))
    assert f"{source}: is not a folder (archives and single files are never opened)" in message
    assert f" ({path}:1, 2, " in refused(train, *finetuned(path))


def test_code_in_a_models_folder_is_not_run(model, monkeypatch):
    """The folder asks for its own code to be run, but is whole without."""
    monkeypatch.chdir(model.parent)
    OWN_CODE(model)
    settings = pretrained(model)
    load_policy(settings, make_mesh(settings.mesh)).initial_params()
    assert [*model.parent.iterdir()] == [model]


GOOD = b'{"question": "1+1=", "answer": "2"}\n'
FILES = {
    "nothing": ("train.jsonl", None, "{path}: no such file in {here}: give a file of JSON lines ("),
    "an empty file": ("train.jsonl", b"", "{path}: there is no example in it"),
    "too long": ("train.jsonl", GOOD.replace(b"1+1", b"a" * 99), "{path}: there is no example that can be learned"),
    "half of gzip": ("train.jsonl.gz", gzip.compress(GOOD * 9)[:30], "{path} can't be read (Compressed file"),
    "parquet that is none": ("train.parquet", GOOD, "{path} can't be read (Parquet"),
    "a long row": ("train.csv", b"text\n\na\na,b\n", "it has more values than the first line has names ({path}:4)"),
    "a pipe": ("data", os.mkfifo, "{path} is no regular file: give a file of JSON"),
    "a line of no UTF-8": ("train.jsonl", GOOD + GOOD.replace(b"1+1", b"\xff") + GOOD, "not JSON in UTF-8 ("),
    "a line of other fields": ("train.jsonl", GOOD + b'{"txt": "a"}\n', "none of messages, conversations, question"),
}
"""A data source's name, its bytes or how it is made, and the message."""


@pytest.mark.parametrize("what", FILES)
def test_bad_data_are_refused_and_not_waited_for(what, tmp_path, refused):
    name, make, text = FILES[what]
    path = tmp_path / name
    if callable(make):
        make(path)
    elif make is not None:
        path.write_bytes(make)
    assert "data.source: " + text.format(path=path, here=tmp_path) in refused(train, *finetuned(path))


TOOLS = (
    ("train", "--config run/config.yaml --target v6e:2x4", "--target: is for --plan"),
    ("train", "--config run/config.yaml --plan --target v9x:2x4", "--target: target 'v9x:2x4': there are v5e, v5p, "),
    (
        "train",
        "--config run/config.yaml --plan mesh.tp=16",
        "more than the number of devices, 8: lower one of them; or plan for ",
    ),
    ("tools.export", "nowhere", "nowhere: no config.yaml; give a run_dir"),
    ("tools.export", "run --adapter", "--adapter: run trained the whole model (no model.lora): leave it out"),
    ("tools.plot", "damaged", "damaged: no metrics.jsonl with a line in it; give a run_dir"),
    ("tools.plot", "run --out curves.exe", "--out: curves.exe can't be written ("),
    ("tools.samples", "damaged", "damaged: no samples.jsonl with a sample in it; give the run_dir of a GRPO run"),
    ("tools.generate", "run --prompts missing.jsonl", "--prompts: missing.jsonl: no such file in "),
    ("tools.memory", "--config tiny_distill", "--config: heads of two models are not compared"),
    ("tools.bench.head", "--shape 1,0,2", "argument --shape: '1,0,2' is not N,D,V: whole numbers above 0"),
)
"""The program, its command line, and the message."""


@pytest.mark.parametrize(("tool", "command", "text"), TOOLS, ids=[f"{tool} {line:.40}" for tool, line, _ in TOOLS])
def test_a_tool_refuses_bad_input_with_a_one_line_error(tool, command, text, tmp_path, refused):
    """`run` has no checkpoint, and the files of `damaged` are damaged."""
    files = {
        "run/config.yaml": dump(config(run_dir="run")),
        "run/metrics.jsonl": '{"step": 4, "loss": 2}\n',
        "damaged/metrics.jsonl": "[1]\n",
        "damaged/samples.jsonl": '{"step": 1}\n',
    }
    for folder in ("run/checkpoints", "damaged"):
        (tmp_path / folder).mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert text in refused(importlib.import_module(tool), *shlex.split(command))


def test_a_recipe_after_another_names_the_command_for_its_model(tmp_path, refused):
    message = refused(train, "--config=tiny_grpo.yaml", f"model.source={tmp_path}/tiny_sft", f"run_dir={tmp_path}/run")
    assert message.endswith("; train it: python train.py --config tiny_sft.yaml")


def test_a_configuration_without_weights_says_the_ways_out(tmp_path, refused):
    message = refused(train, "--config=qwen25_3b_grpo.yaml", "task={name: arithmetic}", f"run_dir={tmp_path}/run")
    assert message.startswith("error: model.source: Qwen/Qwen2.5-3B-Instruct: no such folder")
    for way in ("a local folder", "a hub id", "model.init=random"):
        assert way in message
