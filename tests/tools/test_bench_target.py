"""The benchmark's table for a TPU that isn't there: its arithmetic, and what it shows. Needs no compiler."""

import itertools
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mllm.plan import work
from mllm.plan.listing import Kernel
from mllm.plan.work import Part
from tools.bench import target as bench_target
from tools.bench.target import RATES, Row, row, show

ROOT = Path(__file__).parent.parent.parent
SHAPE = (512, 256, 1000)
PRODUCT = 2 * 512 * 256 * 1000
ACCOUNT = {"temp": 3 * 2**20, "peak": 2**30}
RATE, BANDWIDTH = RATES["v6e"]


def kernel(name: str, mxu: float) -> Kernel:
    return Kernel(
        name, bundles=100, skippable=0, vmatmuls=10, mxu=mxu, step=None, spills=0, fills=0, vmem=0, vmem_spilled=0
    )


def test_a_kernel_s_bound_is_its_mxu_time_as_listed_or_its_traffic_and_bounds_add_up() -> None:
    parts = [Part("busy", 3 * PRODUCT, 10), Part("starved", PRODUCT, 10**12), Part("XLA", PRODUCT, 10)]
    found = row("any", "v6e", SHAPE, ACCOUNT, parts, [kernel("busy", 0.5), kernel("starved", 0.5)])
    assert found.products == 5
    assert found.moved_bytes == 10**12 + 20
    assert found.bound_seconds == pytest.approx(3 * PRODUCT / (0.5 * RATE) + 10**12 / BANDWIDTH + PRODUCT / RATE)


def test_the_mxu_s_use_is_flops_over_the_cycles_that_they_take() -> None:
    parts = [Part("slow", PRODUCT, 0), Part("fast", 3 * PRODUCT, 0), Part("XLA", PRODUCT, 0)]
    found = row("any", "v6e", SHAPE, ACCOUNT, parts, [kernel("slow", 0.5), kernel("fast", 1.0)])
    assert found.mxu == pytest.approx(4 / (1 / 0.5 + 3 / 1.0))


def test_products_of_xla_share_the_work_alike_and_are_no_faster_than_listed() -> None:
    found = row("any", "v6e", SHAPE, ACCOUNT, [Part("XLA", 2 * PRODUCT, 0)], [], [kernel("a", 0.5), kernel("b", 1.0)])
    assert found.bound_seconds == pytest.approx(PRODUCT / (0.5 * RATE) + PRODUCT / RATE)
    assert found.mxu == pytest.approx(2 / 3)
    assert found.kernels == {}


def test_work_that_is_unknown_leaves_the_compiler_s_figures() -> None:
    found = row("any", "v6e", SHAPE, ACCOUNT, None, [])
    assert found == Row("any", temp_bytes=3 * 2**20, peak_bytes=2**30)


def test_kernels_are_listed_one_by_one_whether_or_not_their_work_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [kernel("dW", 0.9), kernel("forward", 0.75)]
    show([row("known", "v6e", SHAPE, ACCOUNT, [Part("dW", PRODUCT, 10), Part("forward", PRODUCT, 10)], listed)])
    show([row("unknown", "v6e", SHAPE, ACCOUNT, None, listed)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "90.0%" in line] == [
        "known: dW 90.0%, forward 75.0%",
        "unknown: dW 90.0%, forward 75.0%",
    ]


def test_the_table_says_where_each_column_comes_from_and_of_no_figure_that_it_is_a_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        row("known", "v6e", SHAPE, ACCOUNT, [Part("XLA", 4 * PRODUCT, 10**9)], []),
        row("unknown", "v6e", SHAPE, ACCOUNT, None, []),
        Row("large", refused="RESOURCE_EXHAUSTED: no room"),
    ]
    show(rows)
    columns, sources, known, unknown, large = capsys.readouterr().out.splitlines()
    assert columns.split() == ["products", "moved", "GB", "temp", "MiB", "peak", "MiB", "MXU", "bound", "ms"]
    assert sources.split() == ["[arithmetic]"] * 2 + ["[compiler]"] * 2 + ["[listing]", "[estimate]"]
    assert known.split() == ["known", "4.00", "1.0", "3.0", "1024", "-", "0.6"]
    assert unknown.split() == ["unknown", "?", "?", "3.0", "1024", "?", "?"]
    assert large.split() == ["large", "refused:", "RESOURCE_EXHAUSTED:", "no", "room"]


@pytest.mark.parametrize("of_features", [1, 4])
def test_tokamax_moves_its_operands_once_a_turn_and_its_sums_to_and_fro(of_features: int) -> None:
    of_tokens, of_columns = 2, 3
    forward, backward = bench_target.work_of_tokamax(SHAPE, [(2, 3, of_features), (2, 3, 2, of_features)])
    assert (forward.flops, backward.flops) == (PRODUCT, 3 * PRODUCT)

    def moved(passes: int) -> int:
        """Of bfloat16 blocks, where one that is there already isn't fetched."""
        total, there = 0, {}
        for turn in itertools.product(*map(range, (of_tokens, of_columns, passes, of_features))):
            i, j, _, k = turn
            for name, block, size in (("h", (i, k), 512 * 256 / 2), ("W", (k, j), 1000 * 256 / 3)):
                total += 0 if there.get(name) == block else 2 * size / of_features
                there[name] = block
        return round(total)

    assert forward.bytes == moved(1)
    assert backward.bytes == moved(2) + 4 * ((3 + 2) * 512 * 256 + (2 + 1) * 1000 * 256)


@pytest.mark.parametrize(
    ("method", "products"),
    [("full logits", 3), ("optax on full logits", 3), ("scan over 256 tokens, checkpointed", 4)],
)
def test_products_of_what_one_would_write_are_counted_in_the_traced_program(method: str, products: int) -> None:
    mesh = jax.make_mesh((1,), ("chip",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    tokens, features, vocabulary = SHAPE
    function, arguments = bench_target.program(
        mesh, method=method, tokens=tokens, features=features, vocabulary=vocabulary
    )
    parts = work.parts(function, arguments)
    assert parts is not None
    assert [(part.name, part.flops) for part in parts] == [("XLA", products * PRODUCT)]


def test_the_process_that_compiles_finds_the_programs_from_any_folder(tmp_path: Path) -> None:
    program = f"from mllm.plan import targets; targets.program({bench_target.__file__ + ':program'!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_reason_of_a_refusal_stands_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, method: str, **__: object) -> None:
        raise ValueError(f"XlaRuntimeError: RESOURCE_EXHAUSTED: no room for {method}")

    monkeypatch.setattr(bench_target.listing, "read", refuse)
    show(bench_target.table("v6e", SHAPE))
    assert "full logits" in (said := capsys.readouterr().out)
    assert "refused: XlaRuntimeError: RESOURCE_EXHAUSTED: no room for full logits\n" in said


def test_a_target_that_is_unknown_is_refused_in_a_line() -> None:
    command = [sys.executable, "tools/bench/head.py", "--target", "v9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "argument --target: invalid choice: 'v9'" in done.stderr
