"""tools/tune.py tries tilings that fit, ranks them, and notes the best where tiles.py finds it."""

import dataclasses
import importlib.util
import json
import math

import jax
import pytest
from strict_tpu import strict_interpreter

from kernels.lm_head.tpu import tiles
from kernels.lm_head.tpu.tiles import Tiles
from mllm.plan.listing import Kernel
from tools import tune, tune_table

V6E = tune.Chip("v6e", 128 * 2**20, 920e12, 1640e9)
SHAPE = "2048,1024,151936"

every_kind = pytest.mark.parametrize("kind", tune.KINDS)


def case_of(kind, *, tokens=2048, features=1024, vocabulary=151936, dtype="bfloat16"):
    return tune.case_of(kind, tokens, features, vocabulary, dtype)


def kernel(name, mxu):
    return Kernel(
        name, bundles=1, skippable=0, vmatmuls=1, mxu=mxu, step=None, spills=0, fills=0, vmem=0, vmem_spilled=0
    )


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that keeps the MXUs the busier, the more columns a tile has, and refuses 1024 rows."""

    def read(target, program, *, tile, kind, **_):
        if tile["rows"] == 1024:
            raise ValueError("E1001: no room in VMEM")
        mxu = 0.5 + tile["columns"] / 8192
        return {}, [kernel("head_kept_weight_gradient", mxu), kernel(f"head_{tune.KINDS[kind][0]}_mean", mxu)]

    monkeypatch.setattr(tune.listing, "read", read)
    monkeypatch.setattr(tune, "chip_of", lambda target: V6E)


def tuned(path, *arguments):
    return tune.main(["--shape", SHAPE, "--table", str(path), *arguments])


def read(path):
    return tune_table.read(path, tune.SUBJECT)


def refused(capsys, *arguments):
    assert tune.main(list(arguments)) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors


# Candidates


@every_kind
@pytest.mark.parametrize("dtype", tune.PASSES)
def test_every_candidate_fits_and_the_arithmetics_choice_is_the_first(kind, dtype):
    case = case_of(kind, dtype=dtype)
    promising = tune.promising(case, V6E)
    assert promising[0] == tiles.best(case, V6E.vmem)
    for tile in promising:
        for part in tune.kernels(case):
            assert sum(tiles.terms(part, tile).values()) < V6E.vmem


def test_after_it_the_bound_decides():
    case = case_of("weight")
    bounds = [tune.bound(case, tile, V6E) for tile in tune.promising(case, V6E)[1:]]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1]


def test_the_bound_is_that_of_the_products_or_of_the_traffic():
    case, large, small = case_of("weight"), Tiles(512, 2048, 512), Tiles(128, 128, 128)
    products = 2 * 2 * 2048 * 1024 * 151936 / 920e12
    assert tune.bound(case, large, V6E) == pytest.approx(products)
    assert tune.bound(case, large, V6E, use=(0.5,)) == pytest.approx(2 * products)
    assert tune.bound(case, small, V6E) == pytest.approx(tiles.traffic(case, small) / 1640e9)
    assert tune.bound(case, small, V6E) > 2 * products


def test_a_wave_is_the_two_kernels_that_share_its_tiles():
    case, tile = case_of("wave"), Tiles(512, 2048, 512)
    assert [part.kernel for part in tune.kernels(case)] == ["forward", "kept"]
    assert tune.flops(case) / 2 == tune.flops(tune.kernels(case)[1]) == 2 * 1024 * 1024 * 151936
    assert tune.bound(case, tile, V6E) == sum(tune.bound(part, tile, V6E) for part in tune.kernels(case)[1:]) + max(
        tune.flops(case) / 920e12, tiles.traffic(case, tile) / 1640e9
    )


# Trials


@every_kind
@pytest.mark.parametrize("dtype", tune.PASSES)
def test_what_is_timed_is_the_kernel_itself(kind, dtype, monkeypatch):
    monkeypatch.setattr(tune, "CALLS", 1)
    case = case_of(kind, tokens=130, features=128, vocabulary=300, dtype=dtype)
    traced = jax.make_jaxpr(tune.call_of(case, Tiles(128, 256, 128)))(*tune.shapes_of(case, Tiles(128, 256, 128)))
    names = str(traced)
    assert all(f"head_{part.kernel}" in names for part in tune.kernels(case))
    assert names.count("pallas_call[") == len(tune.kernels(case))


def test_time_is_measured_on_the_default_device():
    with strict_interpreter():
        trial = tune.timed(case_of("forward", tokens=100, features=128, vocabulary=300), Tiles(128, 256, 128))
    assert 0 < trial.seconds < math.inf


def test_the_busiest_tiling_is_the_best_and_a_refused_one_the_last(compiler):
    trials = tune.tune("forward", case_of("forward"), V6E, "v6e", most=100)
    assert trials[0].tiles.columns == 2048
    assert trials[0].mxu == 0.75
    assert trials[-1].tiles.rows == 1024
    assert trials[-1].seconds == math.inf
    assert trials[-1].refusal == "E1001: no room in VMEM"


def test_no_more_than_asked_for_are_tried(compiler):
    assert len(tune.tune("forward", case_of("forward"), V6E, "v6e", most=3)) == 3


def test_the_table_says_that_nothing_was_timed(compiler, tmp_path, capsys):
    assert tuned(tmp_path / "tiles.json", "--target", "v6e", "--kernel", "weight") == 0
    out = capsys.readouterr().out
    assert "by the compiler's listing; nothing was timed" in out
    assert "bound ms" in out
    assert "refused: E1001: no room in VMEM" in out
    assert not (tmp_path / "tiles.json").exists()


# The file


def test_tiles_py_takes_what_was_noted(compiler, tmp_path, monkeypatch):
    assert tuned(tmp_path / "tiles.json", "--target", "v6e", "--most", "99", "--write") == 0
    entries = json.loads((tmp_path / "tiles.json").read_text())
    assert len(entries) == len(tune.KINDS)
    monkeypatch.setattr(tiles, "_TABLE", entries)
    monkeypatch.setattr(tiles, "chip", lambda: "v6e")
    monkeypatch.setattr(tiles, "vmem", lambda: V6E.vmem)
    noted = {tune_table.subject(entry, tune.SUBJECT): entry["tiles"] for entry in entries}
    chosen = {kind: tiles.choose(case_of(kind)) for kind in tune.KINDS}
    for kind, tile in chosen.items():
        assert dataclasses.asdict(tile) == noted[tune_table.subject(entry_of("listing", kind=kind), tune.SUBJECT)]
    assert chosen != {kind: tiles.best(case_of(kind), V6E.vmem) for kind in tune.KINDS}


def entry_of(by, seconds=1.0, kind="weight"):
    return tune.entry(case_of(kind), V6E, tune.Trial(Tiles(512, 1024, 512), seconds), by)


def test_a_rank_never_replaces_a_measurement_but_anything_else_is_replaced():
    for before, after, stays in [
        ("time", "listing", True),
        ("time", "time", False),
        ("listing", "time", False),
        ("listing", "listing", False),
    ]:
        old, new = entry_of(before, 1.0), entry_of(after, 2.0)
        assert tune_table.merged([old], [new], tune.SUBJECT) == [old if stays else new]


def test_entries_of_other_kernels_stay(tmp_path):
    table = tmp_path / "tiles.json"
    tune_table.write(table, [entry_of("time", kind="hidden")])
    tune_table.write(table, tune_table.merged(read(table), [entry_of("listing")], tune.SUBJECT))
    assert [e["kernel"] for e in read(table)] == ["hidden", "weight"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiles.json"]


def test_the_table_that_is_shipped_can_be_read():
    for noted in read(tune.Path(tiles.__file__).with_suffix(".json")):
        assert noted["by"] in ("time", "listing")
        assert Tiles(**noted["tiles"]).step <= noted["tiles"]["columns"]


# What it refuses


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "--target: there is no TPU or GPU here; name a TPU to compile for: v5e, v5p, v6e, tpu7x"),
        ("--shape 1,2", "--shape: '1,2' is not N,D,V"),
        ("--shape 1,0,2", "--shape: '1,0,2' is not N,D,V"),
        ("--dtype float16", "--dtype: 'float16' is not bfloat16 or float32"),
        ("--kernel wave dW", "--kernel: there is no 'dW'; there are statistics, forward"),
        ("--most 0", "--most: 0"),
        ("--target v9", "--target: "),
        ("--table nowhere/tiles.json", "--table: there is no folder nowhere"),
    ],
)
def test_a_bad_argument_is_named_in_one_line(arguments, said, capsys):
    assert said in refused(capsys, *arguments.split())


def test_a_damaged_table_is_not_overwritten(compiler, tmp_path, capsys):
    table = tmp_path / "tiles.json"
    table.write_text("[{")
    assert f"--table: {table} is not JSON" in refused(capsys, "--table", str(table), "--target", "v6e", "--write")
    assert table.read_text() == "[{"


def test_a_folder_is_no_table(tmp_path, capsys):
    assert f"--table: {tmp_path} can't be read: " in refused(capsys, "--table", str(tmp_path), "--target", "v6e")


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"tiles": {}}]'])
def test_json_that_is_no_table_is_refused(text, tmp_path, capsys):
    (tmp_path / "tiles.json").write_text(text)
    assert "holds no list of tilings" in refused(capsys, "--table", str(tmp_path / "tiles.json"), "--target", "v6e")


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
def test_the_compilers_listing_ranks_the_kernels_of_a_wave(tmp_path, capsys):
    arguments = ("--shape", "512,256,4096", "--target", "v6e", "--kernel", "wave", "--most", "1", "--write")
    assert tune.main([*arguments, "--table", str(tmp_path / "tiles.json")]) == 0
    [noted] = read(tmp_path / "tiles.json")
    assert (noted["device"], noted["by"], noted["keep"]) == ("v6e", "listing", True)
    assert "refused" not in capsys.readouterr().out
