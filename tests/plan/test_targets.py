"""Devices that aren't there: their names, the compilers' account of memory, and their decode steps for v6e and H100."""

import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import head_programs as head
import jax
import numpy as np
import pytest
from compiled_program import FOR_GPUS, FOR_TPUS

from mllm.config import load as configs
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import AXES
from mllm.plan import child, memory, targets
from mllm.plan.programs import Programs
from mllm.plan.targets import Account

ONE = {"chip": 1}
REPORT = """Memory Space: default (color=0)
Total bytes: 1000 (1000B)
Memory Space: vmem (color=1)
Total bytes: 7 (7B)
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 100, parameter 1, shape |f32[25]| at ShapeIndex {}:
allocation 1: size 300, output shape is |f32[75]|, maybe-live-out, parameter 0, shape |f32[75]| at ShapeIndex {}:
allocation 2: size 600, preallocated-temp:
 value: <5 y @0> (size=600,offset=0): f32[150]{0}
allocation 3: size 7, color 1, preallocated-temp:
"""


def test_the_account_has_the_temporaries_and_the_peak_in_the_device_s_memory():
    assert targets.parse_account(REPORT, ASSIGNMENT) == Account(temporaries=600, peak=1000)


def test_a_target_is_a_chip_a_slice_or_the_gpus_of_a_host():
    shapes = {"v6e": (1, 1), "v6e:2x4": (2, 4), "tpu7x": (1, 1, 1), "h100": (1,), "h100:8": (8,)}
    for target, shape in shapes.items():
        assert targets.split(target) == (target.partition(":")[0], shape)
    for target in ("v9", "v6e:2", "v5p:2x2", "v6e:0x1", "v6e:axb", "", "h100:9", "h100:", "h100:2x4"):
        with pytest.raises(ValueError, match="target"):
            targets.split(target)


def test_only_what_the_plugin_prints_while_it_loads_is_silenced(capfd):
    with targets.silent_stderr():
        os.write(2, b"no driver\n")
    os.write(2, b"an error\n")
    assert capfd.readouterr().err == "an error\n"


def test_without_the_plugin_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "GPU_PLUGIN", tmp_path / "none")
    with pytest.raises(ModuleNotFoundError, match=r"isn't installed: make \.venv/aot-gpu"):
        targets.register_gpu_plugin()


# --- the process that compiles ---


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time\nfrom mllm.plan import child\n{code}", *arguments]


def assert_ends(pid: int) -> None:
    """Until pytest's time is up, if it doesn't. One that is dead may have a new parent that is slow."""
    while subprocess.getoutput(f"ps -o stat= -p {pid}")[:1] not in ("", "Z"):
        time.sleep(0.05)


TRACEBACKS = """log line\nTraceback (most recent call last):\n  File x\nErr: first\n\nDuring handling:\n
Traceback (most recent call last):\n  File y\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GiB
-----\nFor simplicity, JAX has removed its internal frames.\n"""


def test_a_failure_has_a_one_line_reason_the_error_without_remarks():
    reasons = [child.Ended(1, False, "", stderr).reason for stderr in (TRACEBACKS, "error: --shape: bad\n")]
    assert reasons == ["jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GiB", "error: --shape: bad"]


@pytest.mark.parametrize("end", ["late", "until", "exit"])
def test_what_the_child_started_ends_with_it(end, tmp_path, monkeypatch):
    """A grandchild that holds the pipes neither survives nor delays the answer; what else is printed is none."""
    code = "import subprocess\nprint('noise')\nprint(7)\n"
    code += "child.answer({'pid': subprocess.Popen(['sleep', '3600']).pid})\n"
    code += "open(sys.argv[2], 'w').close()\nsys.exit() if sys.argv[1] == 'exit' else time.sleep(3600)"
    started = tmp_path / "started"
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: 60.0 * started.exists()))
    limit = {"late": {"seconds": 60.0}, "until": {"until": started.exists}, "exit": {}}[end]
    ended = child.run(python(code, end, str(started)), **limit)
    assert (ended.code, ended.late) == (0 if end == "exit" else None, end == "late")
    if end == "late":
        assert ended.reason == "the time limit was reached"
    assert_ends(ended.answers[-1]["pid"])


def test_a_child_that_asks_for_it_dies_with_a_killed_parent_and_all_of_its_session(tmp_path):
    place = tmp_path / "pids"
    code = f"child.end_with_parent(); os.fork(); print(os.getpid(), file=open({str(place)!r}, 'a'), flush=True)"
    process = subprocess.Popen(python(f"child.run({python(code + '; time.sleep(3600)')!r})"))
    while not place.exists() or place.read_text().count("\n") < 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    for pid in map(int, place.read_text().split()):
        assert_ends(pid)


# --- the compilers ---

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


def decode_program(target, source, slots, shape, *settings):
    """A model's compiled decode step with half of the longest sequences' tokens, and what copies cache or weights."""
    axes = [f"mesh.{axis}={count}" for axis, count in zip(AXES, shape, strict=True)]
    settings = [f"model.source={source}", f"rollout.max_slots={slots}", *axes, *settings]
    mesh = targets.mesh(target, shape, AXES)
    shapes = Programs(configs.load("qwen25_3b_grpo.yaml", settings), mesh)
    shapes.tokens = 768 * slots
    arrays = jax.tree.leaves((shapes.decoding_weights()[0], shapes.cache(), shapes.states()))
    sizes = {math.prod(x.sharding.shard_shape(x.shape)) for x in arrays}
    program = targets.compiled(*shapes.decode(), mesh)
    return program, copied(program, {size for size in sizes if size >= 2**20})


