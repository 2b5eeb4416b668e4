"""The Hopper kernel of decode steps, interpreted, and its place in rollouts; compared with float64.

The interpreter needs jax 0.12. This command runs the kernel on a GPU:

    python -m pytest -m gpu tests/sampler/test_paged_attention.py
"""

import re
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_program import FOR_GPUS
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import OPTIONS, WINDOWS, check, complete, made, sample_groups
from tiny import ARCHITECTURE, config

from lm_head import target
from mllm.config import load as configs
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.model.load import load_policy
from mllm.model.lora import Lora
from mllm.parallel.mesh import AXES, make_mesh
from mllm.plan import targets
from mllm.plan.programs import Programs, RolloutPrograms
from mllm.sampler import decoding, paged_attention, schedule, slots
from mllm.sampler.paged_attention import RowView
from mllm.sampler.slots import CHUNK

needs_interpreter = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="no interpreter before jax 0.12")


class Rows(NamedTuple):
    """Random sequences of rows, with their keys and values in pages and tails."""

    lengths: np.ndarray
    done: int
    window: int | None
    keys: list[np.ndarray]
    """Each row's keys, [tokens, K, H]: in pages, then in the tail up to its own token."""
    values: list[np.ndarray]
    arrays: tuple[jax.Array, ...]
    """Queries [B, 1, N, H], and keys and values of pages and of tails."""
    view: RowView


def random_rows(lengths, done, *, heads, size, page, window=None, kv_heads=2, seed=0):
    """A row of length 0 has no pages. Pages are in any order. Unseen places have random numbers."""
    rng = np.random.default_rng(seed)
    needed = [range(max(0, length + 1 - (window or length + 1)) // page, -(-length // page)) for length in lengths]
    pages = sum(map(len, needed)) + 3
    free = rng.permutation(pages).tolist()
    normal = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape) * 1.5, jnp.bfloat16))  # noqa: E731
    pool, tail = (normal(2, n, kv_heads, places, size) for n, places in ((pages, page), (len(lengths), CHUNK)))
    starts, of_row = np.zeros(pages, np.int32), np.full((len(lengths), max(map(len, needed)) + 1), pages, np.int32)
    sequences = [[], []]
    for row, (length, numbers) in enumerate(zip(lengths, needed, strict=True)):
        whole = rng.normal(size=(2, length + done + 1, kv_heads, size))
        for place, number in enumerate(numbers):
            of_row[row, place] = one = free.pop()
            starts[one] = number * page
            count = min(page, length - number * page)
            whole[:, number * page : number * page + count] = pool[:, one, :, :count].swapaxes(1, 2)
        whole[:, length:] = tail[:, row, :, : done + 1].swapaxes(1, 2)
        for kept, one in zip(sequences, whole, strict=True):
            kept.append(one)
    view = RowView.of(window, *map(jnp.asarray, (of_row, starts, np.int32(lengths), np.int32(done))), shards=1)
    arrays = normal(len(lengths), 1, heads, size), *pool, *tail
    return Rows(np.array(lengths), done, window, *sequences, tuple(map(jnp.asarray, arrays)), view)


def expected(rows):
    """softmax(q k^T / sqrt(H)) v in float64, row by row and head by head."""
    queries = np.float64(rows.arrays[0])
    result = np.zeros_like(queries)
    for row, (keys, values) in enumerate(zip(rows.keys, rows.values, strict=True)):
        seen = slice(0 if rows.window is None else max(0, len(keys) - rows.window), None)
        for head, q in enumerate(queries[row, 0]):
            kv = head * keys.shape[1] // queries.shape[2]
            scores = keys[seen, kv] @ q / np.sqrt(len(q))
            p = np.exp(scores - scores.max())
            result[row, 0, head] = p @ values[seen, kv] / p.sum()
    return result


def attended(rows):
    queries, *pool = rows.arrays
    result = jax.jit(RowView.attend, static_argnums=4)(rows.view, queries, tuple(pool[:2]), tuple(pool[2:]), None)
    return np.asarray(result)


def check_against_float64(result, rows):
    # Probabilities and results are rounded to bfloat16: half of 2^-8 of a sum of values below 7.
    np.testing.assert_allclose(np.float64(result), expected(rows), atol=2.5e-2)


