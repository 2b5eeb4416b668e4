"""A resume finds out about lost checkpoints, changed settings, and changes outside of the run.

`--change` goes on with other settings where that is sound, records it, and stays exact when the run is killed.
"""

import json
import shutil
from dataclasses import replace

import pytest
from runs import ROOT, assert_same_end, changed, edit, killed_after, records, run, write_lines
from tiny import SUMS, TEACHER, config

from mllm.config.load import read
from mllm.config.places import PLACES
from mllm.errors import UserError
from mllm.model import peft, weights
from mllm.model.load import load_policy
from mllm.model.tokenizer import load_tokenizer
from mllm.parallel.mesh import make_mesh
from mllm.run import folder
from mllm.run.build import Run
from mllm.run.store import RunStore
from tools import export

PROBLEMS = [{**one, "question": one["prompt"], "answer": f"#### {one['completion']}"} for one in SUMS]


@pytest.fixture
def place(tmp_path):
    """A folder with a model, to be changed."""
    shutil.copytree(TEACHER["source"], tmp_path / "model")
    edit(tmp_path / "model/config.json", max_position_embeddings=512)
    return tmp_path


def beginning(place, algorithm="sft", **sections):
    """The settings of a run of the model in a folder."""
    model = {"init": "pretrained", "architecture": None, "source": str(place / "model")}
    plain = {"run_dir": str(place / "run"), "model": model, "eval": None, "checkpoint": {"every": 1, "keep": 9}}
    return config(algorithm, **{**plain, **({} if algorithm == "grpo" else {"rollout": None}), **sections})


def edit_template(model):
    path = model / "chat_template.jinja"
    path.write_text("Hello. " + path.read_text())


def end_by_plus(model):
    edit(model / "generation_config.json", eos_token_id=[43])


def other_lines(path):
    path.write_text(path.read_text().replace('1"', '7"'))


def other_weights(path):
    shutil.copy(ROOT / "tests/fixtures/tiny_sft/model.safetensors", path)


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
OTHER_EXAMPLES, OTHER_PROBLEMS = "the run began with other examples", "task: the list of problems is not what"
EDITS = {
    "distill": (
        ("model.source", lambda at: edit(at / "model/config.json", **ROPE), "the architecture is not what"),
        ("model.source", lambda at: end_by_plus(at / "model"), "model.source: what ends a completion is not what"),
        ("model.tokenizer", lambda at: edit_template(at / "tokenizer"), "the chat template is not what"),
        ("task.train", lambda at: other_lines(at / "task/train.jsonl"), OTHER_PROBLEMS),
        ("task.test", lambda at: other_lines(at / "task/test.jsonl"), OTHER_PROBLEMS),
        ("data.source", lambda at: other_lines(at / "train.jsonl"), OTHER_EXAMPLES),
        ("data.validation.source", lambda at: other_lines(at / "validation.jsonl"), OTHER_EXAMPLES),
        ("teacher.source", lambda at: other_weights(at / "teacher"), "other frozen parameters"),
    ),
    "sft": (
        ("data.mix.source", lambda at: other_lines(at / "validation.jsonl"), OTHER_EXAMPLES),
        ("task.path", lambda at: other_lines(at / "task/train.jsonl"), OTHER_PROBLEMS),
    ),
}
"""For each of two runs: the setting that names a place, the change there, and words of the message."""


def settings_of(algorithm, at, run_dir):
    """A run with every file in the folder `at`: distillation by files of its own, or SFT on a mix with GSM8K's task."""
    train, other = (str(at / f"{name}.jsonl") for name in ("train", "validation"))
    task = {name: str(at / f"task/{name}.jsonl") for name in ("train", "test")} | {"name": "jsonl", "heldout": 2}
    parts = {"rollout": {"max_prompt_length": 300, "max_completion_length": 4}, "eval": {"test": True}}
    data = {"max_length": 64, "cache": str(at.parent / "cache"), "source": train, "validation": {"source": other}}
    if algorithm == "distill":
        parts |= {"distill": {}, "teacher": {"source": str(at / "teacher"), "dtype": "float32"}}
    else:
        task = {"name": "gsm8k", "path": str(at / "task"), "heldout": 2}
        data |= {"source": [train, other], "validation": None}
    model = {
        "init": "pretrained",
        "architecture": None,
        "source": str(at / "model"),
        "tokenizer": str(at / "tokenizer"),
    }
    return beginning(at, algorithm, data=data, task=task, model=model, run_dir=str(run_dir), **parts)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EDITS)
