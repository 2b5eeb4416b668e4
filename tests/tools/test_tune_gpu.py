"""tools/tune.py on a GPU: what is tried, what counts as right, what is noted, and what becomes of a kernel that dies.

No kernel runs here: answers of the trials' process are made up, or come from small programs.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.tiles import SHARED_MEMORY, Sizes, Tiles
from tools import tune, tune_gpu, tune_gpu_child, tune_table
from tools.tune_gpu import Candidate, Worker

SHAPE = (8192, 2048, 151936)
RIGHT = dict.fromkeys(tune_gpu.TOLERANCE, 1e-5)


def seconds(total):
    return {"no workspace": 0.75 * total, "workspace": 0.5 * total, "value": 0.25 * total}


class Device:
    """Answers as the trials' process does: a time for each size, unless something is wrong with it."""

    def __init__(self, time=lambda tiles, chunk: 1.0, wrong=lambda tiles, chunk: {}, takes=1.0):
        self.time, self.wrong, self.takes, self.now, self.asked = time, wrong, takes, 0.0, []

    def ask(self, request):
        self.now += self.takes
        if "turns" in request:
            return {"seconds": [seconds(2.0)] + [seconds(self.of(self.time, x)) for x in request["turns"]]}
        self.asked.append(request["try"])
        answer = {"errors": RIGHT, "same": True, "seconds": seconds(self.of(self.time, request["try"]))}
        return answer | self.of(self.wrong, request["try"])

    def of(self, function, sizes):
        return function(Tiles(**sizes["tiles"]), sizes["chunk"])

    def tuned(self, limit=1e9, most=None):
        return tune_gpu.tune(SHAPE, self.ask, limit, most, clock=lambda: self.now)

    def noted(self):
        return tune_gpu.entry(self.tuned(), SHAPE, "a GPU")


# Candidates


def test_every_tiling_fits_a_blocks_shared_memory_and_the_default_is_the_first():
    tilings = tune_gpu.tilings()
    assert tilings[0] == Tiles()
    assert len(set(tilings)) == len(tilings)
    for tiles in tilings:
        assert gpu_tiles.shared_memory(tiles) <= SHARED_MEMORY == 227 * 1024


@pytest.mark.parametrize("columns", [256, 128])
def test_of_each_width_one_more_slot_would_not_fit(columns):
    most = max((tiles for tiles in tune_gpu.tilings() if tiles.columns == columns), key=lambda tiles: tiles.slots)
    assert gpu_tiles.shared_memory(dataclasses.replace(most, slots=most.slots + 1)) > SHARED_MEMORY


def test_the_rule_is_the_kernels_own_with_these_tiles(monkeypatch):
    monkeypatch.setattr(gpu_tiles, "_TABLE", [])
    assert tune_gpu.rule(Tiles(), SHAPE) == gpu_tiles.choose(8192, 151936, 2048)
    assert tune_gpu.rule(Tiles(slots=3), SHAPE).tiles == Tiles(slots=3)


@pytest.mark.parametrize("shape", [SHAPE, (100, 64, 1100)])
def test_chunks_are_whole_tiles_other_than_the_rules_and_the_nearest_is_the_first(shape):
    for tiles in tune_gpu.tilings():
        chunks, own = tune_gpu.chunks(tiles, shape), tune_gpu.rule(tiles, shape).chunk
        assert [x for x in chunks if x % tiles.columns or x >= shape[2] + tiles.columns] == []
        assert own not in chunks
        ratios = [max(chunk / own, own / chunk) for chunk in chunks]
        assert ratios == sorted(ratios)
    assert len(tune_gpu.chunks(Tiles(), SHAPE)) >= len(tune_gpu.CHUNKS) - 2


# Trials


