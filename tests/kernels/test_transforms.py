"""The head, by every engine, under JAX's transformations: each gives what a plain call gives."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TPU_F32, TPU_TILES, XLA, Engine
from jax import export
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from lm_head_cases import OBJECTIVES, assert_near, operands_for, sparse_weights

from lm_head import TokenLogprobs, token_logprobs, token_loss
from lm_head.tpu import tiles as tpu_tiles

OBJECTIVE = OBJECTIVES["clipped ratio"]


class Subject(NamedTuple):
    """A function of hidden states, W, labels, two operands and weights, and an engine for it."""

    engine: Engine
    scalar: Callable[..., tuple[jax.Array, TokenLogprobs]]

    @property
    def arguments(self) -> tuple[jax.Array, ...]:
        given = self.engine.problem(2.0)
        return (*given, *operands_for(given, OBJECTIVE), sparse_weights(len(given.labels)))

    def differentiated(self) -> Callable[..., Any]:
        """(arguments) to ((scalar, outputs), gradients)."""
        return jax.value_and_grad(self.scalar, (0, 1), has_aux=True)

    def run(self, function: Callable[..., Any], *arguments: Any, **strictness: Any) -> Any:
        with self.engine.strictly(**strictness):
            return jax.block_until_ready(jax.jit(function)(*(arguments or self.arguments)))


def of_statistics(engine: Engine) -> Subject:
    def scalar(hidden: Any, weight: Any, labels: Any, _old: Any, _advantage: Any, weights: Any) -> Any:
        outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl=engine.impl)
        return jnp.vdot(weights, outputs.logprob * outputs.entropy + jnp.sin(outputs.lse)), outputs

    return Subject(engine, scalar)


def of_loss(engine: Engine, **copy: Any) -> Subject:
    def scalar(hidden: Any, weight: Any, labels: Any, old: Any, advantage: Any, weights: Any) -> Any:
        options: dict[str, Any] = {"weights": weights, "impl": engine.impl, **copy}
        return token_loss(hidden, weight, labels, OBJECTIVE, old, advantage, **options)

    return Subject(engine, scalar)


ON_TPU = TPU_F32._replace(shape=(200, 300, 64))
SUBJECTS = {
    "token_logprobs, xla": of_statistics(XLA),
    "token_loss, xla": of_loss(XLA),
    "token_loss of a copy, xla": of_loss(XLA, weight_copy=XLA.problem().weight / 2),
    "token_logprobs, mosaic_tpu": of_statistics(ON_TPU),
    "token_loss, mosaic_tpu": of_loss(ON_TPU),
}


@functools.cache
def plainly(name: str) -> Any:
    return SUBJECTS[name].run(SUBJECTS[name].differentiated())


def in_a_checkpoint(subject: Subject) -> Any:
    return subject.run(subject._replace(scalar=jax.checkpoint(subject.scalar)).differentiated())


def exported(subject: Subject) -> Any:
    program = export.export(jax.jit(lambda *args: jax.tree.leaves(subject.differentiated()(*args))))
    with subject.engine.strictly():
        return program(*subject.arguments).call(*subject.arguments)


def with_64_bit_types(subject: Subject) -> Any:
    with jax.enable_x64(True):
        got = subject.run(subject.differentiated())
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32), jnp.dtype(bool)}
    return got


def in_leading_dims(subject: Subject) -> Any:
    hidden, weight, *others = subject.arguments
    fold = lambda x: x.reshape(2, -1, 5, *x.shape[1:])  # noqa: E731
    (value, outputs), (dh, dw) = subject.run(subject.differentiated(), fold(hidden), weight, *map(fold, others))
    assert all(x.shape == (2, len(hidden) // 10, 5) for x in outputs[:4])
    return (value, TokenLogprobs(*(x.reshape(-1) for x in outputs[:4]))), (dh.reshape(hidden.shape), dw)


EVERYWHERE = ["token_logprobs, xla", "token_loss, xla"]


@pytest.mark.parametrize(
    ("transformed", "name"),
    [
        *((t, name) for t in (in_a_checkpoint, exported, with_64_bit_types, in_leading_dims) for name in EVERYWHERE),
        (in_a_checkpoint, "token_loss of a copy, xla"),
    ],
)
def test_results_and_gradients_are_the_same(transformed: Callable[..., Any], name: str) -> None:
    assert_near(jax.tree.leaves(transformed(SUBJECTS[name])), jax.tree.leaves(plainly(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EVERYWHERE, "token_loss, mosaic_tpu"])
def test_vmap_is_a_python_loop(name: str) -> None:
    """The second of the two has few rows that count."""
    subject = SUBJECTS[name]
    *others, weights = (x[::-1] for x in subject.arguments)
    others.append(jnp.where(jnp.arange(len(weights)) < 7, weights, 0))
    stacks = map(jnp.stack, zip(subject.arguments, others, strict=True))
    batched = jax.vmap(subject.differentiated())
    if name == "token_loss, mosaic_tpu":  # the strict interpreter's callbacks don't allow vmap in its loops
        lenient = functools.partial(pl.pallas_call, interpret=True)
        with tpu_tiles.override(**TPU_TILES), mock.patch.object(pl, "pallas_call", lenient):
            got = jax.jit(batched)(*stacks)
    else:
        got = subject.run(batched, *stacks)
    for i, want in enumerate((plainly(name), subject.run(subject.differentiated(), *others))):
        assert_near([x[i] for x in jax.tree.leaves(got)], jax.tree.leaves(want))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EVERYWHERE, "token_logprobs, mosaic_tpu"])
def test_shard_map_over_tokens_gives_the_same(name: str) -> None:
    """The scalars of two shards are summed; W and its gradient are replicated; varying axes are checked."""
    subject = SUBJECTS[name]
    specs = (P("dp"), P(), *[P("dp")] * 4)

    @functools.partial(
        jax.shard_map, mesh=Mesh(np.array(jax.devices()[:2]), ("dp",)), in_specs=specs, out_specs=(P(), P("dp"))
    )
    def sharded(*args: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
        value, outputs = subject.scalar(*args)
        return jax.lax.psum(value, "dp"), outputs

    assert_near(subject.run(subject._replace(scalar=sharded).differentiated()), plainly(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name.endswith("mosaic_tpu")])
def test_kernels_wait_for_their_copies_and_may_run_on_two_cores(name: str) -> None:
    subject = SUBJECTS[name]
    assert_near(subject.run(subject.differentiated(), cores=2, copies="on_wait"), plainly(name))
