"""The compilers' decode steps for v6e and H100: no loop copies a weight or a layer's cache."""

import importlib.util
import math
import re

import jax
import pytest

from mllm.config import load as configs
from mllm.parallel.mesh import AXES, bytes_on_device
from mllm.plan import targets
from mllm.plan.programs import Programs

QWEN2, QWEN3, LLAMA = "Qwen/Qwen2.5-3B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"  # Llama's heads have 64
GEMMA = "google/gemma-3-270m"  # of its layers most keep 512 places
QWEN35 = "Qwen/Qwen3.5-0.8B"  # three of four layers keep a state
IN_PLACE = {"dynamic-update-slice", "get-tuple-element", "parameter", "bitcast", "tuple", "while"}
INTO_VMEM = ("-start", "-done")  # a TPU's copies there, and back after an update


def copied(program, elements):
    """The kinds of instructions that write new arrays of so many elements to a device's memory, or their fusion's."""
    text = re.sub(r"/\*.*?\*/", "", program.as_text())
    bodies = dict(re.findall(r"^(?:ENTRY )?%?(\S+) \([^\n]*\) -> [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    kinds = {name: re.search(r"ROOT \S+ = .*? ([a-z][\w\-]*)\(", body)[1] for name, body in bodies.items()}
    fused = set(re.findall(r"\bfusion\(.*calls=%?([\w.\-]+)", text))
    found = []
    for body in (body for name, body in bodies.items() if name not in fused):
        for result, kind, rest in re.findall(r"^.*? = (.*?) ([a-z][\w\-]*)\((.*)$", body, re.MULTILINE):
            sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", result)]
            called = re.search(r"calls=%?([\w.\-]+)", rest)
            kind = kinds[called[1]] if called else kind
            if elements & set(sizes) and "S(1)" not in result and kind not in IN_PLACE and not kind.endswith(INTO_VMEM):
                found.append((kind, result))
    return found


def decode_program(target, source, slots, shape, weights=None):
    """A model's compiled decode step with half of the longest sequences' tokens, what copies cache or weights, and the
    bytes of both on a device, which a step reads.
    """
    axes = dict(zip(AXES, shape, strict=True))
    settings = [
        f"rollout.max_slots={slots}",
        f"rollout.weights={weights or 'null'}",
        *(f"mesh.{axis}={count}" for axis, count in axes.items()),
    ]
    mesh = targets.mesh(target, shape, AXES)
    shapes = Programs(configs.load("qwen25_3b_grpo.yaml", [f"model.source={source}", *settings]), mesh)
    shapes.tokens = 768 * slots
    arrays = jax.tree.leaves((shapes.decoding_weights()[0], shapes.cache(), shapes.states()))
    parts = [(math.prod(x.sharding.shard_shape(x.shape)), x.dtype.itemsize) for x in arrays]
    program = targets.compiled(*shapes.decode(), mesh)
    return program, copied(program, {n for n, _ in parts if n >= 2**20}), sum(n * size for n, size in parts)


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
@pytest.mark.parametrize(
    "source", [GEMMA, *(pytest.param(x, marks=pytest.mark.nightly) for x in (QWEN2, QWEN3, QWEN35, LLAMA))]
)
def test_a_decode_step_on_eight_v6e_copies_neither_weights_nor_cache_nor_states(source):
    program, copies, _ = decode_program("v6e:2x4", source, 320, (1, 8, 1))
    assert copies == []
    assert program.memory_analysis().temp_size_in_bytes <= (128 if source == QWEN35 else 72) * 2**20


@pytest.mark.nightly
@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
def test_a_decode_step_in_int8_reads_little_more_than_half_the_bytes_and_makes_no_other_copy_of_the_weights():
    program, copies, nbytes = decode_program("v6e:2x4", QWEN2, 320, (1, 8, 1), weights="int8")
    assert copies == []
    assert program.memory_analysis().temp_size_in_bytes <= 72 * 2**20
    mesh = targets.mesh("v6e:2x4", (1, 8, 1), AXES)
    usual = Programs(configs.load("qwen25_3b_grpo.yaml", ["rollout.max_slots=320"]), mesh)
    usual.tokens = 768 * 320
    cache, weights = map(bytes_on_device, (usual.cache(), usual.decoding_weights()[0]))
    assert nbytes - cache < 0.505 * weights
    assert nbytes < 0.58 * (weights + cache)  # the cache, here half full in all rows, stays bfloat16


@pytest.mark.aot_gpu
@pytest.mark.skipif(not targets.GPU_PLUGIN.exists(), reason="needs XLA's plugin for CUDA, which make aot-gpu installs")
@pytest.mark.parametrize(("source", "slots"), [(QWEN2, 320), (QWEN3, 80), (LLAMA, 80), (GEMMA, 80)])
def test_a_decode_step_on_an_h100_copies_neither_weights_nor_cache(source, slots):
    program, copies, _ = decode_program("h100", source, slots, (1, 1, 1))
    assert copies == []
    assert program.memory_analysis().temp_size_in_bytes <= 288 * 2**20  # the most are scores of pages and logits


@pytest.mark.aot_gpu
@pytest.mark.skipif(not targets.GPU_PLUGIN.exists(), reason="needs XLA's plugin for CUDA, which make aot-gpu installs")
def test_a_decode_step_on_an_h100_keeps_no_second_array_of_a_delta_net_s_states():
    """Left to itself XLA turns all states before a chunk of decode steps and after it."""
    program, _, _ = decode_program("h100", QWEN35, 80, (1, 1, 1))
    assert program.memory_analysis().temp_size_in_bytes <= 96 * 2**20  # of 1440 MiB of states
