"""tools/bench and tools/tune.py: their tables, a method's errors, a method that fails, and tilings."""

import jax
import jax.numpy as jnp
import pytest
import tiny

from lm_head.gpu import tiles as gpu_tiles
from lm_head.tpu import tiles as tpu_tiles
from mllm.parallel.mesh import make_mesh
from mllm.plan.programs import Programs, RolloutPrograms
from mllm.sampler.slots import CHUNK
from tools import tune
from tools.bench import __main__ as bench
from tools.bench import head, logits, methods, rollout, step
from tools.bench.head import Problem
from tools.bench.methods import Method, fused, value_and_gradients

METHOD = Method(value_and_gradients(fused(impl="full_logits")))


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def wrong(hidden, weight, labels, weights, *rest):
    """A log-probability is 3 nats off at rows that don't count, 0.25 at one that counts."""
    value, logprob, dh, dw = METHOD.call(hidden, weight, labels, weights, *rest)
    logprob = logprob + jnp.where(weights == 0, 3.0, 0.0).at[jnp.argmax(weights)].add(0.25)
    return value * 1.01, logprob, dh.at[3, 5].add(0.5 * jnp.abs(dh).max()), dw.at[-1].set(jnp.nan)


def fails(*arrays):
    raise MemoryError("no room")


@pytest.mark.slow
def test_the_head_table_has_times_and_locates_errors(monkeypatch, capsys):
    known = {"right": METHOD, "general": methods.methods("cpu")["xla, general backward"]}
    known |= {"value only": Method(methods.value_only(fused())), "wrong": Method(wrong), "fails": Method(fails)}
    known["loss alone"] = Method(lambda *arrays: (METHOD.call(*arrays)[0], None))
    monkeypatch.setattr(head, "methods", lambda _: known)
    assert bench.main(["head", "--shape", "24,16,130", "--live", "0.5", "--repeats", "1"]) == 0
    output = capsys.readouterr().out
    _, _, bare, right, general, value, off, alone = cells(output)
    assert (bare[0], bare[2:]) == ("3 bare products", ["1.00", "", "", "", "", ""])
    assert all(float(error) < 1e-5 for error in (*right[4:], *general[4:], *value[4:6]))
    assert (value[6:], off[4:]) == (["", ""], ["1.0e-02", "2.5e-01", "5.0e-01", "nan"])
    assert alone[5:] == ["", "", ""]
    assert "failed: fails: MemoryError: no room" in output
    assert bench.main(["head", "--methods", "none"]) == 2


@pytest.mark.slow
def test_the_logits_table_compares_jax_and_its_check_fails(monkeypatch, capsys):
    small = ["logits", "--shape", "8,300", "--rounds", "1"]
    assert bench.main(small) == 0
    assert [row[0] for row in cells(capsys.readouterr().out)[2:]] == ["plain JAX", "xla"]
    assert bench.main([*small, "--check"]) == 0
    right = logits.fused
    monkeypatch.setattr(logits, "fused", lambda *given, **options: right(*given, **options) + 1e-3)
    assert bench.main([*small, "--check"]) == 1


@pytest.mark.slow
def test_the_rollout_table_counts_the_steps_of_the_engine(capsys):
    sizes = ["--rows", "8", "--slots", "4", "--limit", "8", "--hidden", "64", "--layers", "1", "--repeats", "1"]
    assert rollout.main(sizes) == 0
    columns, _, [name, *figures] = cells(capsys.readouterr().out)
    values = dict(zip(columns[2:], map(float, figures[1:]), strict=True))
    assert (name, figures[0]) == ("engine", "1.00 (1.00 to 1.00)")
    assert 8 <= values["tokens"] <= 64
    assert 0 < values["useful"] <= 1 <= values["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", pytest.param("grpo", marks=pytest.mark.nightly)])
