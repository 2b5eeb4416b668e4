"""tools/bench and tools/tune.py: their tables, what could not be measured, a method's errors, turns and tilings."""

import math

import jax
import jax.numpy as jnp
import pytest

from lm_head.gpu import tiles as gpu_tiles
from lm_head.tpu import tiles as tpu_tiles
from tools import tune
from tools.bench import __main__ as bench
from tools.bench import head, logits, measure, methods
from tools.bench.methods import Method, fused, value_and_gradients

DEVICE = {"platform": "cpu", "kind": "cpu"}
METHOD = Method("any", value_and_gradients(fused(impl="full_logits")))


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_run_that_measures_nothing_fails(monkeypatch, capsys):
    failed = [], "RuntimeError: no"
    monkeypatch.setattr(head, "start", lambda _, task, *__: ([DEVICE], "") if not task else failed)
    assert bench.main(["head", "--methods", "optax"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: --shape, --methods: nothing could be measured")


def wrong(hidden, weight, labels, weights, *rest):
    value, dh, dw = METHOD.call(hidden, weight, labels, weights, *rest)
    return value * 1.01, dh.at[3, 5].add(0.5 * jnp.abs(dh).max()), dw.at[-1].set(jnp.nan)


NONE, BF16 = pytest.approx(0, abs=1e-5), pytest.approx(0, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "options", "expected"),
    [
        (value_and_gradients(methods.general()), {"general": True}, (NONE, NONE, NONE)),
        (methods.value_only(fused()), {}, (NONE,)),
        (methods.gradients_of_master(dtype=jnp.bfloat16), {}, (BF16, BF16, BF16)),
        (wrong, {}, (pytest.approx(0.01, rel=1e-3), pytest.approx(0.5, rel=1e-3), "nan")),
    ],
    ids=["any cotangents", "value only", "float32 master", "wrong"],
)
def test_a_method_s_errors_say_where_it_is_wrong_and_by_how_much(call, options, expected, monkeypatch):
    monkeypatch.setattr(measure, "methods", lambda _: [Method("any", call, **options)])
    task = {"method": "any", "shape": [24, 16, 130], "dtype": "float32", "lives": [0.5], "rounds": 1, "least": 0.0}
    [found] = measure.main(task)
    assert measure.live_rows(24, 0.5) == 12
    assert tuple("nan" if math.isnan(x) else x for x in found["errors"]) == expected


@pytest.mark.slow
def test_the_table_has_plain_jax_and_the_engine_and_the_check_holds_unless_a_number_is_off(monkeypatch, capsys):
    small = ["logits", "--shape", "8,300", "--rounds", "1"]
    assert bench.main(small) == 0
    assert [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[3:]] == ["plain JAX", "xla"]
    assert bench.main([*small, "--check"]) == 0
    right = logits.fused
    monkeypatch.setattr(logits, "fused", lambda *given, **options: right(*given, **options) + 1e-3)
    assert bench.main([*small, "--check"]) == 1


# tools/tune.py

SHAPE = (8192, 2048, 151936)


def test_the_fastest_tiling_is_first_and_one_that_fails_is_a_line_with_the_reason(monkeypatch, capsys):
    tried = [{"kernel": "weight", "rows": rows} for rows in (128, 256, 512)]
    own = {"temp_bytes": 0, "errors": [0.0, 0.002]}

    def start(module, task, seconds, cache):
        if "most" in task:
            return [{"impl": "mosaic_tpu", "kernel": "dW", "way": "workspace 0", "tilings": tried}], ""
        rows = task["tiles"]["rows"]
        rounds = {"method": [6 - rows / 64], "hW": [1.0], "gW": [1.0], "gh": [1.0]}
        return ([], "no room") if rows == 512 else ([{**own, "rounds": rounds}], "")

    monkeypatch.setattr(tune, "start", start)
    assert tune.main([]) == 0
    _, _, _, _, first, second, refused = capsys.readouterr().out.splitlines()
    assert cells(first)[:3] == ["rows=256", "2000.00", "0.67"]
    assert cells(second)[:3] == ["rows=128", "4000.00", "1.33"]
    assert refused == "refused: rows=512: no room"


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