def test_paths_may_move_but_their_contents_may_not_change(algorithm, place):
    """All settings of `PLACES` move at once, then one after the other changes."""
    assert {name for edits in EDITS.values() for name, *_ in edits} == PLACES - {"model.lora.source"}  # kept in the run
    here = place / "here"
    for name in ("model", "tokenizer", "teacher"):
        shutil.copytree(place / "model", here / name)
    for name, lines in {"train": PROBLEMS[:30], "test": PROBLEMS[30:]}.items():
        write_lines(here / f"task/{name}.jsonl", lines)
        write_lines(here / f"{name.replace('test', 'validation')}.jsonl", SUMS)
    with Run.build(settings_of(algorithm, here, place / "run")) as built:
        saved = {"frozen": built.checkpoints.frozen, "known": built.checkpoints.known}
        position = built.source.position()

    def resume(at):
        with Run.build(settings_of(algorithm, at, place / "run")) as resumed:
            resumed.checkpoints.check_dependencies(saved)
            resumed.source.seek(position)

    resume(shutil.copytree(here, place / "moved"))
    for number, (_, spoil, message) in enumerate(EDITS[algorithm]):
        spoil(changed_place := shutil.copytree(here, place / f"changed_{number}"))
        with pytest.raises(UserError, match=message):
            resume(changed_place)


@pytest.mark.slow
def test_a_resume_depends_on_adapters_templates_and_data_form(place, monkeypatch, capsys):
    """The places of the sources don't matter."""
    monkeypatch.chdir(place)
    chat = (place / "model/chat_template.jinja").read_text()
    (place / "model/additional_chat_templates").mkdir()
    (place / "model/additional_chat_templates/tool_use.jinja").write_text(f"tools{chat}")
    settings = beginning(place, steps=1, task=None, data={"source": write_lines(place / "data/texts.jsonl", SUMS)})
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
    assert json.loads((place / "run/export/config.json").read_text())[weights.LEARNED] == "texts"
    assert [*load_tokenizer(str(place / "run/export")).chat_template] == ["default", "tool_use"]


def test_a_branch_is_the_commit_that_the_run_began_with():
    settings = config(model={"init": "pretrained", "architecture": None, "source": "a/b", "revision": "main"})
    pinned = changed(settings, model={"revision": "0" * 40})
    assert folder.check_changes("run", settings, False, pinned.model_dump(mode="json"), 0, []) == pinned


def test_template_arguments_may_begin_with_change_and_weights_of_a_mix_may_not(tmp_path):
    before = config("grpo", task={"template_args": None})
    after = changed(before, task={"template_args": {"enable_thinking": False}})
    changes = folder.check_changes("run", after, True, before.model_dump(mode="json"), 3, []).changes
    assert [(change.key, change.new) for change in changes] == [("task.template_args", {"enable_thinking": False})]
    equal, other = (
        beginning(tmp_path, data={"source": [{"source": "a.jsonl"}, {"source": "b.jsonl", "weight": weight}]})
        for weight in (1, 2)
    )
    with pytest.raises(
        UserError, match=r"^data\.mix\.weight: run belongs to a run with 1\.0, not 2\.0; it can't change"
    ):
        folder.check_changes("run", other, True, equal.model_dump(mode="json"), 3, [])


@pytest.mark.slow
def test_a_model_written_down_otherwise_is_the_same(place, caplog):
    """The same holds after the model's folder was deleted."""
    settings = beginning(place, steps=1)
    assert run(settings) == 0
    edit(place / "model/tokenizer_config.json", local_files_only=True, is_local=True)  # a hub's answer about itself
    edit(place / "model/config.json", transformers_version="9.0", new_setting=1)
    template = place / "model/chat_template.jinja"
    template.write_text("{# edited #}" + template.read_text())
    assert run(changed(settings, steps=2)) == 0
    shutil.rmtree(place / "model")
    shutil.rmtree(place / "run/checkpoints/metadata", ignore_errors=True)
    assert run(changed(settings, steps=3)) == 0
    assert "going on with the model's files in" in caplog.text
    assert [line["step"] for line in records(settings)] == [1, 2, 3]


def test_a_new_run_may_begin_beside_other_files(tmp_path):
    for name in ("train.log", "slurm-1.out", "lost+found", ".DS_Store", "lock"):
        (tmp_path / name).touch()
    with folder.open_run(config(run_dir=str(tmp_path))):
        pass


@pytest.mark.parametrize("name", ["checkpoints/3", "model.safetensors"])
def test_a_new_run_refuses_a_folder_of_checkpoints_or_weights(tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    with (
        pytest.raises(UserError, match=r"holds checkpoints or weights and no config\.yaml; give another folder"),
        folder.open_run(config(run_dir=str(tmp_path))),
    ):
        pass


@pytest.fixture
def settings(tmp_path):
    """The configuration of a run in `tmp_path`. Its newest whole checkpoint is step 4; the document of 6 is cut."""
    settings = config(run_dir=str(tmp_path), steps=6, optimizer={"schedule": "linear", "warmup_steps": 2})
    folder.write(RunStore(tmp_path), settings)
    for step, length in ((3, None), (4, None), (6, 99)):
        document = {"step": step, "arrays": {}, "config": settings.model_dump(mode="json")}
        path = tmp_path / f"checkpoints/{step}/document/metadata"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(document)[:length])
    return settings


