"""The plan of a run's memory, the settings that fit, and the line where nothing fits."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import jax
import pytest
import tiny
from runs import arguments, changed

import train
from mllm.config.model import MeshConfig
from mllm.model.layout import LOGICAL_AXES, parameter_name
from mllm.parallel.mesh import bytes_on_device, make_mesh
from mllm.plan import memory, targets
from mllm.plan.memory import subject
from mllm.plan.programs import Programs, RolloutPrograms
from mllm.plan.targets import Account
from mllm.training.decode_limits import fitting_limits

MIB = 2**20


@pytest.fixture(scope="module")
def config():
    """The model is Qwen3, which has norms of heads that every device holds whole."""
    return tiny.config(
        model={"architecture": {**tiny.ARCHITECTURE, "model_type": "qwen3", "head_dim": 8}},
        mesh={"fsdp": 2},
        micro_batch_size=4,
        grpo={"num_generations": 4, "beta": 0.1, "reference": "initial"},
    )


@pytest.fixture(scope="module")
def shapes(config):
    return Programs(config, make_mesh(config.mesh))


# The phases of a run


def phases(shapes):
    """The phases of a run by name."""
    devices = targets.Devices("some", shapes.model.layout.mesh, 8, 2**30)
    rollouts = RolloutPrograms(shapes, shapes.config.rollout)
    return {phase.name: phase for phase in memory.phases(shapes, rollouts, devices, [].append)}


@pytest.fixture
def planned(monkeypatch):
    """As `phases`, of programs that take a MiB each and are not compiled."""
    monkeypatch.setattr(memory, "account_of", lambda *_: Account(0, MIB))
    return phases


@pytest.mark.nightly
def test_a_grpo_run_has_four_phases_and_planning_makes_no_array(shapes):
    before = {id(array) for array in jax.live_arrays()}
    account = phases(shapes)
    assert [x for x in jax.live_arrays() if id(x) not in before and x.size > 1] == []
    assert list(account) == ["prefill", "decode", "log-prob", "update"]
    assert min(account["update"].parts[name] for name in ("head", "activations")) > 0


def test_the_plan_counts_the_states_of_each_device(planned, shapes):
    """The states are parameters, moments and gradients."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes.policy.params)
    sharded = sum(leaf.size for path, leaf in leaves if "embed" in LOGICAL_AXES[parameter_name(path)])
    unsharded = sum(leaf.size for _, leaf in leaves) - sharded
    own, whole = 4 * (sharded // 2 + unsharded), 4 * (sharded + unsharded)  # float32
    account = planned(shapes)
    update = account["update"].parts
    # The reference policy is a second copy; decoding has a copy that is gathered over fsdp.
    assert update["parameters"] == 2 * own
    assert account["decode"].parts["parameters"] == 2 * own + whole
    assert update["gradients"] == own
    # Two moments for each parameter, and the counts of steps.
    assert 0 <= update["optimizer"] - 2 * own <= 16
    assert all(phase.parts["optimizer"] == update["optimizer"] for phase in account.values())


def test_the_cache_counts_slots_and_two_waiting_batches(planned, shapes):
    """The batches are prompts that were prefilled and wait for slots."""
    slots, places, prompts = 8 // 2, 32, 2 * 4 * 16  # a page holds 16 + 4 tokens
    token = 2 * 4 * 2 * 2 * 8  # keys and values, float32, layers, heads, size
    account = planned(shapes)
    assert account["prefill"].parts["KV cache"] == token * (slots * places + prompts)
    assert account["update"].parts["KV cache"] == 0


# Runs that do not fit


def planned_run(folder):
    return changed(tiny.config(), micro_batch_size=4, run_dir=str(folder / "run"))


@pytest.mark.parametrize(
    ("phase", "mib", "missing", "message"),
    [
        ("update", (100, 200, 0, 0, 5), 205, "mesh: parameters and optimizer take 300.0 MiB a device (MISSING); raise"),
        # A micro-batch has 4 of 8 rows; 2 have half of the activations, and may need as much for the head.
        ("update", (10, 0, 0, 10, 100), 20, "micro_batch_size: 4 does not fit (MISSING); about 2 would"),
        ("update", (10, 0, 0, 60, 80), 50, "micro_batch_size: 4 does not fit (MISSING); nor does a smaller one: "),
        ("decode", (20, 0, 160, 0, 0), 80, "rollout.max_slots: 8 do not fit (MISSING); lower it, or raise mesh.tp"),
    ],
)
def test_a_memory_error_names_the_setting_and_the_excess(shapes, phase, mib, missing, message):
    columns = dict(zip(("parameters", "optimizer", "KV cache", "head", "activations"), mib, strict=True))
    in_bytes = dict.fromkeys(memory.COLUMNS, 0) | {column: n * MIB for column, n in columns.items()}
    largest = memory.Phase(phase, in_bytes)
    rows = max(memory.fitting_micro_batches(largest, shapes.shape, 100 * MIB), default=0)
    devices = targets.Devices("some", shapes.model.layout.mesh, 8, 100 * MIB)
    advice = memory.remedy([largest], 4, 8, devices, rows)
    assert advice.startswith(message.replace("MISSING", f"{missing}.0 MiB too much in {phase}"))
    if phase == "decode":  # with one slot a device, or without room for the sampler's copy, fewer slots don't help
        assert memory.remedy([largest], 4, shapes.shape.shards, devices, rows).endswith("in decode); raise mesh.tp")
        full = memory.Phase(phase, in_bytes | {"parameters": 110 * MIB})
        assert memory.remedy([full, largest], 4, 8, devices, rows).endswith("in decode); raise mesh.tp")


def test_the_command_ends_with_the_error_line_and_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(targets, "device_memory", lambda mesh: 1000)
    monkeypatch.setattr(memory, "account_of", lambda *_: Account(0, 5000))
    assert train.main([*arguments(planned_run(tmp_path)), "--plan"]) == 2
    output, errors = capsys.readouterr()
    assert errors.startswith("error: mesh: parameters and optimizer take 0.3 MiB a device")
    assert errors.count("\n") == 1
    assert output.splitlines()[-1].startswith("update  ")  # the table's last line
    assert not (tmp_path / "run").exists()


def test_an_update_with_newly_chosen_rows_is_compiled_once(tmp_path, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(memory, "account_of", lambda *program: compiled.append(program) or Account(0, MIB))
    run = changed(tiny.config("sft", rollout=None, eval=None, task={"heldout": 0}), run_dir=str(tmp_path / "run"))
    assert train.main([*arguments(run), "--plan"]) == 0
    assert len(compiled) == 2  # the update, and its head alone
    assert "\nupdate  " in capsys.readouterr().out


# Devices


def test_a_target_without_its_compiler_is_a_one_line_error(tmp_path, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None if name == "libtpu" else find_spec(name))
    assert train.main([*arguments(planned_run(tmp_path)), "--plan", "--target", "v6e:2x4"]) == 2
    stderr = capsys.readouterr().err
    assert re.fullmatch("error: --target: libtpu, the TPU compiler, isn't installed: pip install.*\n", stderr)


# Facts known without a compiler


def test_the_subject_describes_model_batch_and_checkpoints(config, shapes):
    """An older checkpoint stays until the new checkpoint is complete."""
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes.policy.params))
    mib = 12 * count / MIB  # parameters and moments
    model, batch, checkpoint = subject(shapes)
    assert model == f"grpo of a new model, {count:,} parameters"
    assert "8 completions in a rollout, 16 + 4 tokens at most; micro_batch_size 4, rows of 20 tokens" in batch
    assert "remat auto; 4 steps" in batch
    assert checkpoint == f"checkpoint: {mib:.1f} MiB; run_dir has up to 1 at a time, {mib:.1f} MiB"
    several = changed(config, checkpoint={"every": 2, "keep": 3, "keep_best": True}, eval={})
    *_, line = subject(Programs(several, shapes.model.layout.mesh))
    assert line.endswith(f"has up to 5 at a time, {5 * mib:.1f} MiB")
    adapters = changed(config, model={"lora": {"rank": 2, "alpha": 2, "targets": ["head"]}})
    model, *_ = subject(Programs(adapters, shapes.model.layout.mesh))
    assert model.endswith(f"({2 * (260 + 32)} in adapters, which are trained)")


