"""The trainer's bench: arithmetic by hand, searches and records with measurements made up, and once as a whole."""

import json

import jax
import jax.numpy as jnp
import pytest
import tiny
from flax import nnx

from mllm.config.load import dump
from mllm.model.architecture import PRESETS, Qwen2Config
from mllm.model.decoder import Qwen2
from mllm.plan import work as counted_work
from tools.bench import train as bench_train
from tools.bench import train_child as bench_train_child
from tools.bench import train_jobs as bench_train_jobs
from tools.bench import train_work as bench_train_work

SIZES = Qwen2Config.from_hf(tiny.ARCHITECTURE, "test")
"""D=32, I=64, V=260, 2 layers, 4 heads of 8, 2 of them for keys and values."""
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
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64  # q, k and v, o, and the three of the feed-forward layer
    assert bench_train_work.layer_products(SIZES) == 2 * layer
    # Documents of 2 and 3 tokens: 1 + 2 and 1 + 2 + 3 keys are seen.
    assert bench_train_work.visible_pairs([2, 3]) == 9
    # 5 tokens, of which 3 count; scores and what is made of them, 4 heads of 8, forward and twice as much backward.
    by_hand = 6 * (5 * 2 * layer + 3 * 260 * 32) + 3 * 2 * (2 * 9 * 4 * 8) * 2
    assert bench_train_work.update_flops(SIZES, tokens=5, counted=3, pairs=9) == by_hand


def test_flops_of_an_update_are_three_times_those_of_the_products_that_the_model_makes():
    rows, length = 2, 6
    graphdef, params = nnx.split(Qwen2(SIZES, rngs=nnx.Rngs(0)))
    tokens = jnp.ones((rows, length), jnp.int32)

    def forward(tokens, positions):
        return nnx.merge(graphdef, params)(tokens, positions, tokens)[0] @ params["embed"].get_value().T

    (made,) = counted_work.parts(forward, (tokens, tokens))
    # XLA's attention makes all pairs.
    every = rows * length
    assert bench_train_work.update_flops(SIZES, every, every, every * length) == 3 * made.flops


def test_bytes_that_decoding_reads_are_those_counted_by_hand():
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + (32 + 16 + 16) + 2 * 32
    assert bench_train_work.weight_bytes(SIZES, itemsize=2) == 2 * (2 * layer + 32 + 260 * 32)
    # Keys and values of 2 layers, 2 heads of 8.
    assert bench_train_work.cache_bytes(SIZES, tokens=5, itemsize=2) == 5 * 2 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(("name", "unread"), [("Qwen/Qwen2.5-3B", 0), ("Qwen/Qwen2.5-7B", 152_064 * 3_584)])
def test_decoding_reads_all_parameters_but_an_embedding_that_is_not_the_head(name, unread):
    params = nnx.split(Qwen2.abstract(PRESETS[name]))[1]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert bench_train_work.weight_bytes(PRESETS[name], itemsize=1) == count - unread


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H200", 989.4), ("cpu", None)],
)
def test_a_device_that_is_not_listed_has_no_data_sheet(kind, tflops):
    assert bench_train_work.peak(kind) == (tflops and tflops * 1e12)


@pytest.mark.parametrize("start", [1, 8, 100])
@pytest.mark.parametrize("limit", [0, 1, 7, 8, 9, 40, 64, 200])
def test_the_largest_micro_batch_is_found_to_an_eighth_or_said_to_lie_beyond_the_bound(limit, start):
    tried = []

    def fits(rows):
        tried.append(rows)
        return rows <= limit

    low, refused = bench_train.largest(fits, start, most=64)
    assert len(set(tried)) == len(tried) <= 12
    assert max(tried) <= 64
    if limit >= 64:
        assert (low, refused) == (64, None)
    else:
        assert low <= limit < refused
        assert refused - low <= max(1, low / 8)


