"""A configuration is read whole or refused in one line that names the setting, without waiting for JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

from mllm.config import load as configs
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


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


RUNS = sorted(path for path in configs.CONFIGS.glob("*.yaml") if not path.stem.startswith("gradcheck"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_shipped_configuration_begins_with_its_command_and_loads_unchanged_after_dump(path: Path, tmp_path):
    command = path.read_text().splitlines()[0].split("(")[0].removeprefix("# python train.py --config ")
    name, *overrides = command.split()
    assert name == path.name
    configs.load(name, overrides)
    config, copy = configs.load(path.name), tmp_path / "config.yaml"
    copy.write_text(configs.dump(config))
    assert configs.load(str(copy)) == config


def test_a_configuration_is_found_by_the_name_of_a_file_in_configs_or_answered_with_the_nearest_name():
    assert configs.load("tiny_grpo") == configs.load("tiny_grpo.yaml")
    with pytest.raises(UserError, match=r"did you mean tiny_grpo\.yaml\?"):
        configs.load("tiny_grop.yaml")


def test_an_override_replaces_a_setting_or_creates_its_section_and_a_date_is_a_text(write):
    overrides = ["optimizer.learning_rate=1e-5", "mesh.dp=2", "checkpoint={every: 2}", "run_dir=2024-12-24"]
    config = configs.load(write(SFT), overrides)
    assert (config.optimizer.learning_rate, config.mesh.dp, config.checkpoint.every) == (1e-5, 2, 2)
    assert config.run_dir == "2024-12-24"


@pytest.mark.parametrize(
    ("base", "override", "message"),
    [
        (GRPO, "rollout.temprature=2", "rollout.temprature: unknown setting; did you mean temperature?"),
        (GRPO, "task.rewards=[{nam: exact_match}]", "task.rewards.0.nam: unknown setting; did you mean name?"),
        (GRPO, "optimiser.learning_rate=1", "optimiser: unknown setting; did you mean optimizer?"),
        (GRPO, "batch_size=6", "batch_size: 6 is not divisible by grpo.num_generations (4)"),
        (GRPO, "micro_batch_size=3", "batch_size: 8 is not divisible by micro_batch_size (3)"),
        (
            GRPO,
            "mesh.dp=3",
            "batch_size: 8 is not divisible by mesh.dp * mesh.fsdp (3); the nearest that works is 12",
        ),
        (
            GRPO + "micro_batch_size: 2\n",
            "mesh={dp: 2, fsdp: 2}",
            "micro_batch_size: 2 is not divisible by mesh.dp * mesh.fsdp (4); the nearest that works is 4",
        ),
        (GRPO, "grpo.beta=0.1", "grpo.beta: a KL penalty needs a reference"),
        (GRPO, "grpo.reference=initial", "grpo.reference: is not used with beta: 0"),
        (GRPO, "grpo.num_iterations=3", "steps: 4 is not divisible by grpo.num_iterations (3)"),
        (GRPO, "data={source: x.jsonl, max_length: 8}", "data: is not used by algorithm: grpo"),
        (GRPO, "rollout=null", "rollout: algorithm: grpo needs this section"),
        (GRPO, "rollout=3", "rollout: expected a section of settings"),
        (GRPO, "rollout.temperature=0", "rollout.temperature: Input should be greater than 0"),
        (
            GRPO,
            "rollout.top_p=.nan",
            "rollout.top_p=.nan: the value is not readable as YAML: line 1: .nan is no number",
        ),
        (
            GRPO.replace("num_generations: 4", "num_generations: 4, loss_type: gspo"),
            "head.workspace_mib=4",
            "head.workspace_mib: is not used with grpo.loss_type: gspo",
        ),
        (
            GRPO + "eval: {every: 2}\n",
            "checkpoint={every: 4, keep_best: true}",
            "checkpoint.keep_best: eval.every (2) is not a multiple",
        ),
        (GRPO, "task.path=data", "task.path: is not used by task arithmetic"),
        (GRPO, "task.name=chess", "task.name: "),
        (GRPO, "task.rewards=[{name: format}, {name: format}]", "task.rewards: each name may stand once"),
        (GRPO, "eval.prompts=51", "eval.prompts: only 50 problems are held out"),
        (GRPO, "checkpoint.keep_best=true", "checkpoint.keep_best: needs an eval section"),
        (GRPO, "model.source=null", "model.source: give a local folder or a hub id, or set model.init=random"),
        (GRPO, "model.architecture={hidden_size: 8}", "model.architecture: is not used with init: pretrained"),
        (GRPO, "head={impl: full_logits, workspace_mib: 4}", "head.workspace_mib: is not used with impl: full_logits"),
        (SFT, "grpo.num_generations=2", "grpo: is not used by algorithm: sft"),
        (SFT, "rollout={max_prompt_length: 8, max_completion_length: 8}", "rollout: is not used without an eval"),
        (SFT, "task.name=gsm8k", "task: is not used without an eval section"),
        (SFT, "data.source=task", "task: data.source: task needs this section"),
        (SFT, "data.subset=main", "data.subset: is not used with source: train.jsonl"),
        (SFT, "eval.every=2", "task: eval needs this section"),
        (SFT, "optimizer.final_fraction=0.5", "optimizer.final_fraction: is not used with schedule: constant"),
        (SFT, "optimizer.warmup_steps=5", "optimizer.warmup_steps: longer than the run (4 steps)"),
        (SFT, "optimizer={name: lion, learning_rate: 1.0, eps: 1.0e-3}", "optimizer.eps: is not used by lion"),
        (SFT, "steps=many", "steps: Input should be a valid integer"),
        (SFT, "steps=0", "steps: Input should be greater than 0"),
        (SFT, "model.source=a", "model.architecture: init: random takes either a source or an architecture"),
        (SFT, "steps.x=1", "steps.x=1: steps is a value, not a section"),
        (SFT, "steps", "steps: expected key.sub=value"),
        (SFT, "steps=[", "steps=[: the value is not readable as YAML"),
        (SFT, "model={[a]: b}", "model={[a]: b}: the value is not readable as YAML"),
        (SFT, "log.samples=3", "log: is not used by algorithm: sft"),
        (
            SFT,
            "data={source: task, max_length: 8, on_bad_line: skip}",
            "data.on_bad_line: is not used with source: task",
        ),
    ],
)
def test_an_impossible_setting_is_refused_in_one_line_that_names_it(write, base, override, message):
    with pytest.raises(UserError) as error:
        configs.load(write(base), [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not readable as YAML"),
        ("- 1\n- 2\n", "expected a mapping"),
        ("", "expected a mapping"),
        (SFT + "steps: 5\n", "steps stands twice"),
        ("\x00", "not readable as YAML"),
    ],
)
def test_a_file_that_is_no_mapping_of_settings_is_refused_with_its_path(write, text, message):
    path = write(text)
    with pytest.raises(UserError, match=r"run\.yaml: .*") as error:
        configs.load(path)
    assert message in str(error.value)


def test_reading_a_configuration_imports_nothing_heavy():
    code = "import sys, mllm.config.load, mllm.errors; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=configs.CONFIGS.parent, capture_output=True, check=True)
    heavy = {"jax", "numpy", "scipy", "transformers", "flax", "orbax", "kernels"}
    assert heavy.isdisjoint(done.stdout.decode().split())
