"""`python tools/bench train`: arithmetic by hand, tables with measurements made up, and one run as a whole."""

import json

import jax
import pytest
import tiny
from flax import nnx

from mllm.config.load import dump
from mllm.model.architecture import PRESETS, Qwen2Config
from mllm.model.decoder import Qwen2
from tools.bench import __main__ as bench
from tools.bench import train, train_child

SIZES = Qwen2Config.from_hf(tiny.ARCHITECTURE, "test")
"""D=32, I=64, V=260, 2 layers, 4 heads of 8, 2 of them for keys and values."""
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
"""Parameters of q, k and v, o, and the three of the feed-forward layer."""
H100 = {
    "kind": "NVIDIA H100 80GB HBM3",
    "jax": "0.11.2",
    "memory": 75 * 2**30,
    "peak_flops": 1e15,
    "matmul": 8192,
    "matmul_flops": 8e14,
    "copy_bytes": 3e12,
}


def test_flops_of_an_update_are_those_counted_by_hand():
    # Two rows of 3 tokens: 1 + 2 + 3 keys are seen in each; scores and their use, forward and twice as much backward.
    by_hand = 6 * (6 * 2 * LAYER + 4 * 260 * 32) + 3 * 2 * (2 * 12 * 4 * 8) * 2
    assert train_child.update_flops(SIZES, rows=2, length=3, counted=4) == by_hand


def test_bytes_of_the_cache_are_those_counted_by_hand():
    assert train_child.cache_bytes(SIZES, tokens=5, itemsize=2) == 5 * 2 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(("name", "unread"), [("Qwen/Qwen2.5-3B", 0), ("Qwen/Qwen2.5-7B", 152_064 * 3_584)])
def test_decoding_reads_all_parameters_but_an_embedding_that_is_not_the_head(name, unread):
    params = nnx.split(Qwen2.abstract(PRESETS[name]))[1]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert train_child.weight_bytes(PRESETS[name], itemsize=1) == count - unread


def made_up(settings):
    """Figures in place of a measurement."""
    if settings["what"] == "device":
        return H100
    if settings["what"] == "update":
        seconds = {"rollout": 5.0, "logprob": 1.0, "update": 2.0}
        sizes = {"rows": 8, "length": 1000, "micro": 4, "attention": "cudnn"}
        return {**sizes, "seconds": seconds, "logprob_passes": 2, "flops": 12e14, "peak_bytes": 2**31}
    rows = settings["config"]["rollout"]["batch_size"]
    if rows == 256:
        return {"out_of_memory": "RESOURCE_EXHAUSTED: Out of memory"}
    if rows == 512:
        return {"error": "the compiler said no"}
    turn = {"seconds": 4.0, "steps": 100, "bytes": 6e12}
    sizes = {"rows": rows, "prompt": 16, "completion": 4}
    return {**sizes, "prefill_seconds": 0.5, "turns": [turn, turn], "peak_bytes": 2**30}


@pytest.fixture
def command(tmp_path):
    """A command with a tiny configuration of GRPO and a file for the figures."""
    path = tmp_path / "tiny.yaml"
    path.write_text(dump(tiny.config(micro_batch_size=4, rollout={"max_prompt_length": 8, "max_completion_length": 4})))
    return ["--config", str(path), "--json", str(tmp_path / "a.json")]


def recorded(command):
    with open(command[3]) as file:
        return json.load(file)


