"""Adapters: their outputs; how they are trained, sampled and saved; and the memory that a frozen model saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import newest, records, run
from tiny import FIXTURES, config, forward_of, load_weights, logits, make_trainer, random_batch

import tools.export
from mllm.algorithms import rollouts
from mllm.config.model import MeshConfig
from mllm.model import weights
from mllm.model.decoder import Decoder
from mllm.model.int8 import quantize
from mllm.model.layout import Layout, map_parameters
from mllm.model.lora import Lora, initial_adapters, merge_all_adapters, split_adapters
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.run.source_run import load_policy
from mllm.sampler.decoding import decoding_graphdef, decoding_weights
from mllm.training.step import init_state
from tools.export import restore

ALL = ("q", "k", "v", "o", "gate", "up", "down", "head")


@pytest.mark.slow
def test_sampling_merges_adapters_to_rounding():
    """On a mesh, with a tied head and rslora's scale; tests/model/test_peft.py has what adapters compute."""
    sizes = weights.read_config(FIXTURES / "grouped_bfloat16")
    layout = Layout.of(make_mesh(MeshConfig(fsdp=1, tp=2)), sizes)
    lora = Lora(rank=3, alpha=6.0, targets=ALL, rslora=True)
    assert lora.scale == pytest.approx(6.0 / 3**0.5)
    graphdef, abstract = nnx.split(Decoder.abstract(sizes, dtype=jnp.float32, lora=lora, layout=layout))
    rng, stored = np.random.default_rng(0), load_weights(FIXTURES / "grouped_bfloat16", tp=2)
    draw = lambda x: jax.device_put(0.1 * rng.normal(size=x.shape).astype(np.float32), x.sharding)  # noqa: E731
    adapters = jax.tree.map(draw, split_adapters(layout.abstract_parameters(abstract))[0])
    whole, tokens = nnx.merge_state(stored, adapters), jnp.arange(24)[None] % sizes.vocab_size
    expected = logits(graphdef, whole, tokens)
    plain = logits(nnx.split(Decoder.abstract(sizes, dtype=jnp.float32))[0], stored, tokens)
    assert np.abs(expected - plain).max() > 1
    merged = decoding_weights(graphdef, whole)
    stacked = nnx.State({**merged.outer, "layers": jax.tree.map(lambda *x: jnp.stack(x), *merged.layers["layers"])})
    decoder = decoding_graphdef(nnx.merge(graphdef, whole))
    np.testing.assert_allclose(logits(decoder, stacked, tokens), expected, atol=1e-4, rtol=0)


def test_adapters_begin_as_no_change_with_seeded_numbers():
    """The numbers are uniform within PEFT's bound, and each adapter has its own."""
    settings = lora_config("sft")
    trained = load_policy(settings, make_mesh(settings.mesh)).trained
    first, other = (initial_adapters(trained, seed)["layers"] for seed in (0, 1))
    for name in first:
        assert (first[name][...] != 0).any() == (first[name][...] != other[name][...]).any() == name.endswith("_a")
    drawn = [np.asarray(leaf) for name, leaf in first.items() if name.endswith("_a")]
    assert {leaf.shape[-1] for leaf in drawn} == {32, 64}
    for leaf in drawn:
        assert 0.9 < np.abs(leaf).max() * leaf.shape[-1] ** 0.5 <= 1
    assert len({leaf.tobytes() for leaf in drawn}) == len(drawn) == 7


def lora_config(algorithm="grpo", **sections):
    model = {"lora": {"rank": 2, "alpha": 8.0}, **sections.pop("model", {})}
    return config(algorithm, model=model, **sections)


INT8 = {"rank": 2, "alpha": 8.0, "base": "int8"}


def in_int8_of(frozen):
    return map_parameters(lambda x, name: jax.jit(quantize)(x) if name.endswith("_weight") else x, frozen)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [{}, {"dp": 2, "fsdp": 2, "tp": 2}], ids=str)
