"""What a resume finds out: that its checkpoints are gone, and that what lies outside of the run is not what it was."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from runs import ROOT, arguments, changed, checksums, run
from tiny import TEACHER, config

import train
from mllm.config.load import load, read
from mllm.errors import UserError
from mllm.model import peft, weights
from mllm.model.load import load_policy
from mllm.model.tokenizer import load_tokenizer
from mllm.parallel.mesh import make_mesh
from mllm.run import folder
from mllm.run.build import Run
from mllm.store import run_store
from tools import export, plot, samples

SUMS = [(f"{i % 9}+{i % 5}=", str(i % 9 + i % 5)) for i in range(40)]
LINES = [{"prompt": q, "question": q, "completion": a, "answer": f"#### {a}"} for q, a in SUMS]


def write_lines(path, lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder with a model."""
    settings, place = config(), tmp_path_factory.mktemp("shared")
    policy = load_policy(settings, make_mesh(settings.mesh))
    save = policy.tokenizer.save_pretrained
    weights.save(place / "model", policy.architecture, policy.initial_params(), stop_ids=policy.stop_ids, also=save)
    return place


@pytest.fixture
def place(shared, tmp_path):
    """A copy of the folder, to be changed."""
    shutil.copytree(shared, tmp_path, dirs_exist_ok=True)
    return tmp_path


def beginning(place, algorithm="sft", **sections):
    """The settings of a run of the model in a folder."""
    model = {"init": "pretrained", "architecture": None, "source": str(place / "model")}
    plain = {"run_dir": str(place / "run"), "model": model, "eval": None, "checkpoint": {"every": 1, "keep": 9}}
    return config(algorithm, **{**plain, **({} if algorithm == "grpo" else {"rollout": None}), **sections})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("checkpoints", "what was there when the run began is missing: put the checkpoints there, or begin"),
        ("checkpoints/*[0-9]", "is empty, but metrics.jsonl has 11 lines, and checkpoints were due from step 2 on:"),
    ],
)
def test_a_run_whose_checkpoints_are_gone_stops_and_touches_no_log(finished, tmp_path, capsys, lost, message):
    done = finished("grpo")
    shutil.copytree(done.run_dir, copy := tmp_path / "run")
    for path in copy.glob(lost):
        shutil.rmtree(path)
    before = checksums(copy)
    assert run(changed(done, run_dir=str(copy), steps=12)) == 2
    assert f"error: {copy}/checkpoints: {message}" in capsys.readouterr().err
    now = checksums(copy)
    assert {name: now[name] for name in before if name.endswith("l")} == {n: before[n] for n in before if n[-1] == "l"}
    assert not {*now} - {*before}


def read_json(path):
    return json.loads(path.read_text())


def edit(path, **values):
    path.write_text(json.dumps(read_json(path) | values))


def edit_template(model):
    path = model / "chat_template.jinja"
    path.write_text("{# edited #}" + path.read_text())


def end_by_plus(model):
    edit(model / "generation_config.json", eos_token_id=[43])


def other_lines(path):
    path.write_text(path.read_text().replace('1"', '7"'))


def other_weights(path):
    shutil.copy(ROOT / "tests/fixtures/tiny_sft/model.safetensors", path)


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
OTHER_EXAMPLES = "the run began with other examples"
EDITS = (
    ("model.source", lambda at: edit(at / "model/config.json", **ROPE), "model.source: the architecture is not what"),
    ("model.source", lambda at: end_by_plus(at / "model"), "model.source: what ends a completion is not what"),
    ("model.tokenizer", lambda at: edit_template(at / "tokenizer"), "or its chat template, is not what"),
    ("task.train", lambda at: other_lines(at / "task/train.jsonl"), "task: the list of problems is not what"),
    ("task.test", lambda at: other_lines(at / "task/test.jsonl"), "task: the list of problems is not what"),
    ("data.source", lambda at: other_lines(at / "train.jsonl"), OTHER_EXAMPLES),
    ("data.validation.source", lambda at: other_lines(at / "validation.jsonl"), OTHER_EXAMPLES),
    ("task.path", lambda at: other_lines(at / "task/train.jsonl"), "task: the list of problems is not what"),
    ("teacher.source", lambda at: other_weights(at / "teacher"), "other frozen parameters"),
)
"""The setting that names a place, what changes there, and words of the message."""
KINDS = {"task.path": "gsm8k", "teacher.source": "distill"}
"""The kind of run that names a place; else "files"."""


def settings_of(kind, at, run_dir):
    """A run of this kind, whose files are all in the folder `at`."""
    data = {"source": str(at / "train.jsonl"), "max_length": 64, "cache": str(at.parent / "cache")}
    model = {"init": "pretrained", "architecture": None, "source": str(at / "model")}
    if kind == "distill":
        teacher = {"source": str(at / "teacher"), "dtype": "float32"}
        parts = {"task": None, "distill": {}, "teacher": teacher, "model": model | {"source": TEACHER["source"]}}
        return beginning(at, "distill", data=data, run_dir=str(run_dir), **parts)
    task = {"name": "gsm8k", "path": str(at / "task"), "heldout": 2}
    if kind == "files":
        task = {"name": "jsonl", "heldout": 2, **{name: str(at / f"task/{name}.jsonl") for name in ("train", "test")}}
        data |= {"validation": {"source": str(at / "validation.jsonl")}}
    measured = {"rollout": {"max_prompt_length": 300, "max_completion_length": 4}, "eval": {"test": True}}
    model |= {"tokenizer": str(at / "tokenizer")}
    return beginning(at, data=data, task=task, run_dir=str(run_dir), model=model, **measured)