class TestByTheTpuCompiler:
    pytestmark = FOR_TPUS

    def test_the_account_is_what_the_compiled_program_says(self):
        sizes = {"tokens": 1024, "features": 256, "vocabulary": 4096}
        found = targets.account("v6e", f"{head.__file__}:loss", ONE, **sizes)
        mesh = targets.mesh("v6e")
        whole = targets.memory(targets.compiled(*head.loss(mesh, **sizes), mesh))
        assert found.peak == pytest.approx(whole["peak"], abs=2**19)

    @pytest.mark.slow
    def test_a_program_that_is_too_large_has_an_account_too(self):
        sizes = {"tokens": 2**16, "features": 512, "vocabulary": 151936, "impl": "full_logits"}
        found = targets.account("v6e", f"{head.__file__}:loss", ONE, **sizes)
        assert found.temporaries > 4 * 2**16 * 151936 > targets.TPUS["v6e"].memory

    @pytest.mark.parametrize("chip", targets.TPUS)
    def test_devices_have_the_name_and_the_memory_that_the_compiler_grants(self, chip):
        mesh = targets.mesh(chip)
        assert mesh.devices.flat[0].device_kind == targets.TPUS[chip].kind
        shape = jax.ShapeDtypeStruct((2**20, 2**17), np.float32)
        limit = rf"exceeds available HBM \({targets.TPUS[chip].memory / 2**30:.2f}G\)"
        with pytest.raises(jax.errors.JaxRuntimeError, match=limit):
            targets.compiled(lambda x: jax.lax.sort(2 * x, dimension=0), (shape,), mesh)

    def test_a_slice_that_does_not_exist_or_is_too_small_is_refused(self):
        with pytest.raises(ValueError, match="'v6e:3x5': v6e has no such slice"):
            targets.mesh("v6e:3x5")
        with pytest.raises(ValueError, match=r"has 4 devices, a mesh of \(1, 8, 1\) needs 8"):
            targets.mesh("v6e:2x2", (1, 8, 1), AXES)

    @pytest.mark.slow
    def test_a_run_is_planned_for_a_slice_that_is_not_there(self):
        told = []
        memory.plan(configs.load("qwen25_0p5b_grpo.yaml", ["mesh.fsdp=8"]), "v6e:2x4", told.append)
        assert told[0].startswith("v6e:2x4: mesh dp 1, fsdp 8, tp 1, 8 of 8 devices, 31.25 GiB each")
        assert any(line.startswith("fits: ") for line in told)

    @pytest.mark.parametrize(
        ("source", "settings", "layers"),
        [
            (GEMMA, [], 6),
            *(pytest.param(x, [], None, marks=pytest.mark.nightly) for x in (GEMMA, QWEN2, QWEN3, QWEN35, LLAMA)),
            pytest.param(QWEN2, ["rollout.weights=int8"], None, marks=pytest.mark.nightly),
        ],
    )
    def test_a_decode_step_on_eight_v6e_copies_neither_weights_nor_cache_nor_states(
        self, source, settings, layers, monkeypatch
    ):
        """Six layers of Gemma are of both kinds."""
        if layers:
            short = replace(PRESETS[source], num_hidden_layers=layers, layer_types=PRESETS[source].layer_types[:layers])
            monkeypatch.setitem(PRESETS, source, short)
        program, copies = decode_program("v6e:2x4", source, 320, (1, 8, 1), *settings)
        assert copies == []
        assert program.memory_analysis().temp_size_in_bytes <= (132 if source == QWEN35 else 72) * 2**20


class TestByTheGpuCompiler:
    pytestmark = FOR_GPUS

    def test_full_logits_and_their_gradient_are_in_the_account_of_a_gpu_but_neither_with_the_fused_head(self):
        sizes = {"tokens": 4096, "features": 256, "vocabulary": 32768}
        mesh, logits = targets.mesh("h100"), 4 * sizes["tokens"] * sizes["vocabulary"]
        whole = targets.memory(targets.compiled(*head.loss(mesh, **sizes), mesh))
        fused, full = (
            targets.account("h100", f"{head.__file__}:loss", ONE, impl=x, **sizes) for x in (None, "full_logits")
        )
        # With the fused head Triton's products, as the whole program has them, hold the same, but for a workspace.
        assert fused.peak == pytest.approx(whole["peak"], abs=2**23)
        assert fused.temporaries < logits / 4
        assert 1.5 * logits < full.temporaries < 2 * logits  # the gradient is bfloat16

    @pytest.mark.parametrize(("source", "slots"), [(QWEN2, 320), (QWEN3, 80), (LLAMA, 80), (GEMMA, 80)])
    def test_a_decode_step_on_an_h100_copies_neither_weights_nor_cache(self, source, slots):
        program, copies = decode_program("h100", source, slots, (1, 1, 1))
        assert copies == []
        assert program.memory_analysis().temp_size_in_bytes <= 288 * 2**20  # the most are scores of pages and logits

    def test_a_decode_step_on_an_h100_keeps_no_second_array_of_a_delta_net_s_states(self):
        """Left to itself XLA turns all states before a chunk of decode steps and after it."""
        program, _ = decode_program("h100", QWEN35, 80, (1, 1, 1))
        assert program.memory_analysis().temp_size_in_bytes <= 96 * 2**20  # of 1440 MiB of states
