"""The oracle: the head's right answer in float64 NumPy with full logits, and how near an answer has to come.

docs/head.md has the formulas. Rows that don't count are never read. The oracle shares no code with an engine.

Suffixes: R rows that count, V tokens of the vocabulary, D features. p is the student's softmax, q the teacher's.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

EPS = float(np.finfo(np.float32).eps)
SLACK = 1.25
"""By this factor an error may exceed that of rounding a product's operands and results: sums have other orders."""


class Answer(NamedTuple):
    """The statistics of each token, and both gradients of a scalar of the statistics. A field not asked for is None."""

    logprob: Any  # [N], as the next two
    lse: Any
    entropy: Any
    hidden: Any  # [N, D]: the gradient by hidden
    weight: Any  # [V, D]: the gradient by weight
    divergence: Any = None  # [N], as the next two
    mean_logit: Any = None
    collision: Any = None
    likeliest: Any = None  # [N]; the oracle doesn't say: rounding decides what ties


class Slopes(NamedTuple):
    """A scalar's derivatives by each token's statistics, [N] each; None: it doesn't depend on them."""

    logprob: Any = None
    lse: Any = None
    entropy: Any = None
    divergence: Any = None
    mean_logit: Any = None


class Teacher(NamedTuple):
    """The head's arguments about a teacher."""

    hidden: Any
    weight: Any
    kind: str = "jsd"
    beta: float = 0.3
    temperature: float | None = None  # None: the student's
    softcap: float | str | None = "same"  # as the student's


class Exact(NamedTuple):
    """The right answer, and how near an answer in float32, with products in another dtype, has to come."""

    answer: Answer
    resolution: Answer
    """A number each: how far a result moves, at most, with float32's roundings of products and results.

    The number of roundings is 4, or the root of a product's number of terms: each term of a sum is rounded, up or down.
    """
    rounded: tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "V D"]]
    """Both gradients, with operands rounded to the products' dtype and results to the gradients' dtypes."""


class ExactLoss(NamedTuple):
    loss: float
    resolution: float
    rows: Exact


Objective = Callable[..., jax.Array]
"""(logprob, entropy, *operands) of a token to its part of the loss. Keyword arguments are passed by name."""


class Model(NamedTuple):
    """One model's hidden states, weight, log-probabilities and the largest sum of a product's absolute terms."""

    hidden_RD: np.ndarray
    weight_VD: np.ndarray
    z_RV: np.ndarray
    slope_RV: np.ndarray  # of the logits by the products
    lse_R1: np.ndarray
    log_p_RV: np.ndarray
    largest: float