def test_tilings_are_tried_first_and_then_chunks_for_the_fastest():
    device = Device(lambda tiles, chunk: 1.0 if tiles.cluster == 1 and tiles.slots == 4 else 2.0)
    found = device.tuned()
    tilings = len(tune_gpu.tilings())
    assert {asked["chunk"] for asked in device.asked[:tilings]} == {None}
    assert None not in {asked["chunk"] for asked in device.asked[tilings:]}
    assert {(x["tiles"]["cluster"], x["tiles"]["slots"]) for x in device.asked[tilings:]} == {(1, 4)}
    assert found.left_out == 0
    assert found.streaming == seconds(2.0)


def test_what_would_end_too_late_is_left_out_and_the_best_of_the_others_is_found():
    device = Device(takes=10.0)
    found = device.tuned(limit=55.0)
    assert len(device.asked) == 4
    assert device.now <= 55
    assert found.left_out == len(tune_gpu.tilings()) - 4 + len(tune_gpu.chunks(Tiles(), SHAPE))
    assert found.in_turns
    assert f"--limit: {found.left_out} candidates were left out" in tune_gpu.lines(found, SHAPE)


def test_no_more_than_asked_for_are_tried():
    device = Device()
    device.tuned(most=3)
    assert len(device.asked) == 3


