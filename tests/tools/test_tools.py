"""Tools on a run: an export that other programs load, completions of both, a picture of its curves."""

import io
import json
import re
import shutil
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import changed, checksums, newest
from tiny import METHODS, config

from mllm.config.model import MeshConfig, ModelConfig
from mllm.config.rollout import RolloutConfig
from mllm.model import peft
from mllm.model.compute_copy import Rounding, compute_copy
from mllm.model.load import load_model, load_policy
from mllm.model.tokenizer import bytes_tokenizer, stop_ids
from mllm.parallel.mesh import make_mesh
from mllm.run.build import Run
from mllm.run.checkpoint import restore_params
from mllm.run.state import RunState
from mllm.run.store import RunStore
from mllm.sampler.completion import Completion
from mllm.sampler.sampler import Sampler
from mllm.training.step import init_state
from tools import export, generate, plot

PROMPTS = [
    {"question": "1+2="},
    {"messages": [{"role": "user", "content": "7+7="}, {"role": "assistant", "content": "14"}]},
    {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]},
    {"prompt": "5+5="},
    {"prompt": [{"role": "user", "content": "6+6="}], "completion": "12"},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The configuration of a run with checkpoints 4 and 8. Every parameter differs between them, without an update."""
    settings = changed(METHODS["sft"], run_dir=str(tmp_path_factory.mktemp("trained") / "run"))
    with Run.build(settings) as run:
        for step in (4, 8):
            params = jax.tree.map(lambda leaf, step=step: leaf * (1 + step / 100), run.trained)
            state = RunState(step, init_state(params, run.optimizer), run.source.position())
            run.checkpoints.save(state, settings.model_dump(mode="json"), {})
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


def test_an_export_holds_the_newest_parameters_to_the_bit(trained, exported):
    """The run stays as it was."""
    jax.tree.map(np.testing.assert_array_equal, load(exported / "export"), newest(trained).train.params)
    generation = json.loads((exported / "export" / "generation_config.json").read_text())
    assert generation["pad_token_id"] == bytes_tokenizer().pad_token_id
    assert generation["eos_token_id"] == list(stop_ids(bytes_tokenizer(), stop=("~",)))
    left = {path: sum_ for path, sum_ in checksums(exported).items() if not path.startswith("export")}
    assert left == checksums(Path(trained.run_dir))


@pytest.mark.slow
def test_an_older_step_exports_in_another_dtype_dithered(trained, exported, copy, capsys):
    """Dithered as in training and sampling."""
    assert export.main([str(copy), "--step", "4", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.startswith(f"step 4 of {copy} is exported to {copy / 'export'}\n")
    masters = restore_params(RunStore(copy), load_policy(trained, make_mesh(trained.mesh)).trained, 4)
    exact, copied = masters["embed"][...], np.float32(load(copy / "export")["embed"][...])
    dithered = compute_copy(exact, Rounding(jnp.dtype("bfloat16"), dithered=True), "embed")
    np.testing.assert_array_equal(copied, np.float32(dithered))
    assert (copied != exact.astype(jnp.bfloat16)).any()
    sizes = [(run / "export" / "model.safetensors").stat().st_size for run in (copy, exported)]
    assert sizes[0] < 0.6 * sizes[1]


def test_merged_adapters_untie_a_tied_head(trained, tmp_path):
    settings = changed(trained, model={"lora": {"rank": 2, "alpha": 4, "targets": ["head"]}})
    policy = load_policy(settings, make_mesh(settings.mesh))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), policy.trained)
    export.save_model(settings, policy, 1, policy.complete(ones), "float32", "run", str(tmp_path / "export"))
    assert json.loads((tmp_path / "export" / "config.json").read_text())["tie_word_embeddings"] is False
    params = load(tmp_path / "export")
    np.testing.assert_allclose(params["head"][...], params["embed"][...] + 4 / 2 * 2, rtol=1e-6)


@pytest.mark.slow
def test_a_run_and_its_export_complete_prompts_alike(exported, tmp_path, capsys):
    """Neither call overwrites a file."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))

    def complete(model, out, *options):
        given = [str(model), "--prompts", str(prompts), "--out", str(out), "--max-tokens", "8", *options]
        return generate.main(given), out.read_text()

    code, text = complete(exported, out)
    assert code == 0
    stderr, lines = capsys.readouterr().err, [json.loads(line) for line in text.splitlines()]
    of_export = complete(exported / "export", tmp_path / "other.jsonl", "--system", "Sum.", "--dtype", "float32")
    assert of_export == (0, text)
    assert [line["messages"][0]["content"] for line in lines] == ["Sum.", "Sum.", "Add.", "Sum.", "Sum."]
    messages = [{"role": "user", "content": question} for question in ("1+2=", "7+7=", "1+2=", "5+5=", "6+6=")]
    assert [line["messages"][-1] for line in lines] == messages
    assert all(line["completion"] and (line["tokens"] == 8 or line["finished"]) for line in lines)
    assert f"5 done, {sum(line['tokens'] for line in lines)} tokens" in stderr
    assert complete(exported, out) == (2, text)
    assert "exists, and would be overwritten" in capsys.readouterr().err


