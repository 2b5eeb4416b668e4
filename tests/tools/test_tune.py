"""tools/tune.py: what it tries, what it refuses, what it notes; and its trials on kernels that run here.

No device is here: the trials' process is made up, or is given the xla engine in place of a GPU's kernels.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels.lm_head import Choice, choose_impl, target
from kernels.lm_head.gpu import engine as gpu_engine
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.tiles import SHARED_MEMORY, Tiles
from kernels.lm_head.tpu import engine as tpu_engine
from kernels.lm_head.tpu import tiles as tpu_tiles
from mllm.child_process import Ended
from tools import tune, tune_child

SHAPE = (8192, 2048, 151936)
UNKNOWN = "not measured on this device; tools/tune.py does"
RIGHT = dict.fromkeys(tune_child.TOLERANCE, 1e-5)


class Device:
    """Answers as the trials' process does: a time for each entry, or what `answer` says."""

    def __init__(self, entries, answer=lambda entry: 1.0, chunks=()):
        self.entries, self.answer, self.chunks, self.tried = entries, answer, chunks, []

    def start(self, task, seconds=None, tell=None, until=None):
        if task["task"] == "plan":
            [kind] = self.entries
            entries = {kind: self.chunks} if "tiles" in task else self.entries
            answer = {"device": "a device", "jax": "0.10.2", "table": "nowhere", "entries": entries}
            return Ended(0, False, [answer], "")
        answers = []
        for entry in task["entries"]:
            self.tried.append(entry)
            found = self.answer(entry)
            if isinstance(found, Ended):
                return dataclasses.replace(found, answers=answers)
            if isinstance(found, float):
                times = dict.fromkeys(tune.ON_GPU if task["kind"] == "gpu" else tune.deciding(task["kind"]), found)
                found = {"seconds": times, "xla_seconds": dict.fromkeys(times, 2.0), "errors": RIGHT}
            answers.append(found)
        return Ended(0, False, answers, "")


def gpu_entry(slots, **more):
    about = {"engine": "mosaic_gpu", "device": "a device", "features": 2048, "shape": list(SHAPE)}
    return {**about, "tiles": dataclasses.asdict(Tiles(slots=slots)), **more}


def tpu_entry(rows, kernel="weight"):
    about = {"device": "v6e", "kernel": kernel, "mean": False, "keep": False, "dtype": "bfloat16", "features": 2048}
    return {**about, "tiles": {"rows": rows, "columns": 512, "step": 512}}


@pytest.fixture
def table(tmp_path):
    return tmp_path / "tiles.json"


def run(monkeypatch, device, table, *arguments):
    monkeypatch.setattr(tune, "start", device.start)
    return tune.main(["--table", str(table), *arguments])


# --- the command


@pytest.mark.parametrize("fast", [4, 3])
def test_the_fastest_tiling_is_noted_with_its_times_and_only_with_write(monkeypatch, table, capsys, fast):
    device = Device(
        {"gpu": [gpu_entry(4), gpu_entry(3)]}, lambda entry: 1.0 if entry["tiles"]["slots"] == fast else 1.5
    )
    assert run(monkeypatch, device, table) == 0
    assert not table.exists()
    assert run(monkeypatch, device, table, "--write") == 0
    [entry] = json.loads(table.read_text())
    assert entry["tiles"] == dataclasses.asdict(Tiles(slots=fast))
    assert (entry["seconds"], entry["xla_seconds"], entry["by"], entry["shape"]) == (2.0, 4.0, "time", list(SHAPE))
    assert f"noted in {table}" in capsys.readouterr().out
    assert [path.name for path in table.parent.iterdir()] == ["tiles.json"]


@pytest.mark.parametrize(("seconds", "chunk"), [(0.9, 1024), (0.99, None)])
def test_a_smaller_chunk_is_noted_if_it_is_clearly_faster(monkeypatch, table, seconds, chunk):
    chunks = [gpu_entry(4, chunk=2048), gpu_entry(4, chunk=1024)]
    device = Device({"gpu": [gpu_entry(4)]}, lambda entry: seconds if entry.get("chunk") == 1024 else 1.0, chunks)
    assert run(monkeypatch, device, table, "--write") == 0
    assert json.loads(table.read_text())[0].get("chunk") == chunk