def exact(
    hidden: Any,
    weight: Any,
    labels: Any,
    slopes: Callable[[Answer], Slopes] = lambda _: Slopes(),
    *,
    where: Any = None,
    temperature: Any = 1.0,
    softcap: float | None = None,
    vocabulary: int | None = None,
    teacher: Teacher | None = None,
    dtype: Any = np.float32,
) -> Exact:
    """The head's outputs, and the gradients of the scalar that has these slopes by them.

    Args:
        hidden: [N, D], of any dtype.
        weight: [V, D], of any dtype.
        labels: [N] integers.
        where: [N], the rows that count. None: every row.
        dtype: the dtype of the products' operands.
    """
    live = np.flatnonzero(np.ones(len(labels)) if where is None else where)
    columns = vocabulary or min(len(x) for x in (weight, weight if teacher is None else teacher.weight))
    model = functools.partial(_model, live, columns)
    h_RD, w_VD, z_RV, slope_RV, lse_R1, log_p_RV, largest = model(hidden, weight, temperature, softcap)
    p_RV, at_label = np.exp(log_p_RV), (np.arange(len(live)), np.asarray(labels)[live])

    def rows(x_R: np.ndarray) -> np.ndarray:
        x_N = np.zeros(len(labels))
        x_N[live] = x_R
        return x_N

    entropy_R1 = -(p_RV * log_p_RV).sum(axis=1, keepdims=True)
    partial = Answer(rows(log_p_RV[at_label]), rows(lse_R1[:, 0]), rows(entropy_R1[:, 0]), None, None)
    partial = partial._replace(mean_logit=rows(z_RV.mean(axis=1)), collision=rows((p_RV**2).sum(axis=1)))
    value_R1, by_z_RV, by_teacher_RV, mass_RV = 0 * lse_R1, 0 * z_RV, 0 * z_RV, 0 * z_RV
    if teacher is not None:
        teacher_cap = softcap if teacher.softcap == "same" else teacher.softcap
        theirs = model(teacher.hidden, teacher.weight, teacher.temperature or temperature, teacher_cap)
        value_R1, by_z_RV, by_teacher_RV, mass_RV = _divergence(teacher, log_p_RV, theirs.log_p_RV)
        partial = partial._replace(divergence=rows(value_R1[:, 0]))
        largest = max(largest, theirs.largest)
        by_teacher_RV = by_teacher_RV * theirs.z_RV

    given = slopes(partial)
    by_logprob, by_lse, by_entropy, by_divergence, by_mean = (
        np.zeros((len(live), 1)) if x is None else np.asarray(x, np.float64)[live, None] for x in given
    )
    spread_RV, hit_RV = -p_RV * (log_p_RV + entropy_R1), 0 * p_RV
    hit_RV[at_label] = 1
    factors = by_logprob, by_lse - by_logprob, by_entropy, by_mean / columns, by_divergence
    terms = hit_RV, p_RV, spread_RV, 1, by_z_RV
    dy_RV = slope_RV * sum(factor * term for factor, term in zip(factors, terms, strict=True))
    # A slope is a sum of terms, and the sizes are sums of their absolute values. They leave out the factor of a
    # softcap, 1 - tanh^2, which is rounded as 1 is. The divergence's own terms are larger than their difference.
    sizes_RV = sum(abs(factor * x) for factor, x in zip(factors, (*terms[:4], mass_RV), strict=True)) / temperature
    gradients = _gradients(hidden, weight, live, dy_RV, h_RD, w_VD)
    narrow_RV = dy_RV.astype(np.float32).astype(dtype).astype(np.float64)
    rounded = _gradients(hidden, weight, live, narrow_RV, h_RD, w_VD)
    rounded = tuple(x.astype(own.dtype).astype(np.float64) for x, own in zip(rounded, (hidden, weight), strict=True))

    sums = sizes_RV @ np.abs(w_VD), sizes_RV.T @ np.abs(h_RD)
    moves = [largest * np.abs(x).max(initial=0) + y.max(initial=0) for x, y in zip(gradients, sums, strict=True)]
    steepness, apart = (np.abs(x).sum(axis=1).max(initial=0) for x in (spread_RV * z_RV, by_z_RV * z_RV))
    apart += np.abs(by_teacher_RV).sum(axis=1).max(initial=0)
    resolution = Answer(
        logprob=largest,
        lse=largest,
        entropy=1 + steepness + entropy_R1.max(initial=0),
        hidden=moves[0],
        weight=moves[1],
        divergence=1 + apart + np.abs(value_R1).max(initial=0),
        mean_logit=largest,
        collision=largest,
        likeliest=0,
    )
    answer, hair = partial._replace(hidden=gradients[0], weight=gradients[1]), EPS * max(4, np.sqrt(h_RD.shape[1]))
    return Exact(answer, Answer(*(hair * float(x) for x in resolution)), rounded)


def exact_loss(
    hidden: Any, weight: Any, labels: Any, objective: Objective, *operands: Any, weights: Any, **options: Any
) -> ExactLoss:
    """sum_i weights_i objective_i over the rows of weight other than zero, and its gradients; `options` are `exact`'s.

    The operands are [N] numbers each. JAX differentiates the objective, in float64.
    """
    live = np.asarray(weights) != 0
    w, *given = (np.where(live, np.asarray(x, np.float64), 0) for x in (weights, *operands))
    parameters = inspect.signature(objective).parameters.values()
    names = [x.name for x in parameters if x.kind == x.KEYWORD_ONLY]

    def of_token(statistics: Slopes, *operands: Any) -> jax.Array:
        named = {name: getattr(statistics, name) for name in names}
        return objective(statistics.logprob, statistics.entropy, *operands, **named)

    losses: list[tuple[np.ndarray, Slopes]] = []

    def slopes_of(values: Answer) -> Slopes:
        with jax.enable_x64(True):
            statistics = Slopes(*(getattr(values, name) for name in Slopes._fields))
            values_and_slopes = jax.jit(jax.vmap(jax.value_and_grad(of_token)))(statistics, *given)
        losses.append(jax.tree.map(lambda x: w * np.asarray(x), values_and_slopes))
        return losses[0][1]

    rows = exact(hidden, weight, labels, slopes_of, where=live, **options)
    [(values, slopes)] = losses
    moves = {name: x for name, x in slopes._asdict().items() if x is not None}
    moved = sum(getattr(rows.resolution, name) * np.abs(x) for name, x in moves.items())
    return ExactLoss(float(values.sum()), float((EPS * np.abs(values) + moved).sum()), rows)