def test_an_int8_base_is_the_same_on_each_mesh(mesh):
    """Adapters learn as on the matrices that the int8 numbers stand for."""
    source = {"init": "pretrained", "architecture": None, "source": str(FIXTURES / "tiny_sft"), "tokenizer": "bytes"}
    settings = lora_config("sft", mesh=mesh, model={**source, "remat": "full", "lora": INT8})
    policy = load_policy(settings, devices := make_mesh(settings.mesh))
    trained, frozen = policy.split(policy.initial_params())
    exact = load_policy(lora_config("sft", model=source), make_mesh(MeshConfig(fsdp=1))).stored_params()
    jax.tree.map(np.testing.assert_array_equal, frozen, in_int8_of(exact))
    for leaf, wanted in zip(*map(jax.tree.leaves, (frozen, policy.stored)), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    forward, batch = forward_of(policy.graphdef, devices, settings), shard_batch(devices, random_batch(8, 20))
    trained = jax.tree.map(lambda x: x + 0.01, trained)

    @jax.jit
    def learn(trained, frozen):
        loss = lambda trained: forward.loss(nnx.merge_state(trained, frozen), batch)[0]  # noqa: E731
        return jax.value_and_grad(loss)(trained)

    result, expected = learn(trained, frozen), learn(trained, merge_all_adapters(frozen, None))
    for mine, yours in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_allclose(mine, yours, rtol=1e-4, atol=1e-5 * np.abs(yours).max())
        assert np.abs(yours).max() > 0


SECTIONS = {
    "steps": 4,
    "grpo": {"num_iterations": 2, "beta": 0.1, "reference": "initial"},
    "task": {"rewards": [{"name": "user_rewards:even_characters"}]},
    "rollout": {"temperature": 0.7},  # a part of the policy, in sampler and trainer
    "checkpoint": {"every": 2},
    "eval": {"every": 2},
}


@pytest.fixture(
    scope="module", params=[pytest.param(None, marks=pytest.mark.slow), pytest.param("int8", marks=pytest.mark.nightly)]
)
def finished(request, tmp_path_factory):
    """A GRPO run with adapters and a KL penalty, and its most embeddings between two phases."""
    model = {"lora": INT8 | {"base": request.param}}
    settings = lora_config(run_dir=str(tmp_path_factory.mktemp("lora") / "whole"), model=model, **SECTIONS)
    counts, pack = [], rollouts.pack
    embeddings = lambda: [array for array in jax.live_arrays() if array.shape == (260, 32)]  # noqa: E731
    before = embeddings()  # held, so that none of another test is freed meanwhile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "pack", lambda *arguments: counts.append(len(embeddings())) or pack(*arguments))
        assert run(settings) == 0
    return settings, max(counts) - len(before)


@pytest.mark.slow
def test_a_run_saves_adapters_only_and_says_how_many(finished, capsys):
    """Its KL reference is the frozen model, held once. run/test_train.py kills a run of distillation."""
    settings, copies = finished
    assert copies == 1
    assert records(settings)[-1]["kl"] > 0
    assert records(settings)[-1]["sampling/sampling_logp_difference/max"] < 1e-4
    assert run(settings) == 0
    count = sum(leaf.size for leaf in jax.tree.leaves(newest(settings).train.params))
    dtypes = "float32/int8" if settings.model.lora.base else "float32"
    assert f" parameters in {dtypes} ({count:,} trained); head" in capsys.readouterr().err
    assert all(name.endswith(("_a", "_b")) for name in newest(settings).train.params["layers"])


@pytest.mark.nightly
def test_a_merged_export_or_its_run_can_begin_a_next_run(finished):
    settings, _ = finished
    assert tools.export.main([settings.run_dir, "--dtype", "float32"]) == 0
    _, policy, _, params = restore(settings.run_dir, None)
    tokens = jnp.arange(20)[None]
    expected = logits(policy.graphdef, params, tokens)
    for source in (f"{settings.run_dir}/export", settings.run_dir):
        model = {"init": "pretrained", "architecture": None, "source": source}
        following = load_policy(lora_config(model=model), make_mesh(MeshConfig(fsdp=1)))
        result = logits(following.graphdef, following.initial_params(), tokens)
        np.testing.assert_allclose(result, expected, atol=1e-5, rtol=0)
    in_int8 = load_policy(lora_config(model={**model, "lora": INT8}), make_mesh(MeshConfig(fsdp=1))).stored_params()
    jax.tree.map(np.testing.assert_array_equal, in_int8["layers"], in_int8_of(following.stored_params())["layers"])


def test_exported_adapters_can_begin_a_next_run_also_in_sft(finished):
    settings, _ = finished
    assert tools.export.main([settings.run_dir, "--adapter"]) == 0
    model = {"lora": {"source": f"{settings.run_dir}/adapter"}}
    following = config("sft", model=model)
    policy, optimizer, step = make_trainer(following)
    initial, ended = policy.initial_params(), newest(settings).train.params
    for name, leaf in ended["layers"].items():
        np.testing.assert_array_equal(initial["layers"][name], leaf)
    trained, frozen = policy.split(initial)
    after, metrics = step(init_state(trained, optimizer), random_batch(8, 20), frozen)
    assert metrics["grad_norm"] > 0
    assert set(after.params["layers"]) == {f"{target}_{part}" for target in ALL[:-1] for part in "ab"}
    assert all((leaf[...] != ended["layers"][name][...]).any() for name, leaf in after.params["layers"].items())
