"""What is read from a compiler's listing, of listings that are small enough to count by hand; and XLA's own product.

The listings are in the compiler's notation: a bundle a line, `>` for each loop around it, `LB` at a loop's header. A
branch and the four bundles behind it belong together.
"""

import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from mllm.plan import listing, targets, work

MATMUL = "%{0} = vmatmul.mubr.bf16.gmra.mxu{1} %v1"
IDLE = "%9 = vadd.f32 %v1, %v2"


def text(*bundles):
    """A listing of (label, depth, operations, comment)."""
    lines = (
        f" {address:#6x} {label:2}: {'>' * depth} {{ {operations} }} /* {comment} */"
        for address, (label, depth, operations, comment) in enumerate(bundles)
    )
    return "\n".join(["LB: loop body", "", *lines])


def body(*operations, depth=1, region=1, turns=None):
    """A loop of bundles with these operations, its branch back in the fifth from its end."""
    rows = [["", depth, operation, ""] for operation in operations]
    rows[0][0], rows[0][3] = "LB", f"Start region {region}"
    if turns:
        rows[1][2] += f" ;; %p1 = scmp.ge.s32.totalorder %s1, {turns} /* loop exit test */"
    rows[-5][2] += f" ;; %7 = sbr.rel (!%p1) target = $region{region}"
    return [tuple(row) for row in rows]


def matmuls(count, every, mxus=(0, 1)):
    """A vmatmul on each MXU in the first of every so many bundles."""
    both = " ;; ".join(MATMUL.format(10 + mxu, mxu) for mxu in mxus)
    return ([both] + [IDLE] * (every - 1)) * count


def skipped(*operations, region=50):
    """Bundles at depth 1 that a branch in front of them can leave out."""
    start = [("", 1, f"%5 = sbr.rel (%p9) target = $region{region}", "")] + [("", 1, "", "")] * 4
    return [*start, *(("", 1, operation, "") for operation in operations), ("PF", 1, IDLE, f"Start region {region}")]


def outside():
    return [("", 0, IDLE, "")]


@pytest.mark.parametrize(("every", "use"), [(8, 1.0), (10, 0.8), (16, 0.5)])
def test_use_is_the_share_of_cycles_in_which_matrix_units_are_busy(every, use):
    kernel = listing.read_kernel("k", text(*outside(), *body(*matmuls(20, every)), *outside()), "v6e")
    assert (kernel.vmatmuls, kernel.bundles, kernel.skippable) == (40, 20 * every, 0)
    assert kernel.mxu == pytest.approx(use)


def test_a_unit_that_is_busy_is_waited_for():
    """Work for 80 cycles in 40 bundles, so what is behind it comes 40 cycles late."""
    kernel = listing.read_kernel("k", text(*body(*matmuls(10, 4), *[IDLE] * 40)), "v6e")
    assert kernel.mxu == pytest.approx(80 / 120, abs=0.03)


def test_units_are_never_busy_for_more_than_all_of_the_time():
    kernel = listing.read_kernel("k", text(*body(*matmuls(20, 4))), "v6e")
    assert 0.97 < kernel.mxu <= 1


def test_a_unit_without_work_halves_the_use():
    kernel = listing.read_kernel("k", text(*body(*matmuls(20, 8, mxus=(0,)))), "v6e")
    assert kernel.mxu == pytest.approx(0.5)


def test_float32_keeps_a_unit_half_as_long():
    floats = [operation.replace("bf16", "f32") for operation in matmuls(20, 8)]
    assert listing.read_kernel("k", text(*body(*floats)), "v6e").mxu == pytest.approx(0.5)


def test_the_hot_loop_is_the_innermost_with_products_and_the_step_is_what_is_around_it():
    before, after = body(*[IDLE] * 20)[:10], body(*[IDLE] * 20)[10:]
    inner = body(*matmuls(5, 8), depth=2, region=2, turns=3)
    kernel = listing.read_kernel("k", text(*outside(), *before, *inner, *after), "v6e")
    assert (kernel.bundles, kernel.vmatmuls) == (40, 10)
    assert kernel.mxu == pytest.approx(1)
    assert kernel.step == pytest.approx(3 * 40 / (3 * 40 + 20))


def test_a_step_is_unknown_where_the_number_of_turns_is():
    before, after = body(*[IDLE] * 20)[:10], body(*[IDLE] * 20)[10:]
    inner = body(*matmuls(5, 8), depth=2, region=2)
    assert listing.read_kernel("k", text(*before, *inner, *after), "v6e").step is None


def test_what_a_branch_can_skip_is_left_out_unless_it_holds_products():
    rows = body(*matmuls(10, 8))
    with_idle = listing.read_kernel("k", text(*rows[:40], *skipped(*[IDLE] * 30), *rows[40:]), "v6e")
    assert (with_idle.bundles, with_idle.skippable) == (80 + 6, 30)
    with_products = listing.read_kernel("k", text(*rows[:40], *skipped(*matmuls(4, 8)), *rows[40:]), "v6e")
    assert (with_products.bundles, with_products.skippable, with_products.vmatmuls) == (80 + 6 + 32, 0, 28)