def test_the_parts_of_a_step_are_update_and_rollout(algorithm, capsys):
    """GRPO's model has delta nets."""
    settings = ["batch_size=16", "--full"]
    if algorithm == "grpo":
        model = "{" + ", ".join(f"{name}: {value}" for name, value in tiny.QWEN35.items()).replace("'", "") + "}"
        settings = [f"model.architecture={model}", "model.tokenizer=bytes", "batch_size=16", "model.source=null"]
        settings += ["micro_batch_size=8"]
    assert bench.main(["step", "--config", f"tiny_{algorithm}.yaml", "--repeats", "1", *settings]) == 0
    output = capsys.readouterr().out
    times = {name: float(ms) for name, ms, *_ in cells(output)[2:]}
    update = [times.pop(name) for name in ("update", "forward", "head", "backward", "optimizer")]
    assert update[0] == pytest.approx(sum(update[1:]), abs=0.03)
    assert [*times] == (["log-prob", "prefill", "decode"] if algorithm == "grpo" else [])
    rows, length = 16, 32
    assert output.splitlines()[1].startswith(f"{rows} rows of {length} tokens")
    tokens_per_second = float(output.splitlines()[2].split()[0].replace(",", ""))
    assert tokens_per_second == pytest.approx(1e3 * rows * length / update[0], rel=0.02)


@pytest.mark.slow
def test_a_decode_call_takes_a_whole_chunk():
    settings = tiny.config()
    programs = RolloutPrograms(Programs(settings, make_mesh(settings.mesh)), settings.rollout)
    *_, steps = step.decode_calls(programs)[0]["decode"]()
    assert int(steps) == CHUNK


def test_kernels_are_counted_in_branches_of_a_decode_loop():
    program = """
%other (p: f32[]) -> f32[] {
  %a = f32[] fusion(%p), kind=kLoop
}
%yes (p: f32[]) -> f32[] {
  %b = f32[] fusion(%p), kind=kLoop
  %c = f32[] custom-call(%b), custom_call_target="__cublas$gemm"
}
%step (p: f32[]) -> f32[] {
  %d = f32[] fusion(%p), kind=kLoop
  %e = f32[] bitcast(%d)
  %f = f32[] conditional(%q, %e, %e), true_computation=%yes, false_computation=%other
}
ENTRY %main (p: f32[]) -> f32[] {
  %g = f32[] fusion(%p), kind=kLoop
  %h = f32[] while(%g), condition=%more, body=%step
}
"""
    assert step.kernels_of_loop(program) == 4


# tools/tune.py


def test_every_tiling_fits_and_the_default_is_first():
    traced = []
    for tiling in tune.gpu_tilings():
        with tiling.override:
            traced.append(gpu_tiles.choose(*head.LARGE))
    assert traced[0].tiles == gpu_tiles.Tiles()
    assert max(gpu_tiles.shared_memory(each.tiles) for each in traced) <= gpu_tiles.SHARED_MEMORY
    assert len({(each.tiles, each.chunk) for each in traced}) == len(traced) > len(tune.GPU_CHUNKS)
    tilings = [*tune.tpu_tilings(head.LARGE, most=5)]
    narrow, wide = jax.numpy.dtype("bfloat16"), jax.numpy.dtype("float32")
    for name, (kernel, mean, keep, _) in tune.TPU_KERNELS.items():
        gradient = wide if kernel == "forward" else narrow
        case = tpu_tiles.Case(kernel, 8192, 151936, 2048, narrow, narrow, narrow, gradient, mean, keep)
        each = []
        for tiling in (x for x in tilings if x.kernel == name):
            with tiling.override:
                each.append(tpu_tiles.choose(case))
        assert each[0] == tpu_tiles.choose(case)
        assert 1 < len({*each}) == len(each) <= 5
        assert max(sum(tpu_tiles.terms(case, tiles).values()) for tiles in each) < tpu_tiles.vmem()


@pytest.mark.slow
def test_a_method_is_compiled_with_the_wanted_tiles(monkeypatch, capsys):
    traced = []
    call = lambda *arrays: (traced.append(gpu_tiles.choose(*head.LARGE).chunk), METHOD.call(*arrays))[1]  # noqa: E731
    monkeypatch.setattr(tune, "methods", lambda _: {"mosaic_gpu, workspace 0": Method(call)})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    last = [*tune.gpu_tilings()][-2:]
    monkeypatch.setattr(tune, "gpu_tilings", lambda: last)
    monkeypatch.setattr(tune, "Problem", lambda *_: Problem((8, 16, 32), "float32"))
    assert tune.main([]) == 0
    assert traced == [1536, 1024]
    assert capsys.readouterr().out.count("| 3 bare products") == 2