WRONG = {
    "a gradient": ({"errors": RIGHT | {"dW": 0.021}}, "WRONG: dW 2.1e-02"),
    "NaN": ({"errors": RIGHT | {"dh": float("inf")}}, "WRONG: dh inf"),
    "bits that move": ({"same": False}, "WRONG: moves from call to call"),
    "the compiler": ({"refusal": "XlaRuntimeError: no registers"}, "XlaRuntimeError: no registers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_is_told_and_never_noted_however_fast(name):
    answer, said = WRONG[name]
    device = Device(
        lambda tiles, chunk: 0.1 if tiles.cluster == 1 else 1.0,
        lambda tiles, chunk: answer if tiles.cluster == 1 else {},
    )
    found = device.tuned()
    assert {trial.candidate.tiles.cluster for trial in found.in_turns} == {2}
    assert device.noted()["tiles"]["cluster"] == 2
    assert sum(line.endswith(said) for line in tune_gpu.lines(found, SHAPE)) >= 3


def test_without_a_right_candidate_nothing_is_timed_in_turns():
    found = Device(wrong=lambda *_: {"refusal": "it said nothing"}).tuned()
    assert found.in_turns == []
    assert "it said nothing" in list(tune_gpu.lines(found, SHAPE))[-1]


# The trials' process: a program that answers lines


def worker(code, patience=60.0):
    return Worker(SHAPE, patience, [sys.executable, "-c", f"import os, sys, time\nfor line in sys.stdin:\n {code}"])


def test_a_process_that_dies_is_an_answer_and_the_next_one_is_asked_the_next():
    with worker("os.write(2, b'Error: an illegal address\\n'); os.abort()") as one:
        for _ in range(2):
            assert one.ask({}) == {"refusal": "ended by SIGABRT: Error: an illegal address"}


def test_a_process_that_hangs_is_stopped():
    with worker("time.sleep(60)", patience=0.1) as one:
        assert one.ask({}) == {"refusal": "stopped after 0.1 s"}


@pytest.mark.parametrize(("spoilt", "same"), [("true", False), ("false", True)])
def test_a_process_is_asked_again_unless_it_is_spoilt(spoilt, same):
    with worker(f'print(\'{{"spoilt": {spoilt}, "pid": %d}}\' % os.getpid(), flush=True)') as one:
        assert (one.ask({})["pid"] == one.ask({})["pid"]) is same


@pytest.fixture(scope="module")
def trials():
    """Of streaming, as if it were the kernels; timed hastily."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_gpu_child, "LEAST", 0.0)
        patch.setattr(tune_gpu_child, "ROUNDS", 1)
        yield tune_gpu_child.Trials((64, 16, 300), 1 << 20, engine="xla")


SIZES = tune_gpu.as_json(Candidate(Tiles()))


def test_what_is_right_has_no_error_and_three_times(trials):
    answer = tune_gpu_child.answer(trials, {"try": SIZES})
    assert set(answer["errors"]) == set(tune_gpu.TOLERANCE)
    assert max(answer["errors"].values()) == 0
    assert answer["same"]
    assert set(answer["seconds"]) == set(tune_gpu.PROGRAMS)


def test_in_turns_the_first_is_streaming(trials):
    answer = tune_gpu_child.answer(trials, {"turns": [SIZES, SIZES]})
    assert [set(each) for each in answer["seconds"]] == [set(tune_gpu.PROGRAMS)] * 3


@pytest.mark.parametrize(("error", "spoilt"), [(ValueError("no"), False), (jax.errors.JaxRuntimeError("no"), True)])
def test_after_a_failure_on_the_device_the_process_is_spoilt(trials, monkeypatch, error, spoilt):
    def fail(*_):
        raise error

    monkeypatch.setattr(trials, "try_one", fail)
    answer = tune_gpu_child.answer(trials, {"try": SIZES})
    assert answer == {"refusal": f"{type(error).__name__}: no", "spoilt": spoilt}


SPOILT = {
    "a loss": lambda loss, tokens, dh, dw: (loss * 1.001, tokens, dh, dw),
    "a few lse": lambda loss, tokens, dh, dw: (loss, tokens._replace(lse=tokens.lse.at[:3].add(2e-3)), dh, dw),
    "a row of dh without a label": lambda loss, tokens, dh, dw: (loss, tokens, dh.at[1].mul(3), dw),
    "dW where it is small, as without a label": lambda loss, tokens, dh, dw: (
        loss,
        tokens,
        dh,
        jnp.where(jnp.abs(dw) < 0.3, 1.1 * dw, dw),
    ),
    "NaN": lambda loss, tokens, dh, dw: (loss, tokens, dh.at[5, 5].set(jnp.nan), dw),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_little_that_is_wrong_is_past_tolerance(trials, name):
    (loss, tokens), (dh, dw) = trials.right
    labels = trials.arrays[2]
    loss, tokens, dh, dw = SPOILT[name](loss, tokens, dh, dw)
    errors = tune_gpu_child.compared(((loss, tokens), (dh, dw)), trials.right, labels, 300)
    wrong = [key for key, x in errors.items() if not x <= tune_gpu.TOLERANCE[key]]
    assert wrong == [
        {"a loss": "loss", "a few lse": "statistics", "dW where it is small, as without a label": "dW"}.get(name, "dh")
    ]


# What is noted


def test_the_kernels_take_what_was_noted(monkeypatch):
    fast = Tiles(slots=3, cluster=1)
    noted = Device(lambda tiles, chunk: 1.0 if tiles == fast else 1.5).noted()
    monkeypatch.setattr(gpu_tiles, "_TABLE", [noted])
    monkeypatch.setattr(gpu_tiles.target, "device_kind", lambda: "a GPU")
    assert gpu_tiles.choose(8192, 151936, 2048).tiles == fast
    assert gpu_tiles.faster(2048)
    assert (noted["seconds"], noted["streaming_seconds"]) == (1.0, 2.0)
    monkeypatch.setattr(gpu_tiles, "_TABLE", [Device(lambda *_: 2.5).noted()])
    assert not gpu_tiles.faster(2048)


@pytest.mark.parametrize(
    ("times", "chunk", "taken"),
    [
        ({1024: 0.9}, 1024, 0.9),
        ({1024: 0.99}, None, 1.0),  # not clearly
        ({8448: 0.5}, None, 1.0),  # takes more memory
        ({8448: 0.5, 1024: 0.8}, 1024, 0.8),
    ],
)
def test_a_chunk_is_noted_that_is_clearly_faster_and_not_larger(times, chunk, taken, monkeypatch):
    monkeypatch.setattr(tune_gpu, "rule", lambda tiles, shape: Sizes(tiles, 2048))
    device = Device(lambda tiles, chunk: times.get(chunk, 1.0))
    assert device.noted().get("chunk") == chunk
    assert device.noted()["seconds"] == taken
    told = [line for line in tune_gpu.lines(device.tuned(), SHAPE) if line.startswith("not noted: chunk 8448")]
    assert bool(told) is (8448 in times)


def test_an_entry_replaces_that_of_the_same_device_and_hidden_size():
    one, again, wide, other = (
        {"engine": "mosaic_gpu", "device": device, "features": features, "by": "time", "seconds": number}
        for number, (device, features) in enumerate([("a", 896), ("a", 896), ("a", 2048), ("b", 896)])
    )
    assert tune_table.merged([one, wide, other], [again], tune_gpu.SUBJECT) == [wide, again, other]


def test_the_table_that_is_shipped_can_be_read():
    path = tune_gpu.Path(gpu_tiles.__file__).with_suffix(".json")
    for noted in tune_table.read(path, tune_gpu.SUBJECT):
        assert gpu_tiles.shared_memory(Tiles(**noted["tiles"])) <= SHARED_MEMORY
        assert min(noted["seconds"], noted["streaming_seconds"]) > 0


# The command


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU, as far as the command can tell."""
    device = Device()
    monkeypatch.setattr(tune.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tune_gpu.target, "no_hopper", lambda: None)
    monkeypatch.setattr(tune_gpu.target, "device_kind", lambda: "a GPU")
    monkeypatch.setattr(tune_gpu.Worker, "ask", lambda self, request: device.ask(request))
    return device


def tuned(path, *arguments):
    return tune.main(["--shape", "8192,2048,151936", "--table", str(path), *arguments])


def test_on_a_gpu_the_command_writes_the_table_only_if_asked_to(gpu, tmp_path, capsys):
    table = tmp_path / "gpu_tiles.json"
    assert tuned(table) == 0
    assert not table.exists()
    assert tuned(table, "--write") == 0
    [noted] = json.loads(table.read_text())
    assert (noted["device"], noted["features"], noted["by"], noted["shape"]) == ("a GPU", 2048, "time", list(SHAPE))
    assert f"noted in {table}" in capsys.readouterr().out


def test_where_no_candidate_is_right_the_table_stays_and_a_line_says_so(gpu, tmp_path, capsys):
    gpu.wrong = lambda *_: {"same": False}
    (tmp_path / "gpu_tiles.json").write_text("[]")
    assert tuned(tmp_path / "gpu_tiles.json", "--write") == 2
    assert (tmp_path / "gpu_tiles.json").read_text() == "[]"
    assert "error: no candidate was right, so none is noted\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--dtype float32", "--dtype: float32: the kernels for GPUs multiply in bfloat16"),
        ("--kernel wave", "--kernel: on a GPU the kernels are tried together"),
        (
            "--shape 64,12,300",
            "--shape: mosaic_gpu can't run here: weight is 300 x 12, and the kernels want multiples of 8 x 64",
        ),
        ("--limit 0", "--limit: 0.0 is no number of seconds above 0"),
        ("--table nowhere/gpu_tiles.json", "--table: there is no folder nowhere"),
    ],
)
def test_what_has_no_meaning_on_a_gpu_is_refused_in_one_line(arguments, said, gpu, capsys):
    assert tune.main(arguments.split()) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_another_gpu_than_hopper_is_refused(gpu, monkeypatch, capsys):
    monkeypatch.setattr(tune_gpu.target, "no_hopper", lambda: "this one has compute capability 8.0")
    assert tune.main([]) == 2
    assert capsys.readouterr().err == "error: --shape: mosaic_gpu can't run here: this one has compute capability 8.0\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--target h100", "--target: h100: GPUs can't be ranked without one; run this on it, without --target"),
        ("--target v6e --limit 5", "--limit: is for GPUs; here --most bounds the work"),
    ],
)
def test_without_one_a_line_says_that_it_takes_a_gpu(arguments, said, capsys):
    assert tune.main(arguments.split()) == 2
    assert capsys.readouterr().err == f"error: {said}\n"