def assert_as_accurate_as_rounding(got: Answer, right: Exact, largest: float = SLACK) -> None:
    """The criterion: of each of the results, the root-mean-square and the largest error.

    Neither may be larger than the error of the rounded gradients and the resolution. NaN anywhere in `got` fails. The
    largest error may exceed the limit by the factor `largest`. 0: the largest error is not checked.
    """
    rounded = right.answer._replace(hidden=right.rounded[0], weight=right.rounded[1])
    for name, ours in got._asdict().items():
        if ours is None or name == "likeliest":
            continue
        given = getattr(right.answer, name), ours, getattr(rounded, name)
        want, ours, theirs = (np.asarray(x, np.float64) for x in given)
        assert ours.shape == want.shape, f"{name} has shape {ours.shape}, not {want.shape}"
        hair = getattr(right.resolution, name)
        for norm, slack in ((lambda x: np.sqrt(np.mean(x**2)), SLACK), (lambda x: np.abs(x).max(initial=0), largest)):
            error, of_rounding = norm(ours - want), norm(theirs - want)
            assert error <= slack * of_rounding + hair or (slack == 0 and not np.isnan(error)), (
                f"{name}: {error:.3g}; rounding has {of_rounding:.3g}, and the resolution is {hair:.3g}"
            )


def _model(live: np.ndarray, columns: int, hidden: Any, weight: Any, temperature: Any, softcap: float | None) -> Model:
    h_RD, w_VD = np.asarray(hidden)[live].astype(np.float64), np.asarray(weight)[:columns].astype(np.float64)
    y_RV = h_RD @ w_VD.T
    tanh_RV = 0 * y_RV if softcap is None else np.tanh(y_RV / softcap)
    z_RV = (y_RV if softcap is None else softcap * tanh_RV) / temperature
    top_R1 = z_RV.max(axis=1, keepdims=True)
    log_sum_R1 = np.log(np.exp(z_RV - top_R1).sum(axis=1, keepdims=True))
    largest = 1 + (np.abs(h_RD) @ np.abs(w_VD).T).max(initial=0) / temperature
    slope_RV = (1 - tanh_RV**2) / temperature
    return Model(h_RD, w_VD, z_RV, slope_RV, top_R1 + log_sum_R1, z_RV - top_R1 - log_sum_R1, largest)


def _divergence(teacher: Teacher, log_p_RV: np.ndarray, log_q_RV: np.ndarray) -> tuple[np.ndarray, ...]:
    """A row's value, its slopes by the student's and the teacher's logits, and the first one's absolute terms."""

    def kl(log_a_RV: np.ndarray, log_b_RV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """KL(a||b) [R, 1], and its slopes by the logits of a, where b is given."""
        ratio_RV = log_a_RV - log_b_RV
        value_R1 = (np.exp(log_a_RV) * ratio_RV).sum(axis=1, keepdims=True)
        return value_R1, np.exp(log_a_RV) * (ratio_RV - value_R1)

    p_RV, q_RV, beta = np.exp(log_p_RV), np.exp(log_q_RV), teacher.beta
    if teacher.kind == "forward_kl":
        value_R1, by_teacher_RV = kl(log_q_RV, log_p_RV)
        return value_R1, p_RV - q_RV, by_teacher_RV, p_RV + q_RV
    if teacher.kind == "reverse_kl":
        value_R1, by_z_RV = kl(log_p_RV, log_q_RV)
        return value_R1, by_z_RV, q_RV - p_RV, p_RV * (1 + value_R1)
    log_m_RV = np.logaddexp(np.log(beta) + log_q_RV, np.log1p(-beta) + log_p_RV)
    of_teacher, of_student = kl(log_q_RV, log_m_RV), kl(log_p_RV, log_m_RV)
    # Through log m the slope is -sum m dm/m = -d(sum m) = 0, so that m counts as given.
    by_z_RV, by_teacher_RV = (1 - beta) * of_student[1], beta * of_teacher[1]
    value_R1 = beta * of_teacher[0] + (1 - beta) * of_student[0]
    return value_R1, by_z_RV, by_teacher_RV, (1 - beta) * p_RV * (1 + of_student[0])


def _gradients(hidden: Any, weight: Any, live: np.ndarray, dy_RV: Any, h_RD: Any, w_VD: Any) -> Any:
    dh, dw = np.zeros(np.shape(hidden)), np.zeros(np.shape(weight))
    dh[live], dw[: len(w_VD)] = dy_RV @ w_VD, dy_RV.T @ h_RD
    return dh, dw
