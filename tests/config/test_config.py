"""A configuration is read whole or refused in one line that names the setting; see also run/test_bad_input.py."""

import io
import re
import sys
from pathlib import Path

import pytest
import tiny
from runs import arguments

from mllm.algorithms.table import RUNS
from mllm.config import load as configs
from mllm.config import places
from mllm.config.habits import HABITS
from mllm.config.section import keys_of
from mllm.errors import UserError

SFT = """
algorithm: sft
run_dir: runs/x
steps: 4
batch_size: 8
model: {init: random, architecture: {model_type: qwen2}}
optimizer: {learning_rate: 1e-3}
data: {source: train.jsonl, max_length: 32}
"""

GRPO = """
algorithm: grpo
run_dir: runs/x
steps: 4
batch_size: 8
model: {source: somewhere}
optimizer: {learning_rate: 1e-3}
task: {name: arithmetic, heldout: 50}
rollout: {max_prompt_length: 8, max_completion_length: 8}
grpo: {num_generations: 4}
"""
TWO = "4, updates_per_generation: 2}"
CISPO = "4, loss_type: cispo, num_iterations: 2}"
ACTS = GRPO.replace("arithmetic,", "arithmetic, environment: 'my_env:Guess',")
TURNS = ACTS.replace("length: 8}", "length: 8, max_turns: 2}")
VALIDATED = SFT.replace("data: {", "data: {validation: {share: 0.1, every: 3}, ")
DPO = SFT.replace("sft", "dpo") + "dpo: {}\n"
DISTILL = GRPO.replace("algorithm: grpo", "algorithm: distill") + "distill: {}\nteacher: {source: teacher}\n"
DATA = SFT.replace("sft", "distill") + "distill: {}\nteacher: {source: teacher}\n"