# A teacher


@pytest.mark.parametrize("estimator", ["full", "sampled"])
def test_a_teacher_is_in_memory_in_every_phase(estimator, planned):
    """The update's program has it where it compares distributions; else a pass before the update has it."""
    own = {"data": None, "eval": None, "grpo": {"num_generations": 4}, "distill": {"estimator": estimator}}
    source = str(Path(tiny.__file__).parent / "fixtures" / "tiny_grpo")
    config = tiny.config("distill", **own, teacher={"source": source}, micro_batch_size=4)
    shapes = Programs(config, make_mesh(MeshConfig(fsdp=1)))
    teacher, account = bytes_on_device(shapes.teacher.params), planned(shapes)
    policy, moments = bytes_on_device(shapes.policy.params), bytes_on_device(shapes.state.opt_state)
    assert teacher == 2 * 115_520
    assert list(account) == ["prefill", "decode", *["teacher"] * (estimator == "sampled"), "update"]
    assert all(phase.parts["parameters"] >= policy + teacher for phase in account.values())
    assert account["update"].peak == MIB + teacher * (estimator == "sampled")
    if estimator == "sampled":
        assert account["teacher"].peak == MIB + policy + moments
    assert f"teacher: {source}, 115,520 parameters in bfloat16" in list(subject(shapes))
    arguments = config.rollout, config.optimizer, False, 2**23
    assert fitting_limits(shapes.policy, *arguments, shapes.teacher) < fitting_limits(shapes.policy, *arguments)


# Conversations


def test_answers_to_turns_are_a_phase_of_their_own(planned):
    account = planned(Programs(tiny.METHODS["turns"], make_mesh(MeshConfig(fsdp=1))))
    assert list(account) == ["prefill", "decode", "answers", "update"]


def test_delta_net_states_count_for_slots_and_waiting_prompts(planned):
    shapes = Programs(tiny.config(model={"architecture": tiny.QWEN35}), make_mesh(MeshConfig(fsdp=1)))
    account = planned(shapes)
    heads, inputs = 4 * 8 * 6, 3 * (2 * 2 * 8 + 4 * 6)
    state, token = 2 * 4 * (heads + inputs), 4 * 2 * 2 * 16  # two delta nets; keys and values of the other layer
    prompts = 2 * 8 * (state + 16 * token)
    assert account["decode"].parts["KV cache"] == 8 * (state + 32 * token) + prompts
    # Beside its tokens a slot takes its state, its tail and three arrays of logits.
    room = partial(fitting_limits, shapes.policy, shapes.config.rollout, shapes.config.optimizer, False)
    more = 2**26 * 0.92 / (room(2**27).slots - room(2**26).slots)
    assert more == pytest.approx(state + token * (16 + 20 / 4) + 3 * 4 * 260, rel=0.01)