class Made:
    """Measurements made up: rows of an update that fit, by head, and all that was asked for."""

    def __init__(self, **fitting):
        self.fitting = fitting
        self.asked = []
        self.device = H100
        self.broken = None
        """A head whose tries fail."""

    def __call__(self, settings, seconds, tell):
        self.asked.append(settings)
        if settings["what"] == "device":
            return self.device
        if settings["what"] == "update":
            if settings["config"]["model"]["param_dtype"] == "float32":
                return {"out_of_memory": "RESOURCE_EXHAUSTED: Out of memory"}
            seconds = {"rollout": 5.0, "logprob": 1.0, "update": 2.0}
            sizes = {"rows": 8, "length": 1000, "micro": 4, "masters": "bfloat16", "attention": "cudnn"}
            return {**sizes, "seconds": seconds, "logprob_passes": 2, "flops": 12e14, "peak_bytes": 2**31}
        if settings["what"] == "decode":
            turn = {"seconds": 4.0, "steps": 100, "bytes": 6e12}
            sizes = {"rows": settings["config"]["rollout"]["batch_size"], "prompt": 16, "completion": 4}
            return {**sizes, "prefill_seconds": 0.5, "turns": [turn, turn], "peak_bytes": 2**30}
        if settings["head"] == self.broken:
            return {"error": "the compiler said no"}
        rows = settings["config"]["micro_batch_size"]
        if rows > self.fitting[settings["head"]]:
            return {"out_of_memory": "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"}
        return {"peak_bytes": rows * 2**30}


@pytest.fixture
def tiny_run(tmp_path):
    """The path of a tiny configuration of GRPO."""
    path = tmp_path / "tiny.yaml"
    path.write_text(dump(tiny.config(micro_batch_size=4, rollout={"max_prompt_length": 8, "max_completion_length": 4})))
    return str(path)


def test_what_runs_out_of_memory_is_reported_as_such_and_the_search_goes_on(tiny_run, capsys):
    made = Made(reference=5, fused=20)
    assert bench_train.main(["--config", tiny_run, "--parts", "memory"], made) == 0
    tried = [(x["head"], x["config"]["micro_batch_size"]) for x in made.asked[1:]]
    assert tried == [("reference", rows) for rows in (4, 8, 6, 5)] + [
        ("fused", rows) for rows in (4, 8, 16, 32, 24, 20, 22)
    ]
    assert all(x["config"]["batch_size"] == 2 * x["config"]["micro_batch_size"] for x in made.asked[1:])
    assert {x["config"]["head"]["impl"] for x in made.asked[1:5]} == {"reference"}
    out = capsys.readouterr().out
    assert "memory tiny, reference, 8 rows: out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes)" in out
    assert "| 8 | out of memory | 8.00 |" in out
    assert "largest micro-batch, tiny: reference 5 (6 ran out of memory); fused 20 (22 ran out of memory)" in out
    assert "; 4.0 times, goal 4: met" in out


def test_where_nothing_runs_out_of_memory_that_is_said(tiny_run, capsys):
    assert (
        bench_train.main(["--config", tiny_run, "--parts", "memory", "--most-rows", "6"], Made(reference=9, fused=9))
        == 0
    )
    assert "reference 6 (nothing ran out of memory up to there)" in capsys.readouterr().out


def test_a_try_that_fails_for_another_reason_ends_its_search_alone(tiny_run, capsys, tmp_path):
    made = Made(fused=20)
    made.broken = "reference"
    file = tmp_path / "a.json"
    assert bench_train.main(["--config", tiny_run, "--parts", "memory", "--json", str(file)], made) == 0
    assert "memory tiny, reference, 4 rows: failed (the compiler said no)" in capsys.readouterr().out
    jobs = json.loads(file.read_text())["jobs"]
    assert "largest tiny, fused" in jobs
    assert not [name for name in jobs if "reference" in name]


def test_an_update_that_does_not_fit_with_float32_masters_is_measured_with_narrow_ones(tiny_run, capsys):
    assert bench_train.main(["--config", tiny_run, "--parts", "update"], Made()) == 0
    out = capsys.readouterr().out
    assert "| tiny, float32 masters | out of memory |" in out
    # A step is the rollout, two log-prob passes and the update: 9 s for 8000 tokens.
    step = "| 5.000 | 1.000 | 2.000 | 9.000 | 889 | 4,000 |"
    assert f"| tiny, bfloat16 masters | 8 x 1000 | 4 | cudnn {step} 600 | 60.0% | 75.0% | 2.00 | met |" in out