ROOT = configs.CONFIGS.parent
SHIPPED = [*sorted(configs.CONFIGS.glob("*.yaml")), *sorted(ROOT.glob("docs/examples/*.yaml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_loads_unchanged_after_dump(path: Path, tmp_path):
    """Its first lines are the command that runs it."""
    command = path.read_text().splitlines()[0].split("(")[0].removeprefix("# python train.py --config ")
    name, *overrides = command.split()
    assert name == (path.name if path.parent == configs.CONFIGS else str(path.relative_to(ROOT)))
    configs.load(str(path), overrides)
    config, copy = configs.load(str(path)), tmp_path / "config.yaml"
    copy.write_text(configs.dump(config))
    assert configs.load(str(copy)) == config


def test_an_environment_pays_alone_unless_rewards_are_given_too(tmp_path):
    (tmp_path / "run.yaml").write_text(TURNS)
    config = configs.load(str(tmp_path / "run.yaml"))
    assert (config.task.rewards, config.batch_shape.length) == ((), 32)
    (tmp_path / "copy.yaml").write_text(configs.dump(config))
    assert configs.load(str(tmp_path / "copy.yaml")) == config
    both = configs.load(str(tmp_path / "run.yaml"), ["task.rewards=[{name: format}]", "grpo.dynamic_sampling=2"])
    assert [reward.name for reward in both.task.rewards] == ["format"]


def test_a_configuration_is_found_by_its_name_in_configs(tmp_path, monkeypatch):
    """A wrong name is answered with the nearest name."""
    assert configs.load("tiny_grpo") == configs.load("tiny_grpo.yaml")
    with pytest.raises(UserError, match=r"did you mean tiny_grpo\.yaml\?"):
        configs.load("tiny_grop.yaml")
    (tmp_path / "sft.yaml").write_text(SFT)
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "sft.yml", "sft", "./sft.json"):
        with pytest.raises(UserError, match=r"did you mean (/.*/)?sft\.yaml\?"):
            configs.load(name)


@pytest.mark.parametrize(
    ("base", "typed", "message"),
    [
        (GRPO, "optimizer.lr=1", "optimizer.lr: unknown setting; here: optimizer.learning_rate"),
        (GRPO, "grpo.num_generation=8", "grpo.num_generation: unknown setting; did you mean num_generations?"),
        (SFT, "optimizer={learning_rate: -1}", "optimizer.learning_rate: Input should be greater than 0 (got -1)"),
        (GRPO, "task.rewards=[{name: format, weight: true}]", "task.rewards.0.weight: expected a number (got True)"),
        (GRPO, "run_dir=''", "run_dir: String should have at least 1 character"),
        (SFT, "data.packing=no", "data.packing: Input should be a valid boolean (got 'no')"),  # a text in YAML 1.2
        (GRPO, "batch_size=6", "batch_size: 6 is not divisible by grpo.num_generations (4)"),
        (GRPO, "grpo.row_length=11", "grpo.row_length: 11 is less than rollout.max_prompt_length + max_"),
        (GRPO + "micro_batch_size: 2\n", "mesh={dp: 2, fsdp: 2}", "2 is not divisible by mesh.dp * mesh.fsdp (4)"),
        (GRPO, "grpo.beta=0.1", "grpo.beta: a KL penalty needs a reference"),
        (GRPO, "grpo.num_iterations=3", "steps: 4 is not divisible by grpo.updates_per_generation * num_it"),
        (GRPO.replace("4}", TWO), "checkpoint.every=3", "checkpoint.every: 3 is not divisible by grpo."),
        (GRPO.replace("4}", CISPO), "grpo.epsilon_high=0.28", "0.28 is the cap of cispo's ratio itself: give 1 or"),
        (GRPO + "eval: {every: 2}\n", "checkpoint={every: 4, keep_best: true}", "eval.every (2) is not a multiple"),
        (GRPO + "eval: {}\n", "task.heldout=0", "task.heldout: 0 leaves eval only eval.test: set that"),
        (GRPO, "model.source=null", "model.source: give a local folder or a hub id, or set model.init=random"),
        (GRPO, 'task.tools=["mine:tool"]', "task.tools: no turn follows a call: set rollout.max_turns to 2"),
        (TURNS, "rollout.max_total_length=15", "rollout.max_total_length: 15 is less than max_prompt_length +"),
        (SFT, "steps=null", "steps: this setting is required, or data.epochs"),
        (SFT, "data.mix=[{source: a.jsonl}, {source: b.jsonl}]", "data.source: train.jsonl is not used with mix: give"),
        (SFT, "data.validation={split: test}", "data.validation.split: is not used with source: train.jsonl: give"),
        (SFT, "checkpoint.keep_best=true", "checkpoint.keep_best: needs an eval section or data.validation"),
        (VALIDATED, "checkpoint.keep_best=true", "(3) is not a multiple of checkpoint.every (null): the evaluated"),
        (SFT.replace("batch_size: 8", ""), None, "batch_size: this setting is required"),
        (DISTILL, "head.impl=mosaic_gpu", "head.impl: mosaic_gpu has no divergences"),
        (DATA, "distill.estimator=sampled", "distill.estimator: unknown setting"),
        (DISTILL, "distill={estimator: sampled, kind: jsd}", "distill.kind: sampled estimates reverse_kl, not jsd"),
        (DISTILL, "grpo={beta: 0.1, reference: initial}", "grpo.beta: distillation has no reference policy"),
        (DISTILL, "grpo.dynamic_sampling=2", "grpo.dynamic_sampling: distillation compares no rewards: remove it"),
        (GRPO, "teacher={source: teacher}", "teacher: unknown setting of algorithm: grpo; it is for distill"),
        (SFT, "grpo.beta=0.1", "grpo: unknown setting of algorithm: sft; it is for grpo, distill"),
        (SFT, "beta=0.1", "beta: unknown setting of algorithm: sft; it is distill.beta of distill or grpo.beta of"),
        (GRPO, "model.lora.lora_alpha=8", "model.lora.lora_alpha: unknown setting; here: model.lora.alpha"),
        (GRPO, "task.tools=m:f", "task.tools: expected a list (got 'm:f')"),
        (SFT, "lerning_rate=0.1", "lerning_rate: unknown setting; did you mean optimizer.learning_rate?"),
        (SFT, "algorithm=ppo", "algorithm: expected one of sft, grpo, dpo, distill (got 'ppo')"),
        (SFT, "data={source: [a.jsonl, b.jsonl], max_length: 8, epochs: 2}", "data.epochs: a mix has no end"),
        (SFT, "data={source: task, max_length: 8}", "task: data.source: task needs this section"),
        (SFT, "eval={}", "task: eval needs this section"),
        (GRPO, "grpo.num_generations=1", "grpo.num_generations: 1 leaves"),
    ],
)
def test_an_error_names_file_typed_text_setting_and_way_out(tmp_path, base, typed, message):
    path = tmp_path / "run.yaml"
    path.write_text(base)
    with pytest.raises(UserError) as error:
        configs.load(str(path), [typed] if typed else [])
    assert str(error.value).startswith(f"{path} {typed}: " if typed else f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_habits_are_no_settings_and_their_answers_are():
    named = {name for answer in HABITS.values() for name in re.findall(r"\w+\.\w+(?:\.\w+)*", answer)}
    keys = {key for run in RUNS.values() for key in keys_of(run)}
    assert named - keys == set()
    assert HABITS.keys() & (keys | {key.rpartition(".")[2] for key in keys}) == set()


PLAIN = {"1e-3": 1e-3, "-.5": -0.5, "010": 10, "+7": 7, "true": True, "~": None, "": None}
TEXTS = "1:40", "no", "on", "2026-11-27"


@pytest.mark.parametrize(("text", "value"), [*PLAIN.items(), *zip(TEXTS, TEXTS, strict=True)])
def test_plain_values_follow_yaml_1_2_and_survive_a_dump(text, value):
    read = configs.parser().load(f"scale: {text}")["scale"]
    assert (read, type(read)) == (value, type(value))
    written = io.StringIO()
    configs.parser().dump({"x": read, "y": text}, written)
    assert configs.parser().load(written.getvalue()) == {"x": value, "y": text}


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "!!python/name:os.system", "[", "{{}: 1}", "[" * 600])
def test_yaml_without_a_mapping_of_plain_values_is_refused(tmp_path, text):
    (tmp_path / "run.yaml").write_text(f"x: {text}")
    with pytest.raises(UserError, match=r"run\.yaml: not readable as YAML"):
        configs.load(str(tmp_path / "run.yaml"))


def test_reward_arguments_and_overrides_are_read(tmp_path):
    name, *others = arguments(tiny.config(run_dir=str(tmp_path / "run")))[1:]
    args = "task.rewards=[{name: overlong, weight: 1, args: {cache: 010, scale: 1e-3, quiet: no}}]"
    loaded = configs.load(name, [*others, args, "seed=010"])
    assert loaded.seed == 10
    assert loaded.task.rewards[0].args == {"cache": 10, "scale": 1e-3, "quiet": "no"}
    for bad in ("steps=1:40", "steps=1.5"):
        with pytest.raises(UserError, match="steps"):
            configs.load(name, [*others, bad])
    prompt = "End with #### and the number."
    assert configs.load(name, [*others, f"task.system_prompt='{prompt}'"]).task.system_prompt == prompt
    for bad in (f"task.system_prompt={prompt}", "task.system_prompt=# Task"):
        with pytest.raises(UserError, match="# begins a comment: quote the value"):
            configs.load(name, [*others, bad])


RUN = GRPO.replace("source: somewhere", "source: model").replace("name: arithmetic", "name: jsonl, train: train.jsonl")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a configuration in its folder `ours`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "MODULES", [])
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "run.yaml").write_text(RUN)
    return tmp_path


