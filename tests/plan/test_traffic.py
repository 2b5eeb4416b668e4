"""What a decode step moves: the reading of a program's text, and the compilers' own programs for v6e and H100."""

import importlib.util

import pytest

from mllm.config import load as configs
from mllm.model.decoding import abstract_cache
from mllm.parallel.mesh import AXES, bytes_on_device
from mllm.plan import gpus, targets
from mllm.plan.programs import Programs
from mllm.plan.traffic import Module

TEXT = """HloModule example
%update (p.0: f32[8,128], p.1: f32[1,128], p.2: s32[]) -> f32[8,128] {
  %p.0 = f32[8,128]{1,0} parameter(0)
  %p.1 = f32[1,128]{1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = f32[8,128]{1,0} dynamic-update-slice(%p.0, %p.1, %p.2, %zero)
}

%take (q.0: bf16[100,128], q.1: s32[]) -> f32[1,128] {
  %q.0 = bf16[100,128]{1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  %none = s32[] constant(0)
  %row = bf16[1,128]{1,0} dynamic-slice(%q.0, %q.1, %none), dynamic_slice_sizes={1,128}
  ROOT %wide = f32[1,128]{1,0} convert(%row)
}

%body (carry: (f32[8,128], bf16[100,128], s32[])) -> (f32[8,128], bf16[100,128], s32[]) {
  %carry = (f32[8,128]{1,0:T(8,128)}, bf16[100,128]{1,0}, /*index=2*/s32[]) parameter(0)
  %cache = f32[8,128]{1,0:T(8,128)} get-tuple-element(%carry), index=0
  %table = bf16[100,128]{1,0} get-tuple-element(%carry), index=1
  %i = s32[] get-tuple-element(%carry), index=2
  %taken = f32[1,128]{1,0:T(1,128)S(1)} fusion(%table, %i), calls=%take
  %near = (bf16[100,128]{1,0:S(1)}, bf16[100,128]{1,0}, u32[]{:S(2)}) copy-start(%table)
  %there = bf16[100,128]{1,0:S(1)} copy-done(%near)
  %written = f32[8,128]{1,0:T(8,128)} fusion(%cache, %taken, %i), kind=kLoop, calls=%update
  ROOT %next = (f32[8,128]{1,0}, bf16[100,128]{1,0}, s32[]) tuple(%written, %table, %i)
}

ENTRY %main (start: (f32[8,128], bf16[100,128], s32[])) -> (f32[8,128], bf16[100,128], s32[]) {
  %start = (f32[8,128]{1,0}, bf16[100,128]{1,0}, s32[]) parameter(0)
  ROOT %loop = (f32[8,128]{1,0}, bf16[100,128]{1,0}, s32[]) while(%start), condition=%cond, body=%body
}
"""


def test_a_turn_of_a_loop_reads_what_it_slices_and_writes_what_it_changes():
    """A bfloat16 row into VMEM, the table copied to VMEM, the update's float32 row into the cache, two counters."""
    assert Module(TEXT).largest_loop() == 256 + 4 + 25600 + 512 + 4


QWEN2, QWEN3, LLAMA = "Qwen/Qwen2.5-3B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"  # Llama's heads have 64


def decode_program(target, source, slots, shape):
    """A model's compiled decode step with a cache that is half as long as the longest, and its shapes."""
    axes = dict(zip(AXES, shape, strict=True))
    settings = [f"rollout.max_slots={slots}", *(f"mesh.{axis}={count}" for axis, count in axes.items())]
    mesh = targets.mesh(target, shape, AXES)
    shapes = Programs(configs.load("qwen25_3b_grpo.yaml", [f"model.source={source}", *settings]), mesh)
    shapes.cache = lambda: abstract_cache(shapes.model, slots, 768)
    return targets.compiled(*shapes.decode(), mesh), bytes_on_device((shapes.decoding_weights(), shapes.cache()))


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
@pytest.mark.parametrize(
    ("source", "most"),
    [
        (QWEN2, 1.25),
        pytest.param(QWEN3, 1.45, marks=pytest.mark.slow),
        pytest.param(LLAMA, 1.25, marks=pytest.mark.slow),
    ],
)
def test_a_decode_step_on_eight_v6e_moves_little_more_than_weights_and_cache(source, most):
    program, least = decode_program("v6e:2x4", source, 320, (1, 8, 1))
    assert program.memory_analysis().temp_size_in_bytes <= 64 * 2**20
    turn = Module(program.as_text()).largest_loop()
    assert least <= turn <= most * least


@pytest.mark.aot_gpu
@pytest.mark.skipif(not gpus.FOLDER.exists(), reason="needs XLA's plugin for CUDA, which make aot-gpu installs")
@pytest.mark.parametrize(("source", "slots", "most"), [(QWEN2, 320, 1.8), (QWEN3, 80, 1.4), (LLAMA, 80, 1.4)])
def test_a_decode_step_on_an_h100_copies_neither_weights_nor_cache(source, slots, most):
    program, least = decode_program("h100", source, slots, (1, 1, 1))
    assert program.memory_analysis().temp_size_in_bytes <= 128 * 2**20
    assert least <= Module(program.as_text()).largest_loop() <= most * least