@pytest.mark.slow
def test_places_may_move_and_what_is_there_may_not_change(place):
    """For each setting of `folder.PLACES`, one after the other; all move at once."""
    assert {name for name, *_ in EDITS} == {*folder.PLACES}
    here = place / "here"
    here.mkdir()
    for name in ("model", "tokenizer"):
        shutil.copytree(place / "model", here / name)
    for name, lines in {"train": LINES[:30], "test": LINES[30:]}.items():
        write_lines(here / f"task/{name}.jsonl", lines)
    for name in ("train", "validation"):
        write_lines(here / f"{name}.jsonl", [{k: line[k] for k in ("prompt", "completion")} for line in LINES])
    shutil.copytree(TEACHER["source"], here / "teacher")
    for kind in ("files", "gsm8k", "distill"):
        with Run.build(settings_of(kind, here, place / kind)) as begun:
            saved = {"frozen": begun.checkpoints.frozen, "digests": begun.digests()}
            position = begun.source.position()

        def resume(at, kind=kind, saved=saved, position=position):
            with Run.build(settings_of(kind, at, place / kind)) as resumed:
                resumed.checkpoints.check_dependencies(saved)
                resumed.source.seek(position)

        shutil.copytree(here, place / "moved", dirs_exist_ok=True)
        resume(place / "moved")
        for name, spoil, message in EDITS:
            if KINDS.get(name, "files") == kind:
                shutil.copytree(here, place / "changed")
                spoil(place / "changed")
                with pytest.raises(UserError, match=message):
                    resume(place / "changed")
                shutil.rmtree(place / "changed")


def test_what_generation_config_json_says_ends_the_completions_of_a_run_and_stands_in_its_folder(place):
    end_by_plus(place / "model")
    with Run.build(beginning(place, "grpo")) as begun:
        assert 43 in begun.sampler.stop_ids
    assert 43 in read_json(place / "run/generation_config.json")["eos_token_id"]


@pytest.mark.slow
def test_a_relative_source_is_found_from_another_folder(place, monkeypatch):
    monkeypatch.chdir(place)
    options = ["model.source=model", f"run_dir={place}/relative"]
    assert train.main([*arguments(beginning(place, steps=1)), *options]) == 0
    assert read(place / "relative/config.yaml")["model"]["source"] == str(place / "model")
    monkeypatch.chdir("/")
    assert export.main([f"{place}/relative"]) == 0


@pytest.mark.slow
def test_a_run_has_its_adapters_kind_and_its_templates_and_the_form_of_its_data_without_their_sources(
    place, monkeypatch, capsys
):
    monkeypatch.chdir(place)
    chat = (place / "model/chat_template.jinja").read_text()
    (place / "model/additional_chat_templates").mkdir()
    (place / "model/additional_chat_templates/tool_use.jinja").write_text(f"tools{chat}")
    settings = beginning(place, steps=1, task=None, data={"source": write_lines(place / "data/texts.jsonl", LINES)})
    settings = changed(settings, model={"lora": {"rank": 2, "alpha": 4}})
    settings = changed(settings, data={"columns": {"prompt": "prompt", "completion": "completion"}})
    policy = load_policy(settings, make_mesh(settings.mesh))
    adapters = policy.split(policy.initial_params())[0]
    lora = {"source": "adapter"}  # beside the configuration
    for alpha, code in ((4.0, 0), (4.0, 0), (8.0, 2)):
        peft.save(place / "adapter", policy.architecture, replace(policy.lora, alpha=alpha), adapters, None)
        assert run(changed(settings, model={"lora": lora})) == code
    assert "model.lora.alpha: the adapters of" in capsys.readouterr().err
    monkeypatch.chdir("/")
    shutil.rmtree(place / "adapter")
    assert export.main([str(place / "run")]) == 0
    assert read_json(place / "run/export/config.json")[weights.LEARNED] == "texts"
    assert [*load_tokenizer(str(place / "run/export")).chat_template] == ["default", "tool_use"]


def test_a_branch_is_the_commit_that_the_run_began_with():
    settings = config(model={"init": "pretrained", "architecture": None, "source": "a/b", "revision": "main"})
    begun = changed(settings, model={"revision": "0" * 40})
    assert folder.check_changes("run", settings, False, begun.model_dump(mode="json"), 0) == begun


# A stranger's files

NO_FILES = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "huge": lambda path: (path.touch(), os.truncate(path, run_store.LARGEST_FILE + 1)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("tool", "name", "kind"),
    [(plot, "metrics.jsonl", "pipe"), (samples, "samples.jsonl", "device"), (plot, "timings.jsonl", "huge")],
)
def test_what_is_no_file_of_a_bounded_size_is_refused_and_not_waited_for(tmp_path, capsys, tool, name, kind):
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    path = tmp_path / name
    path.unlink(missing_ok=True)
    NO_FILES[kind](path)
    assert tool.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {path}: is no regular file of up to 2 GiB: remove it\n"


def test_a_configuration_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"config.yaml: is no file"):
        folder.claim(load("tiny_sft.yaml", [f"run_dir={tmp_path}"])).__enter__()


def test_the_documentation_names_every_setting_that_may_change():
    text = (ROOT / "docs/training.md").read_text().split("| may change | |")[1].split("\n\n")[0]
    named = set()
    for section, names in re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE):
        prefix = f"{section.strip('`')}." if section.startswith("`") else ""
        named |= {prefix + name for name in re.findall(r"`([\w.]+)`", names)}
    assert named == (folder.CHANGEABLE | folder.FREE) - {"changes"}  # which is the record of them