@pytest.mark.parametrize(
    ("ours", "also", "typed", "meant"),
    [
        ("", "train.jsonl model/x", "", "/train.jsonl /model"),
        ("train.jsonl model/x", "train.jsonl model/x", "", "/ours/train.jsonl /ours/model"),
        # Paths on the command line are looked up in the current folder first.
        ("other.jsonl", "other.jsonl model/x", "task.train=other.jsonl", "/other.jsonl /model"),
        ("", "part-0.jsonl", "task.train=part-*.jsonl", "/part-*.jsonl model"),
        ("", "", "task.train=nowhere.jsonl", "nowhere.jsonl model"),
    ],
)
def test_files_are_found_beside_the_configuration_or_in_cwd(here, ours, also, typed, meant) -> None:
    """`ours` are files in the configuration's folder, `also` files in the current folder. A found path is absolute."""
    for path in (*(here / "ours" / name for name in ours.split()), *(here / name for name in also.split())):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    config = configs.load("ours/run.yaml", typed.split())
    assert f"{config.task.train} {config.model.source}".replace(str(here), "") == meant


def test_a_resolved_configuration_finds_files_from_its_run(here: Path) -> None:
    (here / "ours" / "train.jsonl").touch()
    config = configs.load("ours/run.yaml")
    copy = here / "runs" / "x" / "config.yaml"
    copy.parent.mkdir(parents=True)
    copy.write_text(configs.dump(config))
    assert configs.load(str(copy)) == configs.load("runs/x/config.yaml") == config


def test_hub_ids_splits_and_words_are_not_taken_for_folders(here: Path) -> None:
    for name in ("test", "us/sums", "bytes"):
        (here / "ours" / name).mkdir(parents=True)
    (here / "ours" / "train").touch()
    task = "task={name: hub, id: us/sums, train: train, test: test}"
    settings = [task, "eval.test=true", "model.tokenizer=bytes"]
    config = configs.load("ours/run.yaml", settings)
    assert (config.task.id, config.task.train, config.task.test) == ("us/sums", "train", "test")
    assert config.model.tokenizer == "bytes"


def test_a_missing_file_is_answered_with_a_similar_name(here: Path) -> None:
    """A file with the same ending is no similar name; neither is a file where a folder is missing."""
    for name in ("ant.jsonl", "training.jsonl"):
        (here / name).touch()
    assert "(did you mean training.jsonl?)" in places.missing("trainings.jsonl")
    assert "did you mean" not in places.missing("missing.jsonl")
    assert "did you mean" not in places.missing("training.yaml", "folder")


def test_user_modules_are_found_in_both_folders_last(here: Path) -> None:
    """Last: behind the modules that Python knows, and only while users' code runs."""
    before = [*sys.path]
    configs.load("ours/run.yaml")
    assert sys.path == before
    with places.importable():
        assert sys.path == [*before, str(here / "ours"), str(here)]
    assert sys.path == before
