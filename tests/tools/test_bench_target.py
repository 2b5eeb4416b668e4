"""The head compiled for a TPU that isn't there: its table, and the reader of the compiler's listings.

The listings are in the TPU compiler's notation: a bundle a line, `>` for each loop around it, `LB` at a loop's header.
A branch and the four bundles behind it belong together.
"""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from mllm.plan import targets
from tools.bench import __main__ as bench
from tools.bench import target


def test_the_command_s_table_has_the_compiler_s_account_and_below_it_refusals_and_kernels(monkeypatch, capsys):
    def compile_listed(chip, program, arguments, folder):
        if "640 MiB" in arguments["method"]:
            raise ValueError("RESOURCE_EXHAUSTED: no room")
        return {"temp": 3 * 2**20, "peak": 2**30, "bytes": 7e9}

    monkeypatch.setattr(targets, "mesh", lambda name: None)
    monkeypatch.setattr(target, "compile_listed", compile_listed)
    monkeypatch.setattr(target, "read_folder", lambda *_, **__: [("dW", (100, 10, 0.9, 0))])
    chosen = ["mosaic_tpu, workspace 0", "chunked logits", "liger"]
    assert bench.main(["head", "--target", "v6e", "--shape", "512,256,1000", "--methods", *chosen]) == 0
    _, _, title, columns, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "N=512, D=256, V=1000"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (columns, *rows[:2])]
    assert cells[0] == list(target.COLUMNS)
    assert cells[1] == ["mosaic_tpu, workspace 0", "4", "4", "1.48", "1.48", "7.0", "3.0", "1024.0"]
    assert cells[2] == ["chunked logits", "4", "16", "1.48", "5.93", "7.0", "3.0", "1024.0"]
    assert rows[2:] == [
        "mosaic_tpu, workspace 0: dW, bundles 100, vmatmuls 10, mxu 90.0%, spills 0",
        "chunked logits: dW, bundles 100, vmatmuls 10, mxu 90.0%, spills 0",
        "chunked logits, workspace 640 MiB: refused: RESOURCE_EXHAUSTED: no room",
    ]


# --- the TPU compiler's listing

MATMUL = "%{0} = vmatmul.mubr.bf16.gmra.mxu{1} %v1"
IDLE = "%9 = vadd.f32 %v1, %v2"
OUTSIDE = ("", 0, IDLE, "")


def text(*bundles):
    """A listing of bundles (label, depth, operations, comment)."""
    lines = (
        f" {address:#6x} {label:2}: {'>' * depth} {{ {operations} }} /* {comment} */"
        for address, (label, depth, operations, comment) in enumerate(bundles)
    )
    return "\n".join(["LB: loop body", "", *lines])


def body(*operations, depth=1, region=1):
    """A loop of bundles with these operations; its branch back is in the fifth from its end."""
    rows = [["", depth, operation, ""] for operation in operations]
    rows[0][0], rows[0][3] = "LB", f"Start region {region}"
    rows[-5][2] += f" ;; %7 = sbr.rel (!%p1) target = $region{region}"
    return [tuple(row) for row in rows]


def matmuls(count, every, mxus=(0, 1), kind="bf16"):
    """`count` times a vmatmul on each MXU, in the first of every so many bundles."""
    both = " ;; ".join(MATMUL.format(10 + mxu, mxu).replace("bf16", kind) for mxu in mxus)
    return ([both] + [IDLE] * (every - 1)) * count


def skipped(*operations, region=50):
    """Bundles at depth 1 that a branch in front of them can skip."""
    start = [("", 1, f"%5 = sbr.rel (%p9) target = $region{region}", "")] + [("", 1, "", "")] * 4
    return [*start, *(("", 1, operation, "") for operation in operations), ("PF", 1, IDLE, f"Start region {region}")]


ROWS = body(*matmuls(10, 8))
SPILL, SCALAR = "%1 = vst [vmem:[#allocation7_spill] sm:$0xff] %v1", "%1 = sst [smem:[#allocation7_spill]] %s1"
INNER = body(SPILL, SPILL, SCALAR, *matmuls(5, 8), depth=2, region=2)


@pytest.mark.parametrize(
    ("bundles", "figures"),
    [
        (body(*matmuls(20, 8)), (160, 40, 1.0, 0)),
        (body(*matmuls(20, 10)), (200, 40, 0.8, 0)),
        (body(*matmuls(20, 8, mxus=(0,))), (160, 20, 0.5, 0)),  # a unit without work
        (body(*matmuls(20, 8, kind="f32")), (160, 40, 0.5, 0)),  # float32 keeps a unit half as long
        (body(*matmuls(20, 4)), (80, 40, 0.985, 0)),  # never above 1
        # Work for 80 cycles in 40 bundles, so the 40 bundles behind it come 40 cycles late.
        (body(*matmuls(10, 4), *[IDLE] * 40), (80, 20, 80 / 120, 0)),
        # The innermost loop with products, with its own spills of vector registers.
        ([("", 0, SPILL, ""), *body(*[IDLE] * 20)[:10], *INNER, *body(*[IDLE] * 20)[10:]], (43, 10, 0.93, 2)),
        # What a branch can skip counts if it holds products.
        ([*ROWS[:40], *skipped(*[IDLE] * 30), *ROWS[40:]], (86, 20, 0.93, 0)),
        ([*ROWS[:40], *skipped(*matmuls(4, 8)), *ROWS[40:]], (118, 28, 0.95, 0)),
        (body(*[IDLE] * 20), None),
        ([("", 0, matmuls(1, 1)[0], "")], None),
    ],
)
def test_a_kernel_s_figures_are_those_of_the_hot_loop(bundles, figures):
    found = target.read_kernel(text(OUTSIDE, *bundles, OUTSIDE), "v6e")
    assert found == (figures and pytest.approx(figures, abs=0.03))
    assert found is None or found[2] <= 1


def test_the_pallas_kernels_of_a_folder_count_and_where_there_are_none_xla_s_own(tmp_path):
    for name in ("2-head.3-01", "3-fusion-01"):
        (tmp_path / f"{name}-final_bundles.txt").write_text(text(*body(*matmuls(2, 8))))
    assert [name for name, _ in target.read_folder(tmp_path, "v6e")] == ["head", "fusion"]
    (tmp_path / "1-TLP-hlo.txt").write_text('  %head.3 = bf16[8] custom-call(), custom_call_target="tpu_custom_call"\n')
    assert [name for name, _ in target.read_folder(tmp_path, "v6e")] == ["head"]


def square(mesh, size=2048):
    """A program of one product, by XLA."""
    return jnp.matmul, (jax.ShapeDtypeStruct((size, size), jnp.bfloat16),) * 2


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
@pytest.mark.parametrize("chip", target.MXUS)
def test_xla_s_own_large_product_keeps_the_matrix_units_busy(chip, tmp_path):
    target.compile_listed(chip, f"{__file__}:square", {}, tmp_path)
    assert max(mxu for _, (_, _, mxu, _) in target.read_folder(tmp_path, chip)) > 0.93
