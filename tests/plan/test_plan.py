"""The plan of a run's memory: what it counts, what it finds to fit, and what it says where nothing does."""

import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from runs import arguments, changed

import train
from mllm.config import load as config_file
from mllm.config.schema import MeshConfig
from mllm.model.decoder import LOGICAL_AXES, parameter_name
from mllm.parallel.mesh import make_mesh
from mllm.plan import assignment, gpus, targets
from mllm.plan import head_programs as head
from mllm.plan import memory as plan
from mllm.plan.programs import Programs

MIB = 2**20
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs"
)


@pytest.fixture(scope="module")
def config():
    return tiny.config(
        mesh={"fsdp": 2}, micro_batch_size=4, grpo={"num_generations": 4, "beta": 0.1, "reference": "initial"}
    )


@pytest.fixture(scope="module")
def planned(config):
    """The phases, what was told of them, and the arrays that are there afterwards and were not before."""
    before = {id(array) for array in jax.live_arrays()}
    told = []
    devices = plan.Devices("two", make_mesh(config.mesh), 8, 2**30, None)
    phases = plan.Planner(config, devices, told.append).phases()
    large = [x for x in jax.live_arrays() if id(x) not in before and x.size > 1]
    return {phase.name: phase for phase in phases}, told, large


@pytest.mark.slow
class TestPhases:
    def test_a_run_of_grpo_has_four_and_each_is_told_when_it_is_done(self, planned):
        phases, told, _ = planned
        assert list(phases) == ["prefill", "decode", "log-prob", "update"]
        assert [line.split(":")[0] for line in told] == [
            "prefill", "decode", "log-prob", "log-prob, head", "update", "update, head",
        ]  # fmt: skip

    def test_no_parameter_is_made(self, planned):
        assert planned[2] == []

    def test_parameters_and_moments_are_counted_by_what_a_device_has_of_them(self, planned, config):
        shapes = Programs(config, make_mesh(config.mesh)).policy.params
        halves = wholes = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
            if "embed" in LOGICAL_AXES[parameter_name(path)]:
                halves += leaf.size
            else:
                wholes += leaf.size
        own, whole = 4 * (halves // 2 + wholes), 4 * (halves + wholes)
        phases, _, _ = planned
        update = phases["update"].parts
        # The reference policy is a second copy; decoding has one that is whole along fsdp. Float32 all of it.
        assert update["parameters"] == 2 * own
        assert phases["decode"].parts["parameters"] == 2 * own + whole
        assert update["gradients"] == own
        # Two moments, and the steps that were counted.
        assert 0 <= update["optimizer"] - 2 * own <= 16
        assert all(phase.parts["optimizer"] == update["optimizer"] for phase in phases.values())

    def test_the_cache_is_that_of_a_device_s_rows(self, planned):
        layers, rows, slots, heads, width = 2, 8 // 2, 16 + 4, 2, 8
        phases, _, _ = planned
        assert phases["prefill"].parts["KV cache"] == 2 * 4 * layers * rows * slots * heads * width
        assert phases["update"].parts["KV cache"] == 0

    def test_an_update_holds_activations_and_the_head_s_temporaries_beside(self, planned):
        update = planned[0]["update"].parts
        assert update["head"] > 0
        assert update["activations"] > 0

    def test_the_table_has_a_line_for_each_whose_parts_add_up(self, planned):
        phases, _, _ = planned
        _, *lines = plan.table(list(phases.values()), memory=1000 * MIB).splitlines()
        for line, phase in zip(lines, phases.values(), strict=True):
            *parts, peak, free = map(float, line.removeprefix(phase.name).split())
            assert sum(parts) == pytest.approx(peak, abs=0.04)
            assert peak + free == pytest.approx(1000, abs=0.02)


def test_a_turn_of_decoding_takes_over_the_memory_of_the_one_before(config):
    """Else the plan would count the cache twice."""
    devices = plan.Devices("two", make_mesh(config.mesh), 8, 2**30, None)
    planner = plan.Planner(config, devices, lambda line: None)
    turn = planner.compile("decode", "decode")
    cache = plan.on_device(planner.programs.cache())
    assert turn.arguments > cache
    assert turn.peak - turn.arguments - turn.temporaries < cache / 10


class TestTheLargestMicroBatch:
    def test_is_found_wherever_it_is_in_few_trials(self):
        candidates = [1, 2, 4, 5, 8, 10, 16, 20, 40, 80]
        for limit in (0, *candidates):
            for known in candidates:
                tried = []
                found = plan.largest(
                    candidates, lambda n, tried=tried, limit=limit: tried.append(n) or n <= limit, known
                )
                assert found == (limit or None)
                assert len(tried) <= 1 + math.ceil(math.log2(len(candidates) + 1))

    def test_divides_the_batch_and_is_divided_by_the_devices_that_share_it(self):
        assert plan.micro_batches(batch=320, shards=8) == [8, 16, 32, 40, 64, 80, 160, 320]
        assert plan.micro_batches(batch=12, shards=1) == [1, 2, 3, 4, 6, 12]


class TestWhatDoesNotFit:
    @pytest.fixture
    def remedy(self, config):
        devices = plan.Devices("two", make_mesh(config.mesh), 8, 100 * MIB, None)

        def ask(name: str, rows: int | None = None, **parts: int) -> str:
            whole = dict.fromkeys(plan.COLUMNS, 0) | {column: mib * MIB for column, mib in parts.items()}
            return plan.remedy(config, [plan.Phase(name, whole)], devices, rows)

        return ask

    def test_parameters_are_spread_over_as_many_devices_as_they_need(self, remedy):
        # 300 MiB on each of two devices: 150 on each of four, 75 on each of eight.
        said = remedy("update", parameters=100, optimizer=200, activations=5)
        assert said == (
            "mesh: parameters and optimizer take 300.0 MiB a device (205.0 MiB too much in update); "
            "mesh.fsdp=8 spreads them"
        )

    def test_a_micro_batch_is_replaced_by_the_largest_that_fits(self, remedy):
        said = remedy("update", rows=2, parameters=10, activations=110)
        assert said == "micro_batch_size: 4 does not fit (20.0 MiB too much in update); set it to 2"

    def test_where_none_fits_more_devices_are_asked_for(self, remedy):
        assert remedy("update", parameters=10, activations=110).endswith("nor does a smaller one; raise mesh.fsdp")

    def test_fewer_rows_are_decoded(self, remedy):
        # 20 MiB stay; 8 rows take 160, so that 80 are those of 4.
        said = remedy("decode", parameters=20, **{"KV cache": 160})
        assert said == "rollout.batch_size: 8 rows do not fit (80.0 MiB too much in decode); about 4 would"

    def test_where_decoding_s_parameters_leave_no_room_they_are_to_be_split(self, remedy):
        said = remedy("decode", parameters=90, optimizer=9, activations=8, **{"KV cache": 80})
        assert said == (
            "rollout: the copy of the parameters for decoding leaves no room (87.0 MiB too much in decode); "
            "raise mesh.tp"
        )

    def test_the_command_ends_with_that_line_and_code_2(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(plan, "memory_at_hand", lambda mesh: 1000)
        monkeypatch.setattr(plan.Planner, "compile", lambda *_: assignment.Account(0, 0, 5000))
        settings = changed(tiny.config(), run_dir=str(tmp_path / "run"))
        assert train.main([*arguments(settings), "--plan"]) == 2
        output, errors = capsys.readouterr()
        assert errors.startswith("error: mesh: parameters and optimizer take 0.3 MiB a device")
        assert errors.count("\n") == 1
        assert output.splitlines()[-1].startswith("update")
        assert not (tmp_path / "run").exists()


class TestTargets:
    @pytest.fixture
    def refused(self, tmp_path, capsys):
        def ask(*options: str) -> str:
            assert train.main([*arguments(changed(tiny.config(), run_dir=str(tmp_path / "run"))), *options]) == 2
            output, errors = capsys.readouterr()
            assert output == ""
            assert errors.count("\n") == 1
            return errors

        return ask

    def test_an_unknown_chip_is_refused_and_the_known_ones_listed(self, refused):
        said = refused("--plan", "--target", "v9x:2x4")
        assert said == (
            "error: --target: target 'v9x:2x4': there are v5e, v5p, v6e, tpu7x and their slices, as in v6e:2x4; "
            "for plans of memory h100, too, as in h100:8\n"
        )

    def test_of_h100s_there_are_those_of_a_host(self, refused):
        assert "there are h100 and h100:2 to h100:8" in refused("--plan", "--target", "h100:9")

    @pytest.mark.skipif(
        gpus.FOLDER.is_dir() or importlib.util.find_spec("jax_plugins") is not None, reason="the plugin is installed"
    )
    def test_without_the_plugin_it_says_how_to_install_it(self, refused, monkeypatch, tmp_path):
        monkeypatch.setattr(gpus, "FOLDER", tmp_path)
        said = refused("--plan", "--target", "h100")
        assert said == (
            "error: --target: XLA's plugin for CUDA, which compiles for GPUs, isn't installed; make aot-gpu does\n"
        )

    def test_without_libtpu_it_says_how_to_install_it(self, refused, monkeypatch):
        monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
        said = refused("--plan", "--target", "v6e:2x4")
        assert said == "error: --target: libtpu, the TPU compiler, isn't installed; make aot does\n"

    def test_training_takes_no_target(self, refused):
        assert "--target: is for --plan" in refused("--target", "v6e:2x4")

    @pytest.mark.aot
    @needs_libtpu
    def test_a_slice_that_is_not_there_is_refused_and_others_listed(self, refused):
        assert "of v6e there are 1x1, 2x2, 2x4, 4x4" in refused("--plan", "--target", "v6e:3x5")

    @pytest.mark.aot
    @needs_libtpu
    def test_a_slice_with_too_few_devices_is_refused(self, refused):
        assert "has 4 devices, a mesh of (1, 8, 1) needs 8" in refused("--plan", "--target", "v6e:2x2", "mesh.fsdp=8")


class TestTheAccount:
    REPORT = """Memory Space: default (color=0)
Total bytes: 1000 (1000B)
Memory Space: vmem (color=1)
Total bytes: 7 (7B)
"""
    ASSIGNMENT = """BufferAssignment:
allocation 0: size 100, parameter 1, shape |f32[25]| at ShapeIndex {}:
 value: <7 x.1 @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 300, output shape is |f32[75]|, maybe-live-out, parameter 0, shape |f32[75]| at ShapeIndex {}:
allocation 2: size 600, preallocated-temp:
 value: <5 y @0> (size=600,offset=0): f32[150]{0}
allocation 3: size 7, color 1, preallocated-temp:
"""

    def test_has_arguments_and_temporaries_in_hbm_and_the_whole(self):
        found = assignment.account(self.REPORT, self.ASSIGNMENT)
        assert found == assignment.Account(arguments=400, temporaries=600, peak=1000)

    @pytest.mark.aot
    @needs_libtpu
    def test_is_what_the_compiled_program_says_of_itself(self):
        sizes = {"tokens": 1024, "features": 256, "vocabulary": 4096}
        found = assignment.read("v6e", "mllm.plan.head_programs:loss", {"chip": 1}, **sizes)
        mesh = targets.mesh("v6e")
        whole = targets.memory(targets.compiled(*head.loss(mesh, **sizes), mesh))
        assert found.arguments == whole["argument"]
        assert found.peak == pytest.approx(whole["peak"], abs=MIB / 2)

    @pytest.mark.aot
    @needs_libtpu
    def test_has_results_that_take_an_argument_s_place_once(self):
        config = tiny.config(rollout={"batch_size": 64, "max_prompt_length": 64, "max_completion_length": 64})
        axes = {"dp": 1, "fsdp": 1, "tp": 1}
        mesh = targets.mesh("v6e", tuple(axes.values()), tuple(axes))
        settings = {"config": config.model_dump(mode="json"), "name": "decode"}
        turn = assignment.read("v6e", "mllm.plan.programs:program", axes, **settings)
        cache = plan.on_device(Programs(config, mesh).cache())
        assert turn.arguments > cache
        assert turn.peak - turn.arguments - turn.temporaries < cache / 10

    @pytest.mark.aot
    @needs_libtpu
    def test_is_given_of_what_is_too_large_too(self):
        sizes = {"tokens": 2**16, "features": 512, "vocabulary": 151936, "impl": "reference"}
        found = assignment.read("v6e", "mllm.plan.head_programs:loss", {"chip": 1}, **sizes)
        assert found.temporaries > 4 * 2**16 * 151936 > targets.HBM["v6e"]

    @pytest.mark.aot
    @needs_libtpu
    @pytest.mark.parametrize("chip", targets.HBM)
    def test_devices_have_the_memory_that_the_compiler_grants(self, chip):
        mesh = targets.mesh(chip)
        shape = jax.ShapeDtypeStruct((2**20, 2**17), np.float32)
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=rf"exceeds available HBM \({targets.HBM[chip] / 2**30:.2f}G\)"
        ):
            targets.compiled(lambda x: jax.lax.sort(2 * x, dimension=0), (shape,), mesh)

    @pytest.mark.aot
    @pytest.mark.slow
    @needs_libtpu
    def test_a_slice_of_tpus_is_planned_for_without_one(self):
        config = config_file.load("qwen25_0p5b_grpo.yaml", ["mesh.fsdp=8"])
        told = []
        plan.plan(config, "v6e:2x4", told.append)
        assert told[0].startswith("v6e:2x4: mesh dp 1, fsdp 8, tp 1, 8 of 8 devices, 31.25 GiB each")
        assert any(line.startswith("fits: ") for line in told)


def test_the_compiler_s_process_ends_with_the_one_that_started_it_however_that_ends(tmp_path):
    ends = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    programs = {end: tmp_path / f"{end.name}.py" for end in ends}
    folders = {end: tmp_path / end.name for end in ends}
    parents = {}
    for end, program in programs.items():
        program.write_text(
            f"import os, time\nopen({str(program)!r} + '.pid', 'x').write(f'{{os.getpid()}} ')\ntime.sleep(300)\n"
        )
        folders[end].mkdir()
        code = f"from mllm.plan import assignment; assignment.read('v6e', {str(program)!r} + ':program', {{}})"
        environment = {**os.environ, "TMPDIR": str(folders[end])}
        parents[end] = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    try:
        for end, parent in parents.items():
            noted = programs[end].with_suffix(".py.pid")
            wait_until(lambda noted=noted: noted.exists() and noted.read_text().endswith(" "))
            parent.send_signal(end)
            parent.wait()
            child = int(noted.read_text())
            wait_until(lambda child=child: not running(child))
            assert list(folders[end].iterdir()) == []
    finally:
        for parent in parents.values():
            parent.kill()


def wait_until(true: Callable[[], bool], seconds: float = 100) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_mesh_of_cpus_shares_the_host_s_memory():
    devices = plan.find_devices(MeshConfig(fsdp=2), None)
    assert devices.available == 8
    assert 2**28 < devices.memory < 2**40
