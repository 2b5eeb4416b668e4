"""tools/tune.py: the table of a sweep, what becomes of tilings that fail, and that all which it tries fit a device."""

from contextlib import nullcontext

import jax

from lm_head.gpu import tiles as gpu_tiles
from lm_head.tpu import tiles as tpu_tiles
from tools import tune
from tools.bench import measure

SHAPE = (8192, 2048, 151936)
ROUNDS = {"method": [3.0], "hW": [1.0], "gW": [1.0], "gh": [1.0]}
FIGURES = {"rounds": ROUNDS, "temp_bytes": 0, "errors": [0.0, 0.002], "products": 4, "flops": 1e12}


def test_the_fastest_tiling_is_first_and_one_that_fails_is_a_line_with_the_reason(monkeypatch, capsys):
    tried = [{"kernel": "weight", "rows": rows, "columns": 512, "step": 256} for rows in (128, 256, 512, 1024)]

    said = []

    def start(module, task, seconds, cache):
        said.append([line for line in capsys.readouterr().err.splitlines() if "best so far" in line])
        if "most" in task:
            return [{"impl": "mosaic_tpu", "kernel": "dW", "way": "workspace 0", "tilings": tried}], ""
        assert task["method"] == "mosaic_tpu, workspace 0"
        now[0] += 10
        rounds = {**ROUNDS, "method": [task["tiles"]["rows"] / -64 + 6]}
        return ([], "no room") if task["tiles"]["rows"] == 512 else ([{**FIGURES, "rounds": rounds}], "")

    now = [0]
    monkeypatch.setattr(tune, "start", start)
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])
    assert tune.main(["--limit", "35"]) == 0  # each takes ten
    best = [line.split("|")[-2].strip() for lines in said for line in lines]
    assert best == [f"best so far: rows={rows}, columns=512, step=256" for rows in (128, 256)]
    assert list(map(len, said)) == [0, 0, 1, 1], "as soon as a tiling was measured"
    _, title, columns, _, first, second, *refused = capsys.readouterr().out.splitlines()
    assert title == "mosaic_tpu, dW, by workspace 0"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (columns, first, second)]
    assert cells[0][:3] == ["tiles", "ms", "/three"]
    assert cells[1][:3] == ["rows=256, columns=512, step=256", "2000.00", "0.67"]
    assert cells[2][:3] == ["rows=128, columns=512, step=256", "4000.00", "1.33"]
    assert refused == ["refused: rows=512, columns=512, step=256: no room", "--limit: 1 tilings were left out"]


def chosen(tilings_found, choose):
    """The tiles that a kernel is traced with, for each tiling."""
    for tiles in tilings_found["tilings"]:
        with measure.traced_with(tiles):
            yield choose()


def test_every_tiling_fits_the_device_and_the_engine_s_own_choice_is_the_first(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    [found] = measure.tilings({"shape": SHAPE})
    sizes = [*chosen(found, lambda: gpu_tiles.choose(*SHAPE))]
    assert sizes[0].tiles == gpu_tiles.Tiles()
    assert max(gpu_tiles.shared_memory(each.tiles) for each in sizes) <= gpu_tiles.SHARED_MEMORY
    assert len({(each.tiles, each.chunk) for each in sizes}) == len(sizes) > len(measure.GPU_CHUNKS)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    narrow, wide = jax.numpy.dtype("bfloat16"), jax.numpy.dtype("float32")
    for found in measure.tilings({"shape": SHAPE, "most": 5}):
        kernel, mean, keep, _ = measure.TPU_KERNELS[found["kernel"]]
        gradient = wide if kernel == "forward" else narrow
        case = tpu_tiles.Case(kernel, 8192, 151936, 2048, narrow, narrow, narrow, gradient, mean, keep)
        each = [*chosen(found, lambda case=case: tpu_tiles.choose(case))]
        assert each[0] == tpu_tiles.choose(case)
        assert 1 < len(each) <= 5
        assert max(sum(tpu_tiles.terms(case, tiles).values()) for tiles in each) < tpu_tiles.vmem()


def test_a_method_is_traced_with_its_tiles(monkeypatch):
    seen = []
    monkeypatch.setattr(measure, "traced_with", lambda tiles: seen.append(tiles) or nullcontext())
    task = {"method": "full logits", "shape": [8, 8, 130], "dtype": "float32", "lives": [], "tiles": {"slots": 3}}
    assert (list(measure.main(task)), seen) == ([], [{"slots": 3}])
