"""The benchmark's table for a TPU that isn't there: its arithmetic, and what it shows. Needs no compiler."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from kernels.aot import work
from kernels.aot.listing import Kernel
from kernels.aot.work import Part
from tools import bench_target
from tools.bench_target import RATES, Row, row, show

ROOT = Path(__file__).parent.parent
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


def test_work_that_is_unknown_leaves_the_compiler_s_figures() -> None:
    found = row("any", "v6e", SHAPE, ACCOUNT, None, [])
    assert found == Row("any", temp_bytes=3 * 2**20, peak_bytes=2**30)


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


@pytest.mark.parametrize(
    ("method", "products"),
    [("full logits", 3), ("optax on full logits", 3), ("scan over 256 tokens, checkpointed", 4)],
)
def test_products_of_what_one_would_write_are_counted_in_the_traced_program(method: str, products: int) -> None:
    mesh = jax.make_mesh((1,), ("chip",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    tokens, features, vocabulary = SHAPE
    function, arguments = bench_target.programme(
        mesh, method=method, tokens=tokens, features=features, vocabulary=vocabulary
    )
    parts = work.parts(function, arguments)
    assert parts is not None
    assert [(part.name, part.flops) for part in parts] == [("XLA", products * PRODUCT)]


def test_a_target_that_is_unknown_is_refused_in_a_line() -> None:
    command = [sys.executable, "tools/bench.py", "--target", "v9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "argument --target: invalid choice: 'v9'" in done.stderr
