"""tools/gradcheck.py passes what is right, catches what is a little wrong, and says in one line what it can't do."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from kernels.lm_head import reference
from mllm.config import load as config_file
from mllm.errors import UserError
from tools import gradcheck, gradcheck_problem
from tools.gradcheck_problem import OBJECTIVES, Results, exact, make_problem, plain

SMALL = "24,16,131"
SHAPE = (24, 16, 131)
RESULTS = Results._fields


def run_gradcheck(*arguments, shape=SMALL):
    return gradcheck.main(["--shape", shape, *arguments])


def refused(capsys, *arguments):
    """The one line that is said instead of doing anything."""
    assert gradcheck.main(list(arguments)) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors


# The reference and the yardstick


def test_the_oracle_does_not_depend_on_the_blocks_of_tokens(monkeypatch):
    problem = make_problem(SHAPE, "grpo", softmax="peaked", live=0.7, temperature=0.7, softcap=20.0)
    at_once = exact(problem)
    monkeypatch.setattr(reference, "LOGITS", 5 * 131)
    monkeypatch.setattr(reference, "TILE", 50)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-13), exact(problem), at_once)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_derivatives_of_an_objective_by_hand_are_those_of_jax(objective):
    logprob, entropy, *operands = np.random.default_rng(0).normal(size=(4, 100))
    by_hand = OBJECTIVES[objective]
    operands = operands[: by_hand.operands]
    in_jax = jax.vmap(jax.grad(by_hand.in_jax, (0, 1)))(*(jnp.asarray(x) for x in (logprob, entropy, *operands)))
    for got, right in zip(by_hand.slopes(logprob, entropy, *operands), in_jax, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_both_sides_of_both_clips_occur_and_no_token_is_near_one():
    problem = make_problem((200, 8, 31), "grpo")
    ratio = np.exp(problem.log_ratios)
    assert all(np.any(side) for side in (ratio < 0.8, (ratio > 0.8) & (ratio < 1.2), ratio > 1.2))
    assert np.abs(ratio[:, None] - [0.8, 1.2]).min() > 0.03


def test_the_yardstick_does_not_depend_on_the_blocks_of_tokens(monkeypatch):
    problem = make_problem(SHAPE, "grpo", softmax="peaked", live=0.7)
    operands = exact(problem).operands
    at_once = plain(problem, operands)
    monkeypatch.setattr(gradcheck_problem, "LOGITS", 5 * 131)
    for one, other in zip(at_once, plain(problem, operands), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("softmax", "likeliest"), [("near-uniform", (0, 0.1)), ("peaked", (0.5, 0.95)), ("saturated", (1, 1))]
)
def test_inputs_are_as_sure_of_a_token_as_they_say(softmax, likeliest):
    problem = make_problem((30, 512, 1009), "cross_entropy", softmax=softmax)
    logits = problem.hidden.astype(np.float64) @ problem.weight.astype(np.float64).T
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    of_two_in_three = p.max(axis=1)[np.arange(30) % 3 > 0]
    assert likeliest[0] <= of_two_in_three.min() <= of_two_in_three.max() <= likeliest[1]
    hits = p[np.arange(30), problem.labels] == p.max(axis=1)
    assert softmax == "near-uniform" or hits.sum() == 10


# The verdict


@pytest.mark.parametrize(("impl", "dtype"), [("full_logits", "bfloat16"), ("xla", "float32")])
def test_an_implementation_that_is_right_passes(impl, dtype, capsys):
    assert run_gradcheck("--impl", impl, "--dtype", dtype, "--objective", "grpo", "--softmax", "peaked") == 0
    assert capsys.readouterr().out.count("    ok\n") == len(RESULTS)


@pytest.mark.parametrize(
    "arguments",
    [
        "--softmax saturated --dtype float32",
        "--live 0.3",
        "--live 0",
        "--workspace 0",
        "--function token_logprobs --objective grpo --live 0.5",
        "--softcap 5 --temperature 0.7",
        "--param-dtype float32",
        "--dtype float16",
        "--seed 1 --shape 1,16,2",
    ],
)
def test_what_the_head_can_do_passes(arguments):
    assert run_gradcheck(*arguments.split()) == 0


def test_the_tpus_kernels_pass_in_the_strict_interpreter():
    assert run_gradcheck("--impl", "mosaic_tpu", "--interpret", "--live", "0.5", "--dtype", "float32") == 0


def scaled(x, factor):
    """x, with a gradient that is too large by a factor."""
    return factor * x + jax.lax.stop_gradient(x - factor * x)


def wrong_gradient(place):
    def wrong(head, *arguments, **options):
        return head(*arguments[:place], scaled(arguments[place], 1.01), *arguments[place + 1 :], **options)

    return wrong


def wrong_statistic(name, change):
    def wrong(head, *arguments, **options):
        loss, tokens = head(*arguments, **options)
        return loss, tokens._replace(**{name: change(getattr(tokens, name))})

    return wrong


def wrong_loss(head, *arguments, **options):
    loss, tokens = head(*arguments, **options)
    return loss + 1e-3, tokens


WRONG = {
    "dh": wrong_gradient(0),
    "dW": wrong_gradient(1),
    "loss": wrong_loss,
    "logprob": wrong_statistic("logprob", lambda x: x + 1e-4),
    "lse": wrong_statistic("lse", lambda x: x.at[-1].set(jnp.nan)),
    "entropy": wrong_statistic("entropy", lambda x: x + 1e-4),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_result_that_is_a_little_wrong_is_past_tolerance(name, capsys, monkeypatch):
    monkeypatch.setattr(gradcheck, "token_loss", functools.partial(WRONG[name], gradcheck.token_loss))
    assert run_gradcheck("--param-dtype", "float32") == 1
    assert f"verdict   PAST TOLERANCE: {name}\n" in capsys.readouterr().out


def test_figures_go_to_a_file_as_well(tmp_path):
    assert run_gradcheck("--json", str(tmp_path / "figures.json"), "--dtype", "float32") == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["passed"] is True
    assert figures["settings"]["shape"] == list(SHAPE)
    assert set(figures["errors"]) == set(RESULTS)
    for errors in figures["errors"].values():
        for norm, error in errors["error"].items():
            assert 0 <= error <= errors["allowed"][norm] < math.inf


# What it takes


def test_the_shipped_configuration_is_qwens_head_at_a_sequence_of_2048():
    settings = gradcheck.load("gradcheck_qwen25_1p5b.yaml", {"impl": "xla"})
    assert settings.shape == (2048, 1536, 151936)
    assert (settings.dtype, settings.impl) == ("bfloat16", "xla")


def test_an_option_replaces_the_files_setting(tmp_path, capsys):
    (tmp_path / "check.yaml").write_text(f"shape: [{SMALL}]\nlive: 0.5\nsoftmax: peaked\n")
    assert gradcheck.main(["--config", str(tmp_path / "check.yaml"), "--live", "0.25"]) == 0
    out = capsys.readouterr().out
    assert "N=24, D=16, V=131, bfloat16, on cpu\n" in out
    assert "live=0.25, softmax=peaked\n" in out


def test_neither_tool_takes_the_others_configuration(capsys):
    with pytest.raises(UserError, match="shape: unknown setting"):
        config_file.load("gradcheck_qwen25_1p5b.yaml")
    assert train.main(["--config", "gradcheck_qwen25_1p5b.yaml"]) == 2
    capsys.readouterr()
    assert "tiny_sft.yaml: algorithm: unknown setting" in refused(capsys, "--config", "tiny_sft.yaml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--shape 24,16,0", "--shape: shape.2"),
        (f"--shape {SMALL} --live 2", "--live: live: Input should be less than or equal to 1 (got 2)"),
        (f"--shape {SMALL} --dtype int8", "--dtype: dtype: Input should be 'bfloat16', 'float16' or 'float32'"),
        (f"--shape {SMALL} --workspace -1", "--workspace: workspace"),
        (f"--shape {SMALL} --function token_logprobs --workspace 0", "--workspace: workspace: is not used"),
        (f"--shape {SMALL} --interpret", "--interpret: interpret: is not used"),
        (f"--shape {SMALL} --impl mosaic_tpu", "--impl: mosaic_tpu runs on TPUs, and this is a cpu"),
        (f"--shape {SMALL} --impl mosaic_gpu", "--impl: mosaic_gpu runs on GPUs, and this is a cpu"),
        (f"--shape {SMALL} --softcap -1", "--softcap: softcap"),
        (f"--shape {SMALL} --impl fastest", "impl must be None or one of"),
    ],
)
def test_a_bad_argument_is_named_in_one_line(arguments, said, capsys):
    assert said in refused(capsys, *arguments.split())


def test_a_device_that_is_too_small_is_said(capsys, monkeypatch):
    def check(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")

    monkeypatch.setattr(gradcheck, "check", check)
    assert run_gradcheck() == 2
    assert (
        capsys.readouterr().err
        == "error: --shape: too large for this device: RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.\n"
    )
