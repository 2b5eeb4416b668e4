"""The head and `logits_logprobs`, in every way, under JAX's transformations: each gives what a plain call gives."""

import contextlib
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
from logits_cases import ACROSS, SMALL, problem, small_tiles, taking

from kernels.lm_head import TokenLogprobs, token_logprobs, token_loss
from kernels.lm_head.tpu import tiles as tpu_tiles
from kernels.logits import logits_logprobs

OBJECTIVE = OBJECTIVES["clipped ratio"]


class Subject(NamedTuple):
    """A function whose arguments have a row a token, the last of them the weights, and the second may be W."""

    scalar: Callable[..., tuple[jax.Array, TokenLogprobs]]
    arguments: tuple[jax.Array, ...]
    way: Callable[..., contextlib.AbstractContextManager[Any]]
    sides: tuple[int, ...]
    """Arguments by which it is differentiated: hidden and W, or logits."""

    def differentiated(self) -> Callable[..., Any]:
        """(arguments) to ((scalar, outputs), gradients)."""
        return jax.value_and_grad(self.scalar, self.sides, has_aux=True)

    def run(self, function: Callable[..., Any], *arguments: Any, **strictness: Any) -> Any:
        with self.way(**strictness):
            return jax.block_until_ready(jax.jit(function)(*(arguments or self.arguments)))


def scalar_of(outputs: TokenLogprobs, weights: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
    return jnp.vdot(weights, outputs.logprob * outputs.entropy + jnp.sin(outputs.lse)), outputs


def of_head(engine: Engine, entry: Callable[..., Any], shape: tuple[int, int, int]) -> Subject:
    def likelihood(hidden: Any, weight: Any, labels: Any, _old: Any, _advantage: Any, weights: Any) -> Any:
        return scalar_of(token_logprobs(hidden, weight, labels, where=weights != 0, impl=engine.impl), weights)

    def loss(hidden: Any, weight: Any, labels: Any, old: Any, advantage: Any, weights: Any) -> Any:
        operands = (old, advantage)
        return token_loss(hidden, weight, labels, OBJECTIVE.in_jax, *operands, weights=weights, impl=engine.impl)

    given = engine.problem(2.0, shape)
    arguments = (*given, *operands_for(given, OBJECTIVE), sparse_weights(shape[0]))
    return Subject(likelihood if entry is token_logprobs else loss, arguments, engine.strictly, (0, 1))


def of_logits(way: str, shape: tuple[int, int]) -> Subject:
    def scalar(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
        impl: Any = "mosaic_tpu" if way == "kernels" else "xla"
        return scalar_of(logits_logprobs(logits, labels, where=weights != 0, impl=impl), weights)

    weights = jnp.where(jnp.arange(shape[0]) % 3 == 0, 0, jnp.linspace(-1, 1, shape[0]))
    return Subject(scalar, (*problem(shape), weights), functools.partial(taking, way), (0,))


SUBJECTS = {
    "token_logprobs, xla": of_head(XLA, token_logprobs, (90, 301, 16)),
    "token_loss, xla": of_head(XLA, token_loss, (90, 301, 16)),
    "token_logprobs, mosaic_tpu": of_head(TPU_F32, token_logprobs, (200, 300, 64)),
    "token_loss, mosaic_tpu": of_head(TPU_F32, token_loss, (200, 300, 64)),
    "logits, tiles": of_logits("tiles", SMALL),
    "logits, reduction": of_logits("reduction", SMALL),
    "logits, kernels": of_logits("kernels", SMALL),
    "many logits, kernels": of_logits("kernels", ACROSS),
}


def subjects(*names: str) -> Any:
    return pytest.mark.parametrize("name", names)


@pytest.fixture(autouse=True)
def tiles_of_logits_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


@functools.cache
def plainly(name: str) -> Any:
    return SUBJECTS[name].run(SUBJECTS[name].differentiated())


def in_a_checkpoint(subject: Subject) -> Any:
    return subject.run(subject._replace(scalar=jax.checkpoint(subject.scalar)).differentiated())


def exported(subject: Subject) -> Any:
    program = export.export(jax.jit(lambda *args: jax.tree.leaves(subject.differentiated()(*args))))
    with subject.way():
        return program(*subject.arguments).call(*subject.arguments)


def with_64_bit_types(subject: Subject) -> Any:
    with jax.enable_x64(True):
        got = subject.run(subject.differentiated())
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32)}
    return got


@subjects("token_logprobs, xla", "token_loss, xla", "logits, tiles", "logits, reduction")
@pytest.mark.parametrize("transformed", [in_a_checkpoint, exported, with_64_bit_types])
def test_results_and_gradients_are_the_same(transformed: Callable[..., Any], name: str) -> None:
    assert_near(transformed(SUBJECTS[name]), plainly(name))


@subjects(*(name for name in SUBJECTS if name not in ("token_logprobs, mosaic_tpu", "many logits, kernels")))
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


@subjects(*(name for name in SUBJECTS if name not in ("token_loss, mosaic_tpu", "many logits, kernels")))
def test_shard_map_over_tokens_gives_the_same(name: str) -> None:
    """The scalars of two shards are summed; W and its gradient are replicated; varying axes are checked."""
    subject = SUBJECTS[name]
    rows = len(subject.arguments[0])
    specs = tuple(P("dp") if len(x) == rows else P() for x in subject.arguments)

    @functools.partial(
        jax.shard_map, mesh=Mesh(np.array(jax.devices()[:2]), ("dp",)), in_specs=specs, out_specs=(P(), P("dp"))
    )
    def sharded(*args: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
        value, outputs = subject.scalar(*args)
        return jax.lax.psum(value, "dp"), outputs

    assert_near(subject.run(subject._replace(scalar=sharded).differentiated()), plainly(name))


@pytest.mark.parametrize(
    ("name", "strictness"),
    [
        ("token_logprobs, mosaic_tpu", {"cores": 2}),
        ("token_logprobs, mosaic_tpu", {"copies": "on_wait"}),
        ("token_loss, mosaic_tpu", {"cores": 2}),
        ("token_loss, mosaic_tpu", {"copies": "on_wait"}),
        ("logits, kernels", {"copies": "on_wait"}),
        ("many logits, kernels", {"cores": 2}),
    ],
    ids=str,
)
def test_kernels_wait_for_their_copies_and_may_run_on_two_cores(name: str, strictness: dict[str, Any]) -> None:
    subject = SUBJECTS[name]
    assert_near(subject.run(subject.differentiated(), **strictness), plainly(name))