def test_decoding_is_held_against_the_bound_and_against_its_goal_at_128_rows(tiny_run, capsys):
    assert bench_train.main(["--config", tiny_run, "--parts", "decode", "--batches", "32", "128"], Made()) == 0
    out = capsys.readouterr().out
    # 6e12 bytes at 3e12 a second take 2 of the 4 seconds.
    assert "| tiny, 32 rows | 16 + 4 | 0.500 | 40.00 | 800 | 1,600 | 50.0% | 1.00 | - |" in out
    assert "| tiny, 128 rows | 16 + 4 | 0.500 | 40.00 | 3,200 | 6,400 | 50.0% | 1.00 | met |" in out


def test_a_run_that_was_stopped_goes_on_and_measures_nothing_twice(tiny_run, tmp_path, capsys):
    file, made = tmp_path / "a.json", Made(reference=5, fused=20)
    command = ["--config", tiny_run, "--parts", "decode", "memory", "--json", str(file)]

    def stopped(settings, seconds, tell):
        assert seconds <= 60
        if len(made.asked) == 5:
            raise bench_train_jobs.OutOfTime
        return made(settings, seconds, tell)

    assert bench_train.main([*command, "--limit", "60"], stopped) == 0
    assert "--limit: 60 s are over" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["jobs"]) == 4
    made.device = H100 | {"copy_bytes": 1e12}  # a slower moment; the figures of before keep the rate of before
    assert bench_train.main(command, made) == 0
    done = [json.dumps(settings) for settings in made.asked if settings["what"] != "device"]
    assert len(done) == len(set(done)) == 3 + 4 + 7
    out = capsys.readouterr().out
    assert "largest micro-batch, tiny: reference 5" in out
    assert out.count("| 50.0% |") == 3


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        ({"kind": "NVIDIA H200"}, [], "was measured on NVIDIA H200, and this is NVIDIA H100 80GB HBM3"),
        ({"jax": "0.12.0"}, [], "was measured with JAX 0.12.0, and this is 0.11.2"),
        ({}, ["seed=1"], "has decode tiny, 32 rows with other settings"),
    ],
    ids=["device", "jax", "settings"],
)
def test_figures_of_something_else_are_not_mixed_in(change, arguments, says, tiny_run, tmp_path, capsys):
    file = tmp_path / "a.json"
    command = ["--config", tiny_run, "--parts", "decode", "--json", str(file)]
    assert bench_train.main(command, Made()) == 0
    before = json.loads(file.read_text())
    file.write_text(json.dumps({**before, "device": before["device"] | change}))
    assert bench_train.main([*arguments, *command], Made()) == 2
    error = capsys.readouterr().err
    assert error == f"error: --json: {file} {says}: give another file\n"
    assert json.loads(file.read_text())["jobs"] == before["jobs"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--parts", "speed"], "argument --parts: invalid choice: 'speed'"),
        (["--cases", "7B"], "argument --cases: invalid choice: '7B'"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["--steps", "0"], "--steps: 0: expected more than 0"),
        (["--most-rows", "-1"], "--most-rows: -1: expected more than 0"),
        (["--limit", "nan"], "--limit: nan: expected more than 0"),
        (["--batches", "0"], "--batches: 0: expected 1 or more"),
        (["--json", "nowhere/a.json"], "--json: there is no folder nowhere"),
        (["--cases", "3B-sft", "--config", "tiny_sft.yaml"], "argument --config: not allowed with argument --cases"),
        (["batch_size"], "batch_size: expected key.sub=value"),
        (["model.remat=some"], "model.remat"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused_in_one_line(arguments, says, capsys):
    assert bench_train.main(arguments, Made()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_a_file_of_another_kind_is_left_alone(tmp_path, capsys):
    file = tmp_path / "a.json"
    file.write_text('{"jobs": 3}')
    assert bench_train.main(["--json", str(file)], Made()) == 2
    assert capsys.readouterr().err == f"error: --json: {file} was not written by this tool: give another file\n"
    assert file.read_text() == '{"jobs": 3}'


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore", "out_of_memory"),
        ("INTERNAL: Error dispatching computation: Out of memory allocating 9 bytes.", "out_of_memory"),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "out_of_memory"),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 300000", "error"),
        ("INTERNAL: cuDNN has no plan", "error"),
    ],
)
def test_a_process_tells_memory_that_ran_out_from_other_failures(message, kind, monkeypatch):
    def fails(tell):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(bench_train_child, "device", fails)
    assert bench_train_child.measure({"what": "device"}, print) == {kind: message.splitlines()[0]}