CASES = {
    "Qwen2.5-0.5B": (([300, 0, 129, 128, 1], 3), {"heads": 14, "size": 64, "page": 128}),
    "Qwen2.5-3B": (([70, 16], 15), {"heads": 16, "size": 128, "page": 32}),
    "Gemma 3, a window of 100": (([333, 90, 0, 700], 9), {"heads": 4, "size": 256, "page": 64, "window": 100}),
    "a window of 5": (([70, 3], 7), {"heads": 2, "size": 64, "page": 256, "window": 5}),
    "64 queries a key": (([256], 0), {"heads": 64, "size": 64, "page": 256, "kv_heads": 1}),
    "one query": (([40], 1), {"heads": 1, "size": 64, "page": 32, "kv_heads": 1}),
}


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_matches_float64(case):
    from strict_gpu import strict_interpreter  # not before jax 0.12

    (lengths, done), sizes = CASES[case]
    rows = random_rows(lengths, done, **sizes)
    with strict_interpreter():
        result = attended(rows)
    check_against_float64(result, rows)


@settings(max_examples=10)
@given(st.data())
def test_a_row_sees_its_last_tokens(data):
    """Also with a window that ends in the pages, at their start, or in the tail."""
    lengths = data.draw(st.lists(st.integers(0, 100), min_size=3, max_size=3))
    done, window = data.draw(st.integers(0, CHUNK - 1)), data.draw(st.sampled_from([None, 1, 5, 17, 40]))
    rows = random_rows(lengths, done, heads=2, size=1, page=16, window=window)
    keys, of_row = (np.asarray(x) for x in (rows.arrays[1], rows.view.of_row))
    for row, length in enumerate(lengths):
        begin, end, begin_tail, end_tail = rows.view.seen[row].tolist()
        tokens = length + done + 1
        seen = min(tokens, window or tokens)
        assert (max(0, end - begin) + end_tail - begin_tail, end_tail) == (seen, done + 1)
        own = keys[of_row[row][of_row[row] < len(keys)]].swapaxes(1, 2).reshape(-1, 2, 1)
        np.testing.assert_array_equal(own[begin : max(begin, end)], rows.keys[row][tokens - seen : length])


def test_an_empty_slot_reads_no_page():
    """The slot may have the length of a sequence that has left."""
    of_row, starts = jnp.array([[1, 3], [3, 3]]), jnp.array([0, 0, 16])  # of three pages
    view = RowView.of(None, of_row, starts, jnp.array([16, 40]), jnp.int32(2), shards=1)
    assert view.seen.tolist() == [[0, 16, 0, 3], [0, 0, 0, 3]]


def by_xla(queries, keys, values, new_keys, new_values, of_row, seen):
    """What the kernel computes, in float32."""
    outputs = []
    for row in range(len(queries)):
        spans = [jnp.arange(of_row.shape[1] * keys.shape[2]), jnp.arange(new_keys.shape[2])]
        mask = jnp.concatenate([(x >= seen[row, 2 * i]) & (x < seen[row, 2 * i + 1]) for i, x in enumerate(spans)])
        both = []
        for pool, tail in ((keys, new_keys), (values, new_values)):
            taken = pool.at[of_row[row]].get(mode="fill", fill_value=0).swapaxes(0, 1)
            both.append(jnp.concatenate([taken.reshape(taken.shape[0], -1, taken.shape[3]), tail[row]], axis=1))
        scores = jnp.einsum("kgh,kth->kgt", queries[row], both[0], precision="highest") * queries.shape[3] ** -0.5
        p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        outputs.append(jnp.einsum("kgt,kth->kgh", p, both[1], precision="highest"))
    return jnp.stack(outputs).astype(queries.dtype)


@pytest.fixture
def kernel_steps(monkeypatch):
    """Decode steps take `RowView`, with XLA in place of the kernel; the programs are not left to other tests."""
    used, programs = [], (slots.decode, decoding.apply_layer)
    for program in programs:
        program.clear_cache()
    monkeypatch.setattr(decoding, "can_run", lambda model, places: used.append(places) or True)
    monkeypatch.setattr(paged_attention, "attend", by_xla)
    yield used
    for program in programs:
        program.clear_cache()
    assert used


@pytest.mark.slow
@pytest.mark.parametrize("by_rows", ["all layers", "one kind of layers"])
def test_rollouts_by_rows_match_the_model_without_a_cache(by_rows, kernel_steps, monkeypatch):
    """Layers with and without a window; completions fill several pages."""
    if by_rows != "all layers":
        monkeypatch.setattr(decoding, "can_run", lambda *_: kernel_steps.append(0) or len(kernel_steps) % 2)
    model, prompts = made(WINDOWS), [[1, 2, 3], [4] * 12, [5]]
    options = OPTIONS.model_copy(update={"max_completion_length": 70, "top_k": 0, "top_p": 1.0, "temperature": 1.0})
    check(model, prompts, complete(model, prompts, options, stops=(-1,)))