def check(place, settings, change=False):
    """The configuration for the next steps of the run in a folder."""
    with folder.open_run(changed(settings, run_dir=str(place)), change) as (_, resumed):
        return resumed


def test_how_a_run_is_carried_out_may_change(tmp_path, settings):
    how = {"mesh": {"dp": 2}, "micro_batch_size": 2, "model": {"remat": "full"}, "head": {"impl": "full_logits"}}
    how |= {"checkpoint": {"every": 2, "keep": 5}, "log": {"samples": 1}, "optimizer": {"max_skipped": 1}}
    assert check(tmp_path, changed(settings, **how)).changes == ()


def test_settings_of_a_step_may_change_with_the_change_flag(tmp_path, settings):
    how = {
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "final_fraction": 0.1, "max_grad_norm": 0.5},
        "grpo": {"beta": 0.1, "reference": "initial", "scale_rewards": "none", "baseline": "token"},
        "task": {"rewards": [{"name": "exact_match", "weight": 0.5}]},
    }
    other = changed(settings, steps=5, **how)
    with pytest.raises(UserError, match=r"belongs to a run with .*; --change goes on with the new values; else give"):
        check(tmp_path, other)
    resumed = check(tmp_path, other, change=True)
    keys = {f"{section}.{name}" for section, values in how.items() for name in values}
    assert {change.key for change in resumed.changes} == {"steps", *keys}
    assert {change.step for change in resumed.changes} == {4}
    folder.write(RunStore(tmp_path), resumed)
    assert check(tmp_path, other) == resumed
    assert check(tmp_path, settings, change=True).changes == ()  # taken back before any step


def test_a_start_that_failed_before_its_first_step_leaves_no_settings(tmp_path, settings):
    folder.write(failed := RunStore(tmp_path / "failed"), settings)
    other = changed(settings, batch_size=16)
    assert check(failed.folder, other).batch_size == 16
    failed.write("metrics.jsonl", b'{"step": 0}\n')
    with pytest.raises(UserError, match=r"^batch_size: .* belongs to a run"):
        check(failed.folder, other)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ({"batch_size": 16}, "batch_size"),
        ({"model": {"param_dtype": "bfloat16"}}, "model.param_dtype"),
        ({"task": {"heldout": 8}}, "task.heldout"),
        ({"optimizer": {"max_grad_norm": None}}, "optimizer.max_grad_norm"),
        ({"eval": {"every": 2}}, "eval"),
    ],
)
def test_settings_that_the_state_depends_on_may_not_change(tmp_path, settings, what, name):
    with pytest.raises(UserError, match=f"^{name}: .*; it can't change, since the state or the position in"):
        check(tmp_path, changed(settings, **what), change=True)


def test_a_change_that_has_no_effect_is_refused(tmp_path, settings):
    for place, steps, message in (("", 4, "steps: .* has done 4 already"), ("nowhere", 6, "--change: .* holds no run")):
        with pytest.raises(UserError, match=f"^{message}"):
            check(tmp_path / place, changed(settings, steps=steps), change=True)


@pytest.mark.slow
def test_a_change_is_recorded_and_survives_a_kill(finished, tmp_path, capsys):
    """The kill comes before the next checkpoint."""
    first = killed_after(finished("sft"), 4, tmp_path / "straight")
    straight = changed(first, steps=6, optimizer={"learning_rate": 1e-3, "schedule": "cosine"})
    capsys.readouterr()
    assert run(straight, "--change") == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "->" in line] == [
        "after step 4: steps 8 -> 6",
        "after step 4: optimizer.learning_rate 0.01 -> 0.001",
        'after step 4: optimizer.schedule "constant" -> "cosine"',
    ]
    killed = killed_after(straight, 4, tmp_path / "killed")
    assert run(killed) == 0
    assert_same_end(straight, killed)
    lines = records(killed)
    assert [line["step"] for line in lines if "changed" in line] == [5]
    expected = {"steps": 6, "optimizer.learning_rate": 1e-3, "optimizer.schedule": "cosine"}
    assert lines[5]["changed"] == expected
    assert lines[5]["learning_rate"] < 1e-3 < lines[4]["learning_rate"]
    resolved = read(tmp_path / "killed" / "config.yaml")
    assert resolved["changes"][0] == {"step": 4, "key": "steps", "old": 8, "new": 6}
    assert {change["key"]: change["new"] for change in resolved["changes"]} == expected
