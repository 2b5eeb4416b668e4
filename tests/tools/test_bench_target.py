"""The head's benchmark for a TPU that isn't there: its arithmetic, and its table. Needs no compiler."""

import subprocess
import sys

import jax
import pytest

from mllm.plan import targets, work
from mllm.plan.listing import Kernel
from mllm.plan.work import Part
from tools.bench import target
from tools.bench.target import row, show

SHAPE = (512, 256, 1000)
PRODUCT = 2 * 512 * 256 * 1000
ACCOUNT = {"temp": 3 * 2**20, "peak": 2**30}
RATE, BANDWIDTH = targets.RATES["v6e"]


def kernel(name: str, mxu: float) -> Kernel:
    return Kernel(name, bundles=100, vmatmuls=10, mxu=mxu, spills=0)


def test_the_bound_sums_each_kernel_s_mxu_time_or_traffic() -> None:
    parts = [Part("busy", 3 * PRODUCT, 10), Part("starved", PRODUCT, 10**12), Part("XLA", PRODUCT, 10)]
    found = row("any", "v6e", SHAPE, ACCOUNT, parts, [kernel("busy", 0.5), kernel("starved", 0.5)])
    assert (found["products"], found["moved GB"]) == (5, (10**12 + 20) / 1e9)
    assert found["bound ms"] == pytest.approx(1e3 * (3 * PRODUCT / (0.5 * RATE) + 10**12 / BANDWIDTH + PRODUCT / RATE))


def test_the_mxu_s_use_weighs_kernels_by_their_flops_and_xla_s_products_alike() -> None:
    parts = [Part("slow", PRODUCT, 0), Part("fast", 3 * PRODUCT, 0), Part("XLA", PRODUCT, 0)]
    found = row("any", "v6e", SHAPE, ACCOUNT, parts, [kernel("slow", 0.5), kernel("fast", 1.0)])
    assert found["MXU"] == pytest.approx(4 / (1 / 0.5 + 3 / 1.0))
    found = row("any", "v6e", SHAPE, ACCOUNT, [Part("XLA", 2 * PRODUCT, 0)], [], [kernel("a", 0.5), kernel("b", 1.0)])
    assert found["bound ms"] == pytest.approx(1e3 * (PRODUCT / (0.5 * RATE) + PRODUCT / RATE))
    assert (found["MXU"], found["kernels"]) == (pytest.approx(2 / 3), {})


def test_the_table_names_each_column_s_source_and_marks_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("known", "v6e", SHAPE, ACCOUNT, [Part("XLA", 4 * PRODUCT, 10**9)], []),
        row("unknown", "v6e", SHAPE, ACCOUNT, None, [kernel("dW", 0.9), kernel("forward", 0.75)]),
        {"method": "large", "refused": "RESOURCE_EXHAUSTED: no room"},
    ]
    show(rows)
    columns, sources, known, unknown, large, kernels = capsys.readouterr().out.splitlines()
    assert columns.split() == ["products", "moved", "GB", "temp", "MiB", "peak", "MiB", "MXU", "bound", "ms"]
    assert sources.split() == ["[arithmetic]"] * 2 + ["[compiler]"] * 2 + ["[listing]", "[estimate]"]
    assert known.split() == ["known", "4.00", "1.0", "3.0", "1024", "-", "0.6"]
    assert unknown.split() == ["unknown", "?", "?", "3.0", "1024", "?", "?"]
    assert large.split() == ["large", "refused:", "RESOURCE_EXHAUSTED:", "no", "room"]
    assert kernels == "unknown: dW 90.0%, forward 75.0%"


@pytest.mark.parametrize(("method", "products"), [("full logits", 3), ("scan over 256 tokens, recomputed", 4)])
def test_products_of_plain_jax_are_counted_in_the_traced_program(method: str, products: int) -> None:
    mesh = jax.make_mesh((1,), ("chip",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    tokens, features, vocabulary = SHAPE
    function, arguments = target.program(mesh, method=method, tokens=tokens, features=features, vocabulary=vocabulary)
    parts = work.parts(function, arguments)
    assert parts is not None
    assert [(part.name, part.flops) for part in parts] == [("XLA", products * PRODUCT)]


def test_the_process_that_compiles_finds_the_programs_from_any_folder(tmp_path) -> None:
    program = f"from mllm.plan import targets; targets.program({target.__file__ + ':program'!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_reason_of_a_refusal_stands_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, method: str, **__: object) -> None:
        raise ValueError(f"RESOURCE_EXHAUSTED: no room for {method}")

    monkeypatch.setattr(target.listing, "read", refuse)
    show(target.table("v6e", SHAPE))
    assert "refused: RESOURCE_EXHAUSTED: no room for full logits\n" in capsys.readouterr().out