def test_the_tables_hold_times_rates_and_what_ran_out_of_memory(command, capsys):
    assert train.main([*command, "--batches", "32", "128", "256", "512"], made_up) == 0
    out = capsys.readouterr().out
    # A step is the rollout, two log-prob passes and the update: 9 s for 8000 tokens.
    step = "| 5.000 | 1.000 | 2.000 | 9.000 | 889 | 4,000 |"
    assert f"| tiny | 8 x 1000 | 4 | cudnn {step} 600 | 60.0% | 75.0% | 2.00 |" in out
    # 6e12 bytes at 3e12 a second take 2 of the 4 seconds.
    assert "| tiny, 32 rows | 16 + 4 | 0.500 | 40.00 | 800 | 1,600 | 50.0% | 1.00 |" in out
    assert "| tiny, 128 rows | 16 + 4 | 0.500 | 40.00 | 3,200 | 6,400 | 50.0% | 1.00 |" in out
    assert "decode tiny, 256 rows: out of memory (RESOURCE_EXHAUSTED: Out of memory)" in out
    assert "| tiny, 256 rows | out of memory | - | - | - | - | - | - |" in out
    assert "decode tiny, 512 rows: failed (the compiler said no)" in out
    assert len(recorded(command)["results"]) == 4


def test_a_device_that_can_not_be_measured_ends_the_command(command, capsys):
    assert train.main(command, lambda *_: {"error": "no device"}) == 2
    assert capsys.readouterr().err == "error: the device can't be measured: no device\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--parts", "speed"], "argument --parts: invalid choice: 'speed'"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["--steps", "0"], "--steps: 0: expected 1 or more"),
        (["--batches", "0"], "--batches: 0: expected 1 or more"),
        (["--cases", "3B-sft", "--config", "tiny_sft.yaml"], "argument --config: not allowed with argument --cases"),
        (["model.remat=some"], "model.remat"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, says, capsys):
    assert bench.main(["train", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("child_process.answer({'seconds': 3})", {"seconds": 3}),
        ("raise ValueError('no such thing')", {"error": "ValueError: no such thing"}),
        (
            "raise ValueError('RESOURCE_EXHAUSTED: Shared memory size limit exceeded')",
            {"error": "ValueError: RESOURCE_EXHAUSTED: Shared memory size limit exceeded"},
        ),
        ("import os; os.kill(os.getpid(), 9)", {"out_of_memory": "killed by SIGKILL: it said nothing"}),
        (
            "raise RuntimeError('INTERNAL: CUDA_ERROR_OUT_OF_MEMORY')",
            {"out_of_memory": "RuntimeError: INTERNAL: CUDA_ERROR_OUT_OF_MEMORY"},
        ),
    ],
)
def test_whatever_ends_a_process_is_a_result(code, result, tmp_path, monkeypatch):
    (tmp_path / "tools" / "bench").mkdir(parents=True)
    (tmp_path / "tools" / "bench" / "train_child.py").write_text(f"from mllm import child_process\n{code}")
    monkeypatch.setattr(train, "ROOT", tmp_path)
    assert train.measure_in_child({}) == result


def test_a_process_measures_the_device():
    found = train.measure_in_child({"what": "device", "matmul": 8, "copy_mib": 1})
    assert found["kind"] == "cpu"
    assert min(found["matmul_flops"], found["copy_bytes"]) > 0


@pytest.mark.slow
def test_both_parts_run_on_a_tiny_model(command):
    sizes = ["--batches", "4", "--matmul", "64", "--copy-mib", "1", "--steps", "1"]
    assert train.main([*command, *sizes], train_child.measure) == 0
    results = recorded(command)["results"]
    update, decode = results["update tiny"], results["decode tiny, 4 rows"]
    # 8 rows of 8 + 4 tokens, of which the last 4 are predicted.
    assert (update["rows"], update["length"], update["counted"]) == (8, 12, 32)
    assert update["flops"] == train_child.update_flops(SIZES, 8, 12, 32)
    assert set(update["seconds"]) == {"rollout", "logprob", "update"}
    # The first of three turns, of a token each, is not timed; the second's query is the second token made.
    weights, cached = (train_child.weight_bytes(SIZES, 4), [4 * (8 + made) for made in (2, 3)])
    assert [turn["bytes"] for turn in decode["turns"]] == [
        weights + train_child.cache_bytes(SIZES, tokens, 4) for tokens in cached
    ]