@pytest.fixture
def calls(monkeypatch):
    """The samplers that are called, with their parameters, prompts and options. Each answers with its prompt."""
    calls = []

    def complete(self, params, prompts, **given):
        calls.append((self, params, prompts, given))
        return [Completion(text=self.renderer.tokenizer.decode(prompt, skip_special_tokens=True)) for prompt in prompts]

    monkeypatch.setattr(Sampler, "complete", complete)
    return calls


def test_prompts_get_n_answers_from_the_wanted_step(exported, calls, capsys):
    assert generate.main([str(exported), "1+2=", "3+4=", "--temperature", "1", "--n", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["Sum.1+2=", "Sum.1+2=", "Sum.3+4=", "Sum.3+4="]
    assert printed.err.splitlines()[0] == f"{exported}: step 8; prompts are rendered by the chat template"
    assert generate.main([str(exported), "--step", "4", "1+2="]) == 0
    assert capsys.readouterr().err.startswith(f"{exported}: step 4;")
    newest, other = (params["embed"][...] for _, params, *_ in calls)
    assert (newest != other).all()


def test_prompts_use_the_template_arguments_of_the_run(exported, calls, monkeypatch, capsys):
    restore = export.restore

    def with_arguments(*given):
        run, policy, *rest = restore(*given)
        template = policy.tokenizer.chat_template
        policy.tokenizer.chat_template = template.replace("content'] }}", "content'] }}{{ mood }}")
        return changed(run, task={"template_args": {"mood": "!"}}), policy, *rest

    monkeypatch.setattr(export, "restore", with_arguments)
    assert generate.main([str(exported), "1+2="]) == 0
    assert capsys.readouterr().out == "Sum.!1+2=!\n"


def test_a_prompt_from_stdin_is_not_numbered(exported, calls, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert generate.main([f"{exported}/export", "--chat-template", "never", "--dtype", "float32"]) == 0
    message = f"{exported}/export: the model; prompts are texts, without the chat template\n"
    assert capsys.readouterr() == ("two\nlines\n", message)


def test_a_terminal_chat_sends_all_earlier_messages(exported, calls, monkeypatch, capsys):
    typed = io.StringIO("one\ntwo\n\nnot read\n")
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", typed)
    assert generate.main([str(exported), "--chat-template", "always"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["Sum.one", "Sum.oneSum.onetwo"]
    assert printed.err.count("prompts are rendered by the chat template") == 1


@pytest.mark.slow
def test_an_adapter_folder_is_sampled_with_its_base_model(exported, calls, tmp_path, capsys):
    settings = {"source": f"{exported}/export", "lora": {"rank": 2, "alpha": 4}, "dtype": "float32"}
    policy = load_model(ModelConfig.model_validate(settings), make_mesh(MeshConfig(fsdp=1)), packed=False)
    adapters = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), policy.trained)
    peft.save(tmp_path, policy.architecture, policy.lora, adapters, settings["source"])
    assert generate.main([str(tmp_path), "hi", "--dtype", "float32"]) == 0
    assert f"{tmp_path}: adapters of {exported}/export; prompts are" in capsys.readouterr().err
    ((_, params, *_),) = calls
    assert jax.tree.structure(params) == jax.tree.structure(policy.params)
    trained, frozen = policy.split(params)
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(trained))
    jax.tree.map(np.testing.assert_array_equal, frozen, policy.stored_params())
    (tmp_path / peft.CONFIG).write_text('{"base_model_name_or_path": "x/y"}')
    assert generate.main([str(tmp_path), "hi"]) == 2
    assert f"{peft.CONFIG}: base_model_name_or_path: x/y: no such folder" in capsys.readouterr().err


def test_a_missing_model_is_named_as_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "read_prompts", lambda options: [])
    assert generate.main([str(tmp_path / "nope"), "hi"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: MODEL_OR_RUN: {tmp_path}/nope: no such folder")
    assert "model." not in error


def test_the_sampler_gets_the_values_of_the_options(exported, calls):
    """Without --dtype the run would compute in float32."""
    options = ["--max-tokens", "6", "--temperature", "0.5", "--seed", "3", "--dtype", "bfloat16"]
    options += ["--stop", "two tokens", "--stop", "<|im_start|>"]
    assert generate.main([str(exported), "1+2=", *options]) == 0
    ((sampler, params, _, given),) = calls
    assert (sampler.options.max_completion_length, sampler.options.temperature, sampler.seed) == (6, 0.5, 3)
    assert nnx.merge(sampler.graphdef, params).rounding.dtype == "bfloat16"
    assert (*sampler.stop_texts,) == ("~", "two tokens", "<|im_start|>")
    ids = {*stop_ids(bytes_tokenizer(), stop=("~", "<|im_start|>"))}
    assert {*sampler.stop_ids} == ids
    assert not given["greedy"]


def test_a_completion_that_the_memory_has_no_room_for_is_refused(exported, capsys):
    assert generate.main([str(exported), "hi", "--max-tokens", "50000"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --max-tokens: 50000 after a prompt of")


@pytest.mark.slow
def test_an_environment_answers_and_reports_the_reward(exported, tmp_path, monkeypatch, capsys):
    """A conversation has the limits of the run, or so short turns that all of them fit."""
    limits = []

    def complete(self, params, prompts, conversations, **given):
        limits.append((self.options.turns, self.options.max_completion_length))
        assert self.renderer.form == "chats"
        live = [*range(len(prompts))]
        while live:  # as the engine does
            conversations.send({i: Completion(array("i", [*b"16", 258]), finished=True, text="16") for i in live})
            observations = conversations.receive(live)
            live = [i for i in live if observations[i] is not None]

    def knows_texts(*given, restore=export.restore):
        config, policy, *rest = restore(*given)
        return config.model_copy(update={"rollout": rollout}), replace(policy, learned="texts"), *rest

    rollout = RolloutConfig(max_prompt_length=20, max_completion_length=4, max_turns=3)

    monkeypatch.setattr(Sampler, "complete", complete)
    monkeypatch.setattr(export, "restore", knows_texts)
    game = ["--environment", "mllm.examples.guess:Guess"]
    assert generate.main([str(exported), "game 1", *game]) == 0
    match = re.fullmatch(r"assistant: 16\nuser: (higher|lower)\n" * 3 + r"reward: 0\.0\n", capsys.readouterr().out)
    assert match
    out = tmp_path / "out.jsonl"
    assert generate.main([str(exported), "game 1", *game, "--out", str(out)]) == 0
    line = json.loads(out.read_text())
    assert [one["content"] for one in line["turns"]] == ["16", match[1]] * 3
    assert (line["reward"], line["tokens"], line["finished"]) == (0, 9, True)
    rollout = None
    assert generate.main([str(exported), "game 1", *game, "--max-turns", "100"]) == 0
    positions = json.loads(Path(exported, "config.json").read_text())["max_position_embeddings"]
    (turns, tokens), *others = limits[::-1]
    assert others == [(3, 4)] * 2
    assert positions - 400 < (2 * turns - 1) * tokens < positions
    for options, message in (
        (["--environment", "task"], "--environment: task: this is no run of a task with an environment or tools"),
        (["--seed", str(2**31)], "argument --seed: 2147483648 is not 0 or more, at most"),
    ):
        assert generate.main([str(exported), "hi", *options]) == 2
        assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_are_escaped_on_a_terminal_only(terminal, monkeypatch, capsys):
    text = "a\tb\nc\x1b]0;title\x07\r\x9b2J\u202e 漢字\n"
    monkeypatch.setattr(generate, "load", lambda options: generate.Model(None, None, ""))
    monkeypatch.setattr(generate, "complete", lambda *given: [(text, {})])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert generate.main(["a model", "a prompt"]) == 0
    shown = "a\tb\nc\\x1b]0;title\\x07\\r\\x9b2J\\u202e 漢字\n"
    assert capsys.readouterr().out == (shown if terminal else text) + "\n"


@pytest.mark.slow
def test_the_curves_of_a_run_are_drawn_into_its_folder(finished, tmp_path, capsys):
    copy = Path(shutil.copytree(finished("sft").run_dir, tmp_path / "run"))
    capsys.readouterr()
    with (copy / "metrics.jsonl").open("a") as file:  # a half-written line doesn't matter
        file.write('{"step": 5, "lo')
    assert plot.main([str(copy)]) == 0
    assert capsys.readouterr().out == f"curves             {copy / 'curves.png'}\n"
    panels = [panel.get_title() for panel in plot.draw({"run": plot.read_run(RunStore(copy))}).axes]
    assert panels[:4] == ["Reward", "Accuracy", "Loss (nats)", "Entropy (nats)"]