REFUSALS = {
    "is wrong": ({"refusal": "WRONG: dW 2.1e-02"}, "WRONG: dW 2.1e-02"),
    "ends the process": (
        Ended(-6, False, [], "Error: an illegal address"),
        "killed by SIGABRT: Error: an illegal address",
    ),
    "hangs": (Ended(None, False, [], ""), "stopped after 180 s"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_tiling_that_fails_is_listed_and_the_next_ones_are_tried(monkeypatch, table, capsys, name):
    answer, said = REFUSALS[name]
    entries = [tpu_entry(128), tpu_entry(256), tpu_entry(512)]
    device = Device({"weight": entries}, lambda entry: answer if entry["tiles"]["rows"] == 256 else 1.0)
    assert run(monkeypatch, device, table, "--write") == 0
    assert device.tried[:2] == entries[:2]
    assert device.tried[-1] == entries[2]
    assert json.loads(table.read_text())[0]["tiles"]["rows"] == 128
    assert sum(line.endswith(said) for line in capsys.readouterr().out.splitlines()) == 1


def test_without_a_right_tiling_the_table_stays_as_it_was(monkeypatch, table, capsys):
    table.write_text("[]")
    device = Device({"weight": [tpu_entry(128)]}, lambda entry: {"refusal": "no"})
    assert run(monkeypatch, device, table, "--write") == 2
    assert table.read_text() == "[]"
    assert capsys.readouterr().err == "error: no tiling was right, so none is noted\n"


def test_a_limit_leaves_tilings_out(monkeypatch, table, capsys):
    late = Device({"weight": [tpu_entry(128), tpu_entry(256)]})
    late.answer = lambda entry: 1.0 if entry["tiles"]["rows"] == 128 else Ended(None, True, [], "")
    monkeypatch.setattr(tune.time, "monotonic", iter([0.0, 1.0, 2.0, 3.0, 99.0, *[99.0] * 9]).__next__)
    assert run(monkeypatch, late, table, "--limit", "50", "--write") == 0
    assert "--limit: 1 tilings were left out" in capsys.readouterr().out
    assert len(json.loads(table.read_text())) == 1


def test_an_entry_replaces_that_for_the_same_subject_alone(monkeypatch, table):
    for entries in ([tpu_entry(128)], [tpu_entry(128, "hidden")], [tpu_entry(256)]):
        assert run(monkeypatch, Device({entries[0]["kernel"]: entries}), table, "--write") == 0
    found = [(entry["kernel"], entry["tiles"]["rows"]) for entry in json.loads(table.read_text())]
    assert found == [("hidden", 128), ("weight", 256)]


@pytest.mark.parametrize(("text", "said"), [("[{", "is not JSON"), ('[{"by": 1}]', "holds no list of tilings")])
def test_a_damaged_table_is_not_overwritten(monkeypatch, table, capsys, text, said):
    table.write_text(text)
    assert run(monkeypatch, Device({"weight": [tpu_entry(128)]}), table, "--write") == 2
    assert f"--table: {table} {said}" in capsys.readouterr().err
    assert table.read_text() == text


@pytest.mark.parametrize(("kind", "platform"), [("weight", "tpu"), ("gpu", "gpu")])
def test_what_is_noted_decides_which_engine_the_head_takes(monkeypatch, kind, platform):
    module, entry = (tpu_tiles, tpu_entry(128)) if platform == "tpu" else (gpu_tiles, gpu_entry(4))
    monkeypatch.setattr(target, "platform", lambda mesh=None: platform)
    monkeypatch.setattr(target, "device_kind", lambda: "a device")
    monkeypatch.setattr(tpu_tiles, "chip", lambda: "v6e")
    for engine in (tpu_engine, gpu_engine):
        monkeypatch.setattr(engine, "obstacle", lambda *_: None)

    def choice(*seconds, features=2048):
        trials = [{"entry": {**entry, "features": 2000 + n}, "kind": kind, **times(x)} for n, x in enumerate(seconds)]
        noted = [tune.as_noted(trial, {"shape": SHAPE}, "0.10.2") for trial in trials]
        monkeypatch.setattr(module, "_TABLE", noted)
        shapes = (jax.ShapeDtypeStruct((size, features), jnp.bfloat16) for size in (512, 1024))
        return choose_impl(*shapes)

    def times(seconds):
        return {key: dict.fromkeys(tune.ON_GPU, x) for key, x in (("seconds", seconds), ("xla_seconds", 2.0))}

    assert choice() == Choice("mosaic_tpu" if platform == "tpu" else "xla", UNKNOWN)
    assert choice(1.0) == Choice(f"mosaic_{platform}", "measured: 0.50 of xla's time")
    assert choice(3.0) == Choice("xla", f"measured: mosaic_{platform} takes 1.50 of its time")
    assert choice(3.0, 1.0).impl == f"mosaic_{platform}", "2001 is nearer to 2048"
    monkeypatch.setattr(tpu_tiles, "chip", lambda: "v7")
    monkeypatch.setattr(target, "device_kind", lambda: "another")
    assert choice(1.0, 3.0).reason == UNKNOWN


# --- the trials


@pytest.mark.parametrize("kind", tune.KINDS)
def test_every_tiling_for_a_tpu_fits_and_the_arithmetic_s_choice_is_the_first(kind):
    found = [tpu_tiles.Tiles(**entry["tiles"]) for entry in tune_child.tpu_entries(kind, SHAPE, "bfloat16", 99)]
    kernel, mean, keep, _ = tune.KINDS[kind]
    product, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    gradient = wide if kernel == "forward" else product
    case = tpu_tiles.Case(kernel, 8192, 151936, 2048, product, product, product, gradient, mean, keep)
    assert found[0] == tpu_tiles.best(case, tpu_tiles.vmem())
    assert max(sum(tpu_tiles.terms(case, tiles).values()) for tiles in found) < tpu_tiles.vmem()


def test_every_tiling_for_a_gpu_fits_and_chunks_are_smaller_than_the_rule_s():
    found = [Tiles(**entry["tiles"]) for entry in tune_child.gpu_entries(SHAPE, None)]
    assert found[0] == Tiles()
    assert max(map(gpu_tiles.shared_memory, found)) <= SHARED_MEMORY
    chunks = [entry["chunk"] for entry in tune_child.gpu_chunks(SHAPE, dataclasses.asdict(Tiles()))]
    assert 8448 > chunks[0] > gpu_tiles.choose(8192, 151936, 2048).chunk > chunks[-1]
    assert all(chunk % Tiles.columns == 0 for chunk in chunks)


def answers(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(tune_child, "LEAST", 0.0)


def test_a_correct_engine_has_times_and_no_errors(capsys, hasty):
    tune_child.time_entries([64, 16, 300], "bfloat16", "weight", [tpu_entry(128)], engine="xla", rounds=1)
    [answer] = answers(capsys)
    assert answer["errors"] == dict.fromkeys(tune_child.TOLERANCE, 0)
    assert set(answer["seconds"]) == set(answer["xla_seconds"]) == {"no workspace"}


def test_a_trial_runs_the_kernel_with_the_entry_s_tiles(capsys, monkeypatch):
    seen, choose = [], tpu_tiles.choose
    monkeypatch.setattr(tpu_tiles, "choose", lambda case: seen.append((case.kernel, choose(case))) or seen[-1][1])
    monkeypatch.setattr(tune_child, "medians", lambda calls, rounds: dict.fromkeys(calls, 1.0))
    entry = {**tpu_entry(128, "forward"), "device": tpu_tiles.chip(), "features": 128}
    entry["tiles"] = {"rows": 128, "columns": 128, "step": 128}
    with pltpu.force_tpu_interpret_mode():
        tune_child.time_entries([100, 128, 300], "bfloat16", "statistics", [entry])
    [answer] = answers(capsys)
    assert set(answer["errors"]) == {"loss", "statistics"}
    assert ("forward", tpu_tiles.Tiles(128, 128, 128)) in seen


@pytest.mark.parametrize(
    ("error", "tried"), [(ValueError("no"), 2), (jax.errors.JaxRuntimeError("INTERNAL: illegal address"), 1)]
)
def test_after_a_failure_on_the_device_the_process_ends(capsys, hasty, monkeypatch, error, tried):
    compiled = tune_child.compiled

    def fail(name, engine, entry, arrays):
        if entry is not None:
            raise error
        return compiled(name, engine, entry, arrays)

    monkeypatch.setattr(tune_child, "compiled", fail)
    tune_child.time_entries([64, 16, 300], "bfloat16", "statistics", [tpu_entry(128)] * 2, engine="xla", rounds=1)
    assert answers(capsys) == [{"refusal": f"{type(error).__name__}: {error}"}] * tried


SPOILED = {
    "loss": lambda loss, tokens, dh, dw: (loss * 1.001, tokens, (dh, dw)),
    "statistics": lambda loss, tokens, dh, dw: (loss, tokens._replace(lse=tokens.lse.at[:3].add(2e-3)), (dh, dw)),
    "dh": lambda loss, tokens, dh, dw: (loss, tokens, (dh.at[1].mul(3), dw)),  # a row without a label
    "dW": lambda loss, tokens, dh, dw: (loss, tokens, (dh, jnp.where(jnp.abs(dw) < 0.3, 1.1 * dw, dw))),
    "dh, NaN": lambda loss, tokens, dh, dw: (loss, tokens, (dh.at[5, 5].set(jnp.nan), dw)),
}


@pytest.fixture(scope="module")
def expected():
    arrays = tune_child.random_arrays([64, 16, 300], "bfloat16")
    return arrays, jax.jit(tune_child.program("no workspace", "xla"))(*arrays)


@pytest.mark.parametrize("name", SPOILED)
def test_a_small_fault_exceeds_the_tolerance(expected, name):
    arrays, (loss, tokens, gradients) = expected
    found = tune_child.compared(SPOILED[name](loss, tokens, *gradients), (loss, tokens, gradients), arrays)
    assert [key for key, x in found.items() if not x <= tune_child.TOLERANCE[key]] == [name.split(",")[0]]


@pytest.mark.parametrize("module", [tpu_tiles, gpu_tiles])
def test_the_table_that_is_shipped_can_be_read(module):
    for entry in tune.read_table(tune.Path(module.__file__).with_suffix(".json")):
        assert module.Tiles(**entry["tiles"])
