"""The head under JAX's transformations: each gives what a plain call gives."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OBJECTIVES, assert_near, operands_for, sparse_weights
from engines import TPU_F32, TPU_TILES, XLA, Engine
from jax import export
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lm_head import token_logprobs, token_loss
from lm_head.tpu import tiles as tpu_tiles

OBJECTIVE = OBJECTIVES["clipped ratio"]
TPU = TPU_F32._replace(shape=(200, 300, 64))


def arguments_of(engine: Engine) -> tuple[jax.Array, ...]:
    """Hidden states, weight, labels, two operands and weights."""
    given = engine.problem(2.0)
    return (*given, *operands_for(given, OBJECTIVE), sparse_weights(len(given.labels)))


def scalar_of(engine: Engine) -> Callable[..., Any]:
    """A loss, with a copy of the weight, plus any function of the statistics. Returns the statistics as well."""

    def scalar(*arguments: Any) -> Any:
        *problem, old, advantage, weights = arguments
        options: dict[str, Any] = {"impl": engine.impl, "weight_copy": engine.problem().weight / 2}
        loss, beside = token_loss(*problem, OBJECTIVE, old, advantage, weights=weights, **options)
        tokens = token_logprobs(*problem, where=weights != 0, impl=engine.impl)
        return loss + jnp.vdot(weights, tokens.logprob * tokens.entropy + jnp.sin(tokens.lse)), (beside, tokens)

    return scalar


def differentiated(scalar: Callable[..., Any]) -> Callable[..., Any]:
    """(arguments) to ((scalar, outputs), gradients)."""
    return jax.value_and_grad(scalar, (0, 1), has_aux=True)


def run(engine: Engine, function: Callable[..., Any], *arguments: Any, **strictness: Any) -> Any:
    with engine.strictly(**strictness):
        return jax.block_until_ready(jax.jit(function)(*(arguments or arguments_of(engine))))


@functools.cache
def plainly(engine: Engine) -> Any:
    return run(engine, differentiated(scalar_of(engine)))


both = pytest.mark.parametrize("engine", [XLA, pytest.param(TPU, marks=pytest.mark.nightly)])


@pytest.mark.slow
def test_in_a_checkpoint_and_exported_results_are_the_same() -> None:
    scalar = jax.checkpoint(scalar_of(XLA))
    program = export.export(jax.jit(lambda *args: jax.tree.leaves(differentiated(scalar)(*args))))
    with XLA.strictly():
        result = program(*arguments_of(XLA)).call(*arguments_of(XLA))
    assert_near(result, jax.tree.leaves(plainly(XLA)))


@pytest.mark.slow
@both
def test_vmap_matches_a_python_loop(engine: Engine) -> None:
    """The second of the two has few rows that count."""
    *others, weights = (x[::-1] for x in arguments_of(engine))
    others.append(jnp.where(jnp.arange(len(weights)) < 7, weights, 0))
    stacks = map(jnp.stack, zip(arguments_of(engine), others, strict=True))
    batched = jax.vmap(differentiated(scalar_of(engine)))
    if engine is TPU:  # the strict interpreter's callbacks don't allow vmap in its loops
        lenient = functools.partial(pl.pallas_call, interpret=True)
        with tpu_tiles.override(**TPU_TILES), mock.patch.object(pl, "pallas_call", lenient):
            got = jax.jit(batched)(*stacks)
    else:
        got = run(engine, batched, *stacks)
    for i, want in enumerate((plainly(engine), run(engine, differentiated(scalar_of(engine)), *others))):
        assert_near([x[i] for x in jax.tree.leaves(got)], jax.tree.leaves(want))


@pytest.mark.slow
@both
def test_shard_map_over_tokens_gives_the_same(engine: Engine) -> None:
    """The scalars of two shards are summed; W and its gradient are replicated; varying axes are checked."""
    mesh, specs = Mesh(np.array(jax.devices()[:2]), ("dp",)), (P("dp"), P(), *[P("dp")] * 4)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=(P(), P("dp")))
    def sharded(*args: jax.Array) -> Any:
        value, outputs = scalar_of(engine)(*args)
        return jax.lax.psum(value, "dp"), outputs

    assert_near(run(engine, differentiated(sharded)), plainly(engine))


@pytest.mark.nightly
def test_kernels_wait_for_their_copies_and_may_run_on_two_cores() -> None:
    assert_near(run(TPU, differentiated(scalar_of(TPU)), cores=2, copies="on_wait"), plainly(TPU))
