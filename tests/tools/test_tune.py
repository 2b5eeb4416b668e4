"""tools/tune.py: the table of a sweep, what becomes of tilings that fail, and that all which it tries fit a device."""

import json

import jax

from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.tpu import tiles as tpu_tiles
from mllm.child_process import Ended
from tools import tune
from tools.bench import kernels

SHAPE = (8192, 2048, 151936)


def devices(monkeypatch, listed, answer):
    """Let processes answer as on a device: `--list` with `listed`, and a tiling's runs as `answer(tiles, timed)`."""
    commands = []

    def run(command, **_):
        commands.append(command)
        if "--list" in command:
            return Ended(0, False, [dict(listed)], "")
        found = answer(command[command.index("--tiles") + 1], "--timed" in command)
        return found if isinstance(found, Ended) else Ended(0, False, [found], "")

    monkeypatch.setattr(tune.child_process, "run", run)
    return commands


def test_a_tiling_has_its_time_and_errors_and_one_that_is_wrong_dies_or_hangs_is_a_line_with_the_reason(
    monkeypatch, capsys
):
    tilings = [{"rows": rows, "columns": 512, "step": 256} for rows in (128, 256, 512, 1024)]
    failures = {
        "rows=256": Ended(1, False, [{"dW": 0.02}], "WRONG: an error is past 0.01"),
        "rows=512": Ended(-6, False, [], "Error: an illegal address"),
        "rows=1024": Ended(None, True, [], ""),
    }

    def answer(tiles, timed):
        fails = failures.get(tiles.split(",")[0])
        if fails and not (timed and fails.late):
            return fails
        return {"ms": 9.5, "of bare products": 1.25, "TFLOP/s": 500.0} if timed else {"dh": 0.002, "dW": 0.003}

    commands = devices(monkeypatch, {"impl": "mosaic_tpu", "dW": tilings}, answer)
    assert tune.main(["--kernel", "dW"]) == 0
    head, first, *refused, fastest = capsys.readouterr().out.splitlines()
    assert head == "mosaic_tpu, dW: N,D,V = 8192,2048,151936"
    assert first.startswith("  rows=128, columns=512, step=256 ")
    assert first.endswith("9.50 ms   1.25 of bare products, errors up to 3.0e-03")
    reasons = [
        "WRONG: an error is past 0.01",
        "killed by SIGABRT: Error: an illegal address",
        "the time limit was reached",
    ]
    assert [line.partition("refused: ")[2] for line in refused] == reasons
    assert fastest == "  fastest: rows=128, columns=512, step=256"
    assert commands[1][-2:] == ["--shape", "512,2048,1496"]
    assert commands[2][-3:] == ["--shape", "8192,2048,151936", "--timed"]


def test_a_limit_leaves_tilings_out(monkeypatch, capsys):
    devices(
        monkeypatch, {"impl": "mosaic_gpu", "loss": [{"slots": 4}, {"slots": 3}]}, lambda *_: Ended(1, False, [], "no")
    )
    monkeypatch.setattr(tune.time, "monotonic", iter([0.0, 1.0, 99.0]).__next__)
    assert tune.main(["--limit", "50"]) == 0
    assert capsys.readouterr().out.endswith("refused: no\n--limit: 1 tilings were left out\n")


def test_every_tiling_fits_the_device_and_the_engine_s_own_choice_is_the_first(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = tune.tilings(SHAPE, [], 8)["loss"]
    sizes = [gpu_tiles.Sizes(gpu_tiles.Tiles(**{k: x[k] for k in x if k != "chunk"}), x["chunk"]) for x in found]
    assert sizes[0].tiles == gpu_tiles.Tiles()
    assert max(gpu_tiles.shared_memory(each.tiles) for each in sizes) <= gpu_tiles.SHARED_MEMORY
    assert len({json.dumps(x) for x in found}) == len(found) > len(tune.CHUNKS)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    found = tune.tilings(SHAPE, list(tune.TPU_KERNELS), 5)
    narrow, wide = jax.numpy.dtype("bfloat16"), jax.numpy.dtype("float32")
    for name, (kind, mean, keep) in tune.TPU_KERNELS.items():
        gradient = wide if kind == "forward" else narrow
        case = tpu_tiles.Case(kind, 8192, 151936, 2048, narrow, narrow, narrow, gradient, mean, keep)
        each = [tpu_tiles.Tiles(**x) for x in found[name]]
        assert each[0] == tpu_tiles.best(case, tpu_tiles.vmem())
        assert 1 < len(each) <= 5
        assert max(sum(tpu_tiles.terms(case, tiles).values()) for tiles in each) < tpu_tiles.vmem()


def test_a_kernel_runs_with_the_tiles_that_are_named(monkeypatch, capsys):
    seen, choose = [], tpu_tiles.choose
    monkeypatch.setattr(tpu_tiles, "choose", lambda case: seen.append((case.kernel, choose(case))) or seen[-1][1])
    tiles = ["--tiles", "rows=128,columns=256,step=128"]
    assert kernels.main(["--kernel", "dh", "--impl", "mosaic_tpu", "--shape", "256,128,296", *tiles]) == 0
    assert ("hidden", tpu_tiles.Tiles(128, 256, 128)) in seen
    assert 0 < json.loads(capsys.readouterr().out)["dh"] < 0.005