@pytest.mark.parametrize(
    ("script", "result"),
    [
        ("""print('{"progress": "half"}\\n{"seconds": 3}')""", {"seconds": 3}),
        ("raise ValueError('no such thing')", {"error": "ValueError: no such thing"}),
        ("import os; os.kill(os.getpid(), 11)", {"error": "killed by signal 11"}),
        (
            "import os; os.kill(os.getpid(), 9)",
            {"out_of_memory": "killed by signal 9, as Linux does when the host's memory is full"},
        ),
    ],
    ids=["a result", "an error", "a crash", "killed"],
)
def test_however_a_process_ends_something_is_known_of_it(script, result, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(bench_train_jobs, "CHILD", tmp_path / "child.py")
    bench_train_jobs.CHILD.write_text(script)
    assert bench_train_jobs.in_process_of_its_own({}, None, told.append) == result
    assert told == (["half"] if "half" in script else [])


def test_a_process_is_ended_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_train_jobs, "CHILD", tmp_path / "child.py")
    bench_train_jobs.CHILD.write_text("import time; time.sleep(600)")
    with pytest.raises(bench_train_jobs.OutOfTime):
        bench_train_jobs.in_process_of_its_own({}, 0.1, print)


def test_a_process_measures_the_device():
    found = bench_train_jobs.in_process_of_its_own({"what": "device", "matmul": 8, "copy_mib": 1}, None, print)
    assert found["kind"] == "cpu"
    assert min(found["matmul_flops"], found["copy_bytes"]) > 0


@pytest.mark.slow
def test_all_parts_run_on_a_tiny_model(tiny_run, tmp_path, capsys):
    def here(settings, seconds, tell):
        return bench_train_child.measure(settings, tell)

    file = tmp_path / "a.json"
    sizes = ["--batches", "4", "--most-rows", "4", "--matmul", "64", "--copy-mib", "1", "--steps", "1"]
    assert bench_train.main(["--config", tiny_run, *sizes, "--json", str(file)], here) == 0
    jobs = {name: job["result"] for name, job in json.loads(file.read_text())["jobs"].items()}
    update, decode = jobs["update tiny, float32 masters"], jobs["decode tiny, 4 rows"]
    # 8 rows of 8 + 4 tokens, of which the last 4 are predicted.
    assert (update["rows"], update["length"], update["counted"]) == (8, 12, 32)
    assert update["flops"] == bench_train_work.update_flops(SIZES, 8 * 12, 32, 8 * 12 * 13 // 2)
    assert set(update["seconds"]) == {"rollout", "logprob", "update"}
    # The first of three turns, of a token each, is not timed; the second's query is the second token made.
    weights, cached = (bench_train_work.weight_bytes(SIZES, 4), [4 * (8 + made) for made in (2, 3)])
    assert [turn["bytes"] for turn in decode["turns"]] == [
        weights + bench_train_work.cache_bytes(SIZES, tokens, 4) for tokens in cached
    ]
    peaks = [jobs[f"memory tiny, {head}, 4 rows"]["peak_bytes"] for head in ("reference", "fused")]
    assert min(peaks) > 0
    assert capsys.readouterr().out.count("nothing ran out of memory") == 2


@pytest.mark.parametrize("packing", [True, False])
def test_rows_of_sft_hold_documents_whose_last_tokens_predict_nothing(packing):
    config = tiny.config("sft", data={"packing": packing})
    documents, counts = bench_train_child.row_of(config, 10)
    assert documents == ([2, 3, 2, 3] if packing else [10])
    assert counts.tolist() == ([1, 0, 1, 1, 0, 1, 0, 1, 1, 0] if packing else [1] * 9 + [0])
