"""Divergence of a teacher's next-token distribution and a student's, from the hidden states of both: entry points.

Neither model's logits exist as an array. The student's side is differentiable, the teacher's is not.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from . import autodiff, target
from .arguments import check_model, checked_inputs, checked_options
from .contract import Gradients, Inputs, Options, Terms
from .layout import HeadSharding, Rows, run_on_mesh
from .shapes import Array, Bool, Float
from .sharded import ShardedPair
from .target import same_varying
from .two_softmaxes import KINDS, Divergence, Kind, Pair, PairEngine, TwoSoftmaxes

_MODULES: Mapping[str, str] = {"xla": ".divergence_xla", "mosaic_tpu": ".tpu.divergence"}  # imported when asked for
_DEFAULTS = {"tpu": "mosaic_tpu"}  # where it can run; elsewhere "xla"


def token_divergence(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    teacher_hidden: Float[Array, "*N E"],
    teacher_weight: Float[Array, "W E"],
    *,
    kind: Kind = "reverse_kl",
    beta: float = 0.5,
    where: Bool[Array, "*N"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    teacher_vocabulary: int | None = None,
    weight_copy: Float[Array, "V D"] | None = None,
    dtype: Any = None,
    impl: str | None = None,
    sharding: HeadSharding | None = None,
) -> Float[Array, "*N"]:
    """The divergence of each token's two distributions over the vocabulary, float32, in nats; 0 for equal models.

    Differentiable in `hidden` and `weight` under any cotangent (reverse mode, first order).

    Errors, and args beyond these, are those of `token_logprobs`:
        teacher_hidden, teacher_weight: bfloat16 or float32, of the teacher's own width; no gradient reaches them.
        kind: "reverse_kl" is KL(student || teacher), "forward_kl" KL(teacher || student), and "jsd" the generalised
            Jensen-Shannon divergence: with m = beta teacher + (1 - beta) student,
            beta KL(teacher || m) + (1 - beta) KL(student || m) (Agarwal et al. 2023, arXiv:2306.13649).
        beta: the teacher's share of jsd, above 0 and below 1; towards them jsd over beta (or 1 - beta) tends to
            forward_kl (or reverse_kl).
        temperature, softcap: of both models' logits.
        teacher_vocabulary: both models have the first so many tokens in common, and have no others: both softmaxes are
            over these. None: the smaller of V and W.
        weight_copy: what is multiplied in place of `weight`, as for `token_logprobs`.
        impl: "xla", which runs everywhere; "mosaic_tpu"; None: on TPUs mosaic_tpu where it can run, else xla.
        sharding: the layout of both models' arrays. Where V and W differ and the vocabulary is spread, the larger
            weight is copied.
    """
    student = checked_inputs(hidden, weight, where=where, temperature=temperature, weight_copy=weight_copy)
    others: Any = weight, teacher_hidden, teacher_weight
    student, others, how, options = _checked(student, others, kind, beta, softcap, teacher_vocabulary, dtype)

    def run(rows: Rows, student: Inputs, weight: Array, *teacher: Array) -> Float[Array, "*N"]:
        pair = _pair(rows, student, teacher_vocabulary, *teacher)
        engine = _engine(impl, pair, how, options, rows.sharding)
        return rows.folded(_divergences(engine, options, pair, (student.hidden, weight)))

    return run_on_mesh(run, sharding, student, others)


def divergence_loss(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    teacher_hidden: Float[Array, "*N E"],
    teacher_weight: Float[Array, "W E"],
    *,
    weights: Float[Array, "*N"] | None = None,
    where: Bool[Array, "*N"] | None = None,
    workspace: int | None = None,
    kind: Kind = "reverse_kl",
    beta: float = 0.5,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    teacher_vocabulary: int | None = None,
    weight_copy: Float[Array, "V D"] | None = None,
    dtype: Any = None,
    impl: str | None = None,
    sharding: HeadSharding | None = None,
) -> tuple[Float[Array, ""], Float[Array, "*N"]]:
    """`sum_i weights_i * divergence_i`, and the divergences without gradient; loss, dh and dW in one pass.

    With r = E / D, in matrix products of 2 N V D flops: 3 + r where `workspace` has room for both models' logits of
    some tokens, which mosaic_tpu never keeps, else 4 + 2 r (jsd: 5 + 3 r). Arguments and errors are those of
    `token_divergence` and `token_loss`.
    """
    how_to: dict[str, Any] = {"temperature": temperature, "weight_copy": weight_copy}
    student = checked_inputs(hidden, weight, where=where, weights=weights, **how_to)
    shares = np.ones(np.shape(hidden)[:-1], np.float32) if weights is None else weights
    others: Any = weight, shares, teacher_hidden, teacher_weight
    student, others, how, options = _checked(student, others, kind, beta, softcap, teacher_vocabulary, dtype, workspace)

    def run(rows: Rows, student: Inputs, weight: Array, shares: Array, *teacher: Array) -> Any:
        pair = _pair(rows, student, teacher_vocabulary, *teacher)
        engine = _engine(impl, pair, how, options, rows.sharding)
        terms = Terms(_ITSELF, rows.flat(shares).astype(jnp.float32))
        loss, (found,) = autodiff.loss(engine, options, pair, (student.hidden, weight), terms)
        return loss, rows.folded(jax.lax.stop_gradient(found))

    return run_on_mesh(run, sharding, student, others, lambda tokens: (PartitionSpec(), tokens))


# --- the rules of differentiation -----------------------------------------------------------------------------------


_ITSELF = jax.tree_util.Partial(lambda divergence: divergence)  # the objective of a token's loss


@dataclasses.dataclass(frozen=True)
class _Comparing:
    """An engine for pairs which compares them by one divergence, with the passes of an engine of the head."""

    engine: PairEngine
    how: Divergence

    def forward(self, pair: Pair, options: Options) -> tuple[TwoSoftmaxes, None]:
        return self.engine.forward(pair, self.how, options.values_alone), None

    def gradients(self, pair: Pair, found: TwoSoftmaxes, _: None, slopes: Array, options: Options) -> Gradients:
        return self.engine.gradients(pair, found, slopes, self.how, options)

    def loss_and_gradients(self, pair: Pair, terms: Terms, options: Options) -> tuple[TwoSoftmaxes, Gradients]:
        return self.engine.loss_and_gradients(pair, terms.weights, self.how, options)

    def obstacle(self, pair: Pair, options: Options) -> str | None:
        return self.engine.obstacle(pair, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _divergences(engine: Any, options: Options, pair: Pair, sides: autodiff.Sides) -> Float[Array, "N"]:
    """The divergences."""
    return engine.forward(pair, options)[0].divergence


def _divergences_forward(engine: Any, options: Options, pair: Any, sides: Any) -> Any:
    options, pair = autodiff.with_wanted(options, sides), autodiff.values(pair)
    found, _ = engine.forward(pair, options)
    return found.divergence, (options, pair, found)


def _divergences_backward(engine: Any, _: Options, residuals: Any, cotangent: Any) -> Any:
    options, pair, found = residuals
    return None, engine.gradients(pair, found, None, autodiff.instantiate(cotangent), options)


_divergences.defvjp(_divergences_forward, _divergences_backward, symbolic_zeros=True)


# --- arguments --------------------------------------------------------------------------------------------------------


def _engine(impl: str | None, pair: Pair, how: Divergence, options: Options, sharding: HeadSharding | None) -> Any:
    if impl not in (None, *_MODULES):
        raise ValueError(f"impl must be None or one of {', '.join(_MODULES)}, not {impl!r}")
    name = impl or _DEFAULTS.get(target.platform(None if sharding is None else sharding.mesh), "xla")
    engine, by_xla = (ShardedPair.of(_Comparing(_load(x), how), sharding) for x in (name, "xla"))
    why_not = engine.obstacle(pair, options)
    if why_not is not None and impl is not None:
        raise ValueError(f"impl: {impl} can't run here: {why_not}")
    return engine if why_not is None else by_xla


def _load(impl: str) -> Any:
    return importlib.import_module(_MODULES[impl], __package__)


def _pair(rows: Rows, student: Inputs, teacher_vocabulary: int | None, hidden: Array, weight: Array) -> Pair:
    """The student, and the teacher of these hidden states [*N, E] and weight."""
    hidden, columns = rows.flat(hidden), None if teacher_vocabulary is None else jnp.int32(teacher_vocabulary)
    if rows.sharding is not None:
        rows.sharding.check(hidden, weight, "teacher_")
    student = student._replace(columns=columns)
    return Pair(student, student._replace(hidden=hidden, weight=weight))


def _checked(
    student: Inputs,
    others: tuple[Any, ...],
    kind: str,
    beta: float,
    softcap: float | None,
    teacher_vocabulary: int | None,
    dtype: Any,
    workspace: Any = None,
) -> tuple[Inputs, tuple[Array, ...], Divergence, Options]:
    """The student and the `others`, as arrays; how the distributions are compared; and options.

    The others are the weight first, and the teacher's hidden states and weight last.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind == "jsd" and not 0 < beta < 1:
        raise ValueError(f"beta must be above 0 and below 1, not {beta}; kind names forward_kl and reverse_kl")
    check_model("teacher_", *others[-2:])
    lead, teachers = (np.shape(x)[:-1] for x in (student.hidden, others[-2]))
    if teachers != lead:
        raise ValueError(f"teacher_hidden must have hidden's leading shape {list(lead)}, not {list(teachers)}")
    shared = min(len(others[0]), len(others[-1]))
    if teacher_vocabulary is not None and not 1 <= teacher_vocabulary <= shared:
        raise ValueError(f"teacher_vocabulary must be within [1, {shared}], not {teacher_vocabulary}")
    student, others = same_varying((student, others))
    multiplied = *student[:2], *others[-2:]
    options = checked_options(softcap, dtype, multiplied, (student.hidden, others[0]), workspace)
    return student, others, Divergence(kind, float(beta) if kind == "jsd" else 0.0), options