def test_spills_are_those_of_vector_registers_in_the_hot_loop():
    spill, fill = "%1 = vst [vmem:[#allocation7_spill] sm:$0xff] %v1", "%v1 = vld [vmem:[#allocation7_spill] sm:$0xff]"
    scalar = "%1 = sst [smem:[#allocation7_spill]] %s1"
    code = text(("", 0, spill, ""), *body(spill, spill, fill, scalar, *matmuls(2, 8)))
    kernel = listing.read_kernel("k", code, "v6e")
    assert (kernel.spills, kernel.fills) == (2, 1)


def test_a_kernel_without_products_has_no_figures():
    assert listing.read_kernel("k", text(*body(*[IDLE] * 20)), "v6e") is None
    assert listing.read_kernel("k", text(*outside(), ("", 0, matmuls(1, 1)[0], "")), "v6e") is None


def test_memory_on_chip_is_the_compiler_s_report(tmp_path):
    report = {"total_size": 300, "blocks": [{"allocations": [{"tag": "SPILL", "size": 40}, {"size": 260}]}]}
    (tmp_path / "1-TLP-03-vmem_report.html").write_text(
        f"const DATA ={json.dumps({'hlo_breakdowns': {'head.3': report}})};\nmore"
    )
    (tmp_path / "1-TLP-hlo.txt").write_text('  %head.3 = bf16[8] custom-call(), custom_call_target="tpu_custom_call"\n')
    (tmp_path / "2-head.3-01-final_bundles.txt").write_text(text(*body(*matmuls(2, 8))))
    (tmp_path / "3-fusion-01-final_bundles.txt").write_text(text(*body(*matmuls(2, 8))))
    (kernel,) = listing.read_folder(tmp_path, "v6e")
    assert (kernel.name, kernel.vmem, kernel.vmem_spilled) == ("head", 300, 40)
    assert [kernel.name for kernel in listing.read_folder(tmp_path, "v6e", xla=True)] == ["fusion"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [("v6e", ("v6e", (1, 1))), ("v6e:2x4", ("v6e", (2, 4))), ("tpu7x", ("tpu7x", (1, 1, 1)))],
)
def test_a_target_is_a_chip_or_a_slice(target, expected):
    assert targets.split(target) == expected


def test_the_cause_of_a_refusal_is_the_last_exception_without_frames_and_remarks():
    said = """W0000 a warning
Traceback (most recent call last):
  File "first.py", line 1, in <module>
KeyError: 'handled'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "second.py", line 2, in <module>
    compile()
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: no room
Largest allocations:
--------------------
For simplicity, JAX has removed its internal frames from the traceback.
"""
    assert listing.cause(said) == "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: no room"
    assert listing.cause("Killed\n") == "Killed"
    assert listing.cause("") == ""


@pytest.mark.parametrize("target", ["v9", "v6e:2", "v6e:2x2x2", "v5p:2x2", "v6e:0x1", "v6e:axb", ""])
def test_a_target_that_is_none_is_refused(target, capsys):
    with pytest.raises(ValueError, match="target"):
        targets.split(target)
    assert listing.main(["--target", target, "mllm.plan.head_programs:value"]) == 2
    assert capsys.readouterr().err.startswith(f"error: target {target!r}: ")


def test_work_counts_the_products_of_a_loop_as_often_as_it_runs():
    def looped(h, w):
        return jax.lax.scan(lambda total, h: (total + h @ w.T, None), jnp.zeros((4, 7)), h.reshape(5, 4, 3))[0]

    shapes = jax.ShapeDtypeStruct((20, 3), jnp.float32), jax.ShapeDtypeStruct((7, 3), jnp.float32)
    assert work.parts(looped, shapes) == [work.Part("XLA", 5 * 2 * 4 * 7 * 3, 5 * 4 * (4 * 3 + 7 * 3 + 4 * 7))]


def test_work_has_no_answer_where_a_loop_s_length_depends_on_data():
    def looped(h, w):
        return jax.lax.while_loop(lambda h: h[0, 0] < 1, lambda h: h @ w.T @ w, h)

    shapes = jax.ShapeDtypeStruct((20, 3), jnp.float32), jax.ShapeDtypeStruct((7, 3), jnp.float32)
    assert work.parts(looped, shapes) is None


def square(mesh, size=2048):
    """A program of one product, by XLA."""
    return jnp.matmul, (jax.ShapeDtypeStruct((size, size), jnp.bfloat16),) * 2


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_xla_s_own_large_product_keeps_the_matrix_units_busy(chip, tmp_path):
    listing.read(chip, f"{__file__}:square", tmp_path)
    fusions = [path.read_text() for path in tmp_path.glob("*-fusion*-final_bundles.txt") if "schedule" not in path.name]
    kernels = [listing.read_kernel("product", fusion, chip) for fusion in fusions]
    assert max(kernel.mxu for kernel in kernels if kernel) > 0.93


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
def test_a_program_that_is_not_there_is_refused_in_a_line_with_all_that_was_said_beside_it():
    with pytest.raises(ValueError, match="no_such_thing") as refusal:
        listing.read("v6e", "math:no_such_thing")
    assert str(refusal.value) == "AttributeError: module 'math' has no attribute 'no_such_thing'"
    assert "Traceback" in refusal.value.__notes__[0]