@pytest.mark.slow
def test_rollouts_by_rows_are_alike_on_a_mesh(kernel_steps, monkeypatch):
    """There are 2 heads of keys and values, which tp = 4 does not divide: each device computes both."""
    monkeypatch.setattr(schedule, "jax", SimpleNamespace(default_backend=lambda: "tpu"))  # slots stay as many
    meshes = ({}, 1), ({"fsdp": 2, "tp": 4}, 8), ({"dp": 2, "fsdp": 2, "tp": 2}, 8)
    for results in zip(*(sample_groups(ARCHITECTURE, *mesh) for mesh in meshes), strict=True):
        assert len({tuple(result.tokens) for result in results}) == 1
        for result in results[1:]:
            np.testing.assert_allclose(result.logprobs, results[0].logprobs, atol=1e-4)


def model_of(attention=None, dtype="bfloat16", **sizes):
    """A model with heads of 64."""
    sizes = {**ARCHITECTURE, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, **sizes}
    settings = config(model={"architecture": sizes, "dtype": dtype, "attention": attention})
    policy = load_policy(settings, make_mesh(settings.mesh))
    return nnx.merge(policy.graphdef, policy.params)


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ({}, True),
        ({"attention": "xla"}, False),
        ({"dtype": "float32"}, False),
        ({"num_attention_heads": 4, "head_dim": 32}, False),
        ({"num_attention_heads": 65, "head_dim": 64}, False),
    ],
    ids=str,
)
def test_the_kernel_runs_on_hopper_gpus_unless_xla_is_asked_for(sizes, runs, monkeypatch):
    meshes = []
    monkeypatch.setattr(target, "why_not_hopper", lambda mesh: meshes.append(mesh))
    model = model_of(**sizes)
    assert paged_attention.can_run(model, 4096) == runs
    assert not paged_attention.can_run(model, 4352), "few long rows would keep few multiprocessors busy"
    assert all(mesh is model.layout.mesh for mesh in meshes)


def test_a_merged_head_leaves_the_choice_of_the_kernel():
    """Decoding weights then have another graph of modules."""
    config, lora = Architecture.from_hf(ARCHITECTURE, "test"), Lora(rank=2, alpha=2.0, targets=("q", "head"))
    models = (Decoder.abstract(config, lora=lora, own_kernels=allowed) for allowed in (True, True, False))
    first, same, other = map(decoding.decoding_graphdef, models)
    assert first == same != other


def test_other_devices_have_no_kernel():
    assert not paged_attention.can_run(model_of(), 64)


@pytest.mark.gpu
@pytest.mark.skipif("jax.default_backend() != 'gpu' or target.why_not_hopper()", reason="needs a Hopper GPU")
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_the_same_numbers_on_a_gpu(case):
    """Only a GPU can show a race: so the same call must give the same bits again and again."""
    (lengths, done), sizes = CASES[case]
    few = random_rows(lengths, done, **sizes)
    check_against_float64(attended(few), few)
    many = random_rows([*lengths, *np.random.default_rng(2).integers(0, 1500, 300)], done, **sizes)
    first = attended(many)
    check_against_float64(first, many)
    for _ in range(20):
        np.testing.assert_array_equal(first, attended(many))


class TestByTheGpuCompiler:
    pytestmark = FOR_GPUS

    @pytest.mark.parametrize(("mesh", "layers"), [((1, 1, 1), 24), ((2, 2, 2), 24)])
    def test_a_decode_step_has_one_kernel_a_layer_for_attention(self, mesh, layers):
        devices = targets.mesh("h100" if mesh == (1, 1, 1) else "h100:8", mesh, AXES)
        settings = [f"mesh.{axis}={count}" for axis, count in zip(AXES, mesh, strict=True)]
        run = configs.load("qwen25_0p5b_grpo.yaml", [*settings, "rollout.max_slots=64"])
        shapes = RolloutPrograms(Programs(run, devices), run.rollout, tokens=768 * 64)
        lines = targets.compiled(*shapes.decode(), devices).as_text().splitlines()
        calls = [line for line in lines if 'custom_call_target="mosaic_gpu' in line]
        assert len(calls) == layers
        assert all("paged_attention" in line for line in calls)
        copies = [line for line in lines if " copy(" in line]
        assert not any(re.search(r"bf16\[\d+,\d,128,64\]", line) for line in copies), "pages are copied"
