"""The Hopper kernels of packed rows, interpreted, and their place in an update; compared with float64.

The interpreter needs jax 0.12. This command runs the kernels on a GPU:

    python -m pytest -m gpu tests/model/test_packed_attention.py
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_program import FOR_GPUS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import EIGHT, check_against_masked, inputs_of

from mllm.config import load as configs
from mllm.model import packed_attention
from mllm.model.attention import Attention
from mllm.model.packed_attention import attend, reach
from mllm.parallel.mesh import AXES, make_mesh
from mllm.plan import targets
from mllm.plan.programs import Programs


def rows_of(*rows):
    """Segments of rows, each given by the lengths of its documents; a negative length is padding."""
    return jnp.array([np.repeat([i + 1 if n > 0 else 0 for i, n in enumerate(row)], np.abs(row)) for row in rows])


CASES = {  # segments, heads, heads of keys and values, size of a head, window, factor of the queries
    "padding at both ends": (rows_of([-10, 90, 30, 120, -6], [100, 28, 128]), 4, 2, 64, None, 1),
    "one document, eight queries a key": (rows_of([384]), 8, 1, 128, None, 1),
    "heads of 256, a window": (rows_of([300, 84]), 2, 1, 256, 70, 1),
    "documents of one token": (rows_of([1] * 120 + [8]), 2, 2, 64, None, 1),
    "one key has all the probability": (rows_of([130, 126]), 1, 1, 128, None, 60),
    "a window of one key": (rows_of([256]), 2, 1, 64, 1, 1),
}


def bounds_of(segments, window):
    return reach(segments, None if window is None else jnp.int32(window))


def seen_by(ids, window):
    """[query, key]: the keys of a row that each query attends to; padding attends to itself."""
    place = np.arange(len(ids))
    seen = (ids[:, None] == ids) & (ids != 0) & (place <= place[:, None])
    return seen & (place[:, None] - place < (window or len(ids))) | np.eye(len(ids), dtype=bool)


def expected(segments, window, queries, keys, values, slopes):
    """The output of attention, and the gradients of its sum weighted with slopes, in float64 head by head.

    Beside each array its error by the rounding of the output: `delta` is a sum of outputs that are rounded to bfloat16.
    """
    queries, keys, values, slopes = (np.float64(x) for x in (queries, keys, values, slopes))
    out, dq, dk, dv, dq_off, dk_off = (np.zeros_like(x) for x in (queries, queries, keys, values, queries, keys))
    scale = queries.shape[3] ** -0.5
    for row, ids in enumerate(np.asarray(segments)):
        seen = seen_by(ids, window)
        for head in range(queries.shape[2]):
            kv = head * keys.shape[2] // queries.shape[2]
            q, slope, k, v = queries[row, :, head], slopes[row, :, head], keys[row, :, kv], values[row, :, kv]
            scores = np.where(seen, q @ k.T * scale, -np.inf)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            out[row, :, head] = p @ v
            dp = slope @ v.T
            ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) * scale
            dq[row, :, head] = ds @ k
            dk[row, :, kv] += ds.T @ q
            dv[row, :, kv] += p.T @ slope
            off = p * (2**-9 * np.abs(out[row, :, head] * slope).sum(axis=1, keepdims=True) * scale)
            dq_off[row, :, head] = off @ np.abs(k)
            dk_off[row, :, kv] += off.T @ np.abs(q)
    return (out, 0 * out), (dq, dq_off), (dk, dk_off), (dv, 0 * dv)


def problem(case):
    """Bounds, and bfloat16 queries, keys, values and slopes; the slopes of padding are 0, as in training."""
    segments, heads, kv_heads, size, window, factor = CASES[case]
    queries, keys, values, slopes = inputs_of(*segments.shape, heads, kv_heads, size, jnp.bfloat16)
    slopes *= (segments != 0)[:, :, None, None]
    return bounds_of(segments, window), (queries * factor, keys, values, slopes)


def differentiated(bounds, queries, keys, values, slopes):
    @jax.jit
    def run(queries, keys, values, slopes, *bounds):
        out, pullback = jax.vjp(lambda *qkv: attend(*qkv, *bounds), queries, keys, values)
        return out, *pullback(slopes)

    return [np.asarray(x) for x in run(queries, keys, values, slopes, *bounds)]


def check_against_float64(results, case, arrays):
    segments, *_, window, _ = CASES[case]
    for name, got, (exact, off) in zip(
        ["out", "dq", "dk", "dv"], results, expected(segments, window, *arrays), strict=True
    ):
        got, exact, off = (np.float64(x) for x in (got, exact, off))
        # Probabilities, their slopes and the results are rounded to bfloat16, each by at most 2^-9 of itself.
        assert rms(got - exact) < 3 * 2**-9 * rms(exact) + rms(off), name


def rms(x):
    return np.sqrt((x**2).mean())


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax before 0.12 has no interpreter for these kernels")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_match_float64(case):
    from strict_gpu import strict_interpreter  # not before jax 0.12

    bounds, arrays = problem(case)
    with strict_interpreter(multiprocessors=1):  # the first case keeps one busy: blocks sum over query heads
        results = differentiated(bounds, *arrays)
    check_against_float64(results, case, arrays)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), max_size=6), st.sampled_from([None, 1, 3, 20]))
def test_bounds_of_a_row(lengths, window):
    """Against a mask; the row ends with padding."""
    segments = rows_of([*lengths, sum(lengths) - 60])
    seen = seen_by(np.asarray(segments[0]), window)
    first, last = bounds_of(segments, window)
    np.testing.assert_array_equal(first[0], seen.argmax(axis=1))
    np.testing.assert_array_equal(last[0], len(seen) - 1 - seen[::-1].argmax(axis=0))


def by_xla(queries, keys, values, first, last):
    """What the kernels compute."""
    place = jnp.arange(queries.shape[1])
    mask = (place >= first[:, :, None]) & (place <= place[:, None]) & (last[:, None, :] >= place[:, None])
    return jax.nn.dot_product_attention(queries, keys, values, mask=mask[:, None])


@pytest.mark.parametrize("window", [None, 20])
def test_devices_take_their_rows_and_heads(window, monkeypatch):
    """XLA in place of the kernels. A model with a window also has layers without a window."""
    monkeypatch.setattr(packed_attention, "attend", by_xla)
    kernel = Attention("mosaic_gpu", make_mesh(EIGHT), True, window=20)
    check_against_masked(kernel, (8, 101, 4, 2, 64, jnp.bfloat16), 2e-2, window)


@pytest.mark.gpu
@pytest.mark.skipif("jax.default_backend() != 'gpu' or target.why_not_hopper()", reason="needs a Hopper GPU")
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_give_the_same_numbers_on_a_gpu(case):
    """Only a GPU can show a race: so the same call must give the same bits again and again."""
    bounds, arrays = problem(case)
    check_against_float64(differentiated(bounds, *arrays), case, arrays)
    many = [jnp.tile(x, (64, *[1] * (x.ndim - 1))) for x in (*bounds, *arrays)]
    once = differentiated(many[:2], *many[2:])
    check_against_float64([x[-len(arrays[0]) :] for x in once], case, arrays)
    for _ in range(20):
        for one, again in zip(once, differentiated(many[:2], *many[2:]), strict=True):
            np.testing.assert_array_equal(one, again)


class TestByTheGpuCompiler:
    pytestmark = FOR_GPUS

    @pytest.mark.parametrize(
        ("recipe", "kernels"),
        [
            ("qwen25_3b_sft.yaml", {"packed_attention", "packed_attention_dq", "packed_attention_dk_dv"}),
            ("gemma3_270m_sft.yaml", {f"packed_attention{name}" for name in ("", "_dq", "_dk", "_dv")}),
        ],
    )
    def test_an_update_of_packed_rows_stores_no_mask(self, recipe, kernels):
        mesh, length = targets.mesh("h100", (1, 1, 1), AXES), 1408  # no width of a layer
        run = configs.load(recipe, [f"data.max_length={length}", "micro_batch_size=2", "model.remat=full"])
        text = targets.compiled(*Programs(run, mesh).update(), mesh).as_text()
        calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
        assert {name for line in calls for name in re.findall(r"packed_attention\w*", line)} >= kernels
        assert not re.search(rf"\[2,(\d+,)?{length},{length}\]", text)
