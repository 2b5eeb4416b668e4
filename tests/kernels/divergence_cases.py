"""Problems of divergences and checks of them, by every engine: `check` says how near to the oracle an answer comes.

The teacher is half as wide again as the student. A token that one of the two has alone would be by far the likeliest.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from divergence_oracle import Divergences, exact_divergences
from engines import TPU, TPU_F32, XLA, XLA_BF16
from lm_head_cases import SCALES, assert_as_accurate_as_plain

from lm_head import divergence_loss, token_divergence

F32 = jnp.float32
KINDS = {"forward_kl": {}, "reverse_kl": {}, "jsd": {"beta": 0.3}}
GENERAL = "general"
"""`token_divergence` under cotangents; the other ways are `divergence_loss` with so much workspace."""
WAYS = {XLA: (GENERAL, "none", "some", "all"), XLA_BF16: ("some",), TPU: ("none",), TPU_F32: (GENERAL,)}


class Models(NamedTuple):
    hidden: jax.Array
    weight: jax.Array
    teacher_hidden: jax.Array
    teacher_weight: jax.Array


def models_of(engine, scale=3.0, more=40, common=None):
    """Logits with a standard deviation of `scale`, a number or one a row; the teacher has `more` rows of the weight."""
    (n, v, d), rng = engine.shape, np.random.default_rng(1)
    t, common = 3 * d // 2, min(v, v + more) if common is None else common
    arrays = [rng.normal(size=size) for size in ((n, d), (v, d), (n, t), (v + more, t))]
    for hidden, weight in (arrays[:2], arrays[2:]):
        hidden *= np.broadcast_to(scale, n)[:, None] / math.sqrt(hidden.shape[1])
        weight[common:] *= 30
    return Models(*(jnp.asarray(x, engine.dtype) for x in arrays))


def alike(engine, difference=0.0):
    """A student of all scales, and a teacher whose hidden states differ by this part, a number or one a row."""
    rows = np.arange(engine.shape[0])
    models = models_of(engine, np.resize(list(SCALES.values()), len(rows)))
    noise = 1 + np.broadcast_to(difference, rows.shape)[:, None] * np.random.default_rng(2).normal(size=models[0].shape)
    return Models(*models[:2], (models.hidden * noise).astype(models.hidden.dtype), jnp.array(models.weight))


def cotangents_of(models):
    return jnp.asarray(np.random.default_rng(3).normal(size=len(models.hidden)), F32)


STATIC = ("kind", "beta", "softcap", "teacher_vocabulary", "workspace", "impl", "dtype", "sharding")


@functools.partial(jax.jit, static_argnames=STATIC)
def answer(models, cotangents, live, workspace, **options):
    """`sum_i cotangents_i * divergence_i`, the divergences, and gradients; by token_divergence without a workspace."""
    if workspace is None:
        alone = functools.partial(token_divergence, where=live, **options)
        values, pull_back = jax.vjp(lambda h, w: alone(h, w, *models[2:]), *models[:2])
        return jnp.vdot(jnp.where(live, cotangents, 0), values), Divergences(values, *pull_back(cotangents))
    options |= {"weights": jnp.where(live, cotangents, 0), "workspace": workspace}
    loss = jax.value_and_grad(lambda h, w: divergence_loss(h, w, *models[2:], **options), (0, 1), has_aux=True)
    (total, values), gradients = loss(*models[:2])
    return total, Divergences(values, *gradients)


def run(engine, way, models, kind, live=None, **options):
    """The engine's answer. Cotangents of rows that don't count are NaN."""
    live = np.ones(len(models.hidden), bool) if live is None else live
    given = jnp.where(live, cotangents_of(models), jnp.nan)
    workspace = None if way == GENERAL else engine.bytes_of(way)
    options = {"temperature": 1.0} | KINDS[kind] | options  # a traced temperature: one program for all
    with engine.strictly():
        return answer(models, given, jnp.asarray(live), workspace, kind=kind, impl=engine.impl, **options)


def values_of(y, teacher_y, *, kind, beta=0.5, temperature=1.0, softcap=None):
    """Divergences of the softmaxes of two arrays of products, as anyone would write them."""

    def log_softmax(y):
        y = y if softcap is None else softcap * jnp.tanh(y / softcap)
        return jax.nn.log_softmax(y / temperature)

    def kl(log_a, log_b):
        return jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=1)

    student, teacher = log_softmax(y), log_softmax(teacher_y)
    middle = jnp.logaddexp(math.log(beta) + teacher, math.log1p(-beta) + student)
    if kind == "jsd":
        return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)
    return kl(teacher, student) if kind == "forward_kl" else kl(student, teacher)


@functools.partial(jax.jit, static_argnames=STATIC)
def plain(models, cotangents, live, *, teacher_vocabulary=None, **options):
    """The yardstick: full logits in float32, products of the inputs' dtype, and JAX's derivative in between."""
    hidden, weight, teacher_hidden, teacher_weight = models
    common = teacher_vocabulary or min(len(weight), len(teacher_weight))
    product = functools.partial(jnp.einsum, preferred_element_type=F32)
    teacher_y = product("nd,vd->nv", teacher_hidden, teacher_weight[:common])
    of_y = functools.partial(values_of, teacher_y=teacher_y, **options)
    values, pull_back = jax.vjp(of_y, product("nd,vd->nv", hidden, weight[:common]))
    dy = pull_back(jnp.where(live, cotangents, 0))[0].astype(hidden.dtype)
    dw = jnp.zeros_like(weight).at[:common].set(product("nv,nd->vd", dy, hidden).astype(weight.dtype))
    return Divergences(jnp.where(live, values, 0), product("nv,vd->nd", dy, weight[:common]).astype(hidden.dtype), dw)


def check(engine, way, models, kind, rows="every", **options):
    """Results, after they were found as accurate as the plain program's. Rows that don't count hold poison."""
    live, cotangents = engine.live(rows), cotangents_of(models)

    def poisoned(x):
        return jnp.where(live[:, None], x, jnp.asarray(np.resize([np.nan, np.inf, -np.inf], x.shape), x.dtype))

    sick = models._replace(hidden=poisoned(models.hidden), teacher_hidden=poisoned(models.teacher_hidden))
    total, got = run(engine, way, sick, kind, live, **options)
    options = {"kind": kind, "temperature": 1.0} | KINDS[kind] | options
    options.pop("sharding", None)
    yardstick = plain(models, cotangents, jnp.asarray(live), **options)
    truth = exact_divergences(*models, cotangents, where=live, **options)
    assert_as_accurate_as_plain(got, yardstick, truth)
    terms = np.where(live, cotangents * got.values, 0)
    np.testing.assert_allclose(total, terms.sum(), rtol=0, atol=1e-6 * np.abs(terms).sum())
    assert got.values.dtype == total.dtype == F32
    assert [x.dtype for x in got[1:]] == [engine.dtype] * 2
    assert not np.any(got.values[~live])
    assert not np.any(got.hidden.astype(F32)[~live])
    return got
