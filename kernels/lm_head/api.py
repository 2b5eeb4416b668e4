"""The head's entry points: arguments are checked, leading dims flattened, and an engine is picked."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from . import autodiff, full_logits, target
from .arguments import TeacherArguments, as_array, checked_inputs, checked_options
from .contract import Engine, Inputs, Options, Terms, number_of_columns
from .layout import HeadSharding, LeadingDims, run_on_mesh
from .shapes import Array, Bool, Float, Int, Integer, Shaped
from .sharded import Sharded
from .softmax import TokenLogprobs
from .target import same_varying, varying_axes
from .two_softmaxes import Kind

Impl = Literal["full_logits", "chunked_logits", "xla", "mosaic_tpu", "mosaic_gpu"]

_MODULES: Mapping[str, str] = {
    "full_logits": ".full_logits",
    "chunked_logits": ".chunked_logits",
    "xla": ".xla",
    "mosaic_tpu": ".tpu.engine",
    "mosaic_gpu": ".gpu.engine",
}
"""Each engine's module, imported on first use: Pallas for GPUs needs packages that other machines lack."""
_DEFAULTS: Mapping[str, tuple[Impl, str]] = {
    "tpu": ("mosaic_tpu", "by its compiler's schedule; not timed on a device"),
    "gpu": ("mosaic_gpu", "0.4 of xla's time on an H200"),
    "cpu": ("xla", "no TPU or Hopper GPU here"),
}
"""The default engine of each platform if it can run there, and the reason (docs/head.md has the details)."""


def token_logprobs(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "*N"],
    *,
    where: Bool[Array, "*N"] | None = None,
    weights: Float[Array, "*N"] | None = None,
    ignore_index: int | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    vocabulary: int | None = None,
    weight_copy: Float[Array, "V D"] | None = None,
    collision: bool = False,
    dtype: Any = None,
    impl: Impl | None = None,
    sharding: HeadSharding | None = None,
) -> TokenLogprobs:
    """Log-probability of each label, log-normaliser and entropy under `softmax(z)`: float32 [*N], in nats.

    `z = cap(hidden @ weight.T) / temperature`, with `cap(y) = softcap * tanh(y / softcap)` if there is a softcap. The
    three statistics are differentiable in `hidden` and `weight` (reverse mode, first order). Only requested gradients
    are computed; a gradient has its input's dtype. `likeliest`, boolean, says whether the label has the largest logit.
    In mosaic_tpu it may be either value if the two logits differ by rounding only.

    Args:
        hidden: bfloat16 or float32, as `weight`; they may differ.
        labels: rows of `weight`. A traced label can't be checked. If it counts and is out of range, its logprob and the
            gradients under its cotangent are NaN.
        where: the rows that count. Other rows cost (almost) nothing, give 0, get no gradient and may have any label.
        weights: rows of weight 0 don't count, as for `token_loss`; the weights have no other effect.
        ignore_index: rows with this label don't count (PyTorch's default is -100); None: no label is special.
        temperature: positive; a number, or a scalar that may be traced, but not differentiated.
        softcap: positive, a Python number.
        vocabulary: the vocabulary's size; later rows of `weight` are padding without probability. None: every row.
        weight_copy: multiplied in place of `weight`, with the same layout: for example a bfloat16 copy. `weight` gets
            the copy's gradient, in its own dtype (straight-through). None: `weight`.
        collision: whether to return `sum p^2` as well, the probability that two samples are the same token. It has no
            gradient.
        dtype: the dtype of the matrix products' operands, cast tile by tile as they are read; every sum is float32.
            None: the wider of the arguments' dtypes. float32 products have the device's highest precision.
        impl: an engine's name; None: the fastest that runs here (see `choose_impl`), never full logits.
        sharding: the layout of `hidden`, `weight` and every array of tokens on a mesh, inside and outside `jit`. The
            work is divided accordingly; results and gradients have the same layout. None: the layout in the arguments'
            types, if their mesh has Explicit axes (JAX's default), else one device.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    rows: dict[str, Any] = {"where": where, "weights": weights, "ignore_index": ignore_index, "vocabulary": vocabulary}
    inputs = checked_inputs(hidden, weight, labels, temperature=temperature, weight_copy=weight_copy, **rows)
    inputs, weight = same_varying((inputs, weight))
    options = checked_options(softcap, dtype, inputs[:2], (inputs.hidden, weight))
    options = dataclasses.replace(options, collision=collision)

    def run(rows: LeadingDims, inputs: Inputs, weight: Array) -> TokenLogprobs:
        engine = _engine(impl, inputs, options, rows.sharding)
        tokens = autodiff.token_logprobs(engine, options, inputs, (inputs.hidden, weight))
        return jax.tree.map(rows.folded, _without_bad_labels(tokens, inputs))

    return run_on_mesh(run, sharding, inputs, (weight,))


def token_loss(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "*N"],
    objective: Callable[..., jax.Array],
    *operands: Shaped[Array, "*N"],
    where: Bool[Array, "*N"] | None = None,
    weights: Float[Array, "*N"] | None = None,
    ignore_index: int | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    vocabulary: int | None = None,
    weight_copy: Float[Array, "V D"] | None = None,
    teacher_hidden: Float[Array, "*N E"] | None = None,
    teacher_weight: Float[Array, "W E"] | None = None,
    kind: Kind = "reverse_kl",
    beta: float = 0.5,
    teacher_temperature: float | Float[Array, ""] | None = None,
    teacher_softcap: float | Literal["same"] | None = "same",
    workspace: int | None = None,
    dtype: Any = None,
    impl: Impl | None = None,
    sharding: HeadSharding | None = None,
) -> tuple[Float[Array, ""], TokenLogprobs]:
    """`sum_i weights_i * objective(logprob_i, entropy_i, *operands_i)`, and the tokens' statistics.

    Cross-entropy is `lambda logprob, entropy: -logprob`. The loss is a float32 scalar, differentiable in `hidden`,
    `weight`, `weights`, floating operands, and floating values that `objective` closes over (reverse mode, first
    order). Without differentiation, no gradient is computed. A label that counts and is out of range makes the loss
    NaN. The returned statistics are differentiable as in `token_logprobs`, by a second pass; inside the objective they
    cost nothing.

    Errors and further arguments are as for `token_logprobs`:
        objective: any differentiable function of one token's scalars (it runs under `jax.vmap`). Values that differ
            from token to token are operands: floating, integer or boolean. A keyword-only argument is passed if the
            objective declares it, with or without a default: `lse` (for z-loss), `mean_logit` (the mean of z over the
            vocabulary, for label smoothing) or `divergence` (from the teacher's distribution).
        weights: each token's weight in the loss; rows of weight 0 don't count. None: 1 everywhere.
        teacher_hidden, teacher_weight: bfloat16 or float32, of any width; they get no gradient. Both softmaxes are over
            the first `vocabulary` rows; None: the rows that both weights have.
        kind: "reverse_kl", KL(student || teacher); "forward_kl", KL(teacher || student); or "jsd", the generalised
            Jensen-Shannon divergence beta KL(teacher || m) + (1 - beta) KL(student || m), with
            m = beta teacher + (1 - beta) student (Agarwal et al. 2023, arXiv:2306.13649).
        beta: the teacher's share of jsd. As in TRL, 0 means forward_kl, the limit of jsd / beta. 1 means reverse_kl,
            the limit of jsd / (1 - beta).
        teacher_temperature, teacher_softcap: the teacher's; default: the student's.
        workspace: bytes that the loss may take beside the gradients and a few tiles. Logits are kept for a wave of as
            many tokens as fit: 3 matrix products. If the smallest wave doesn't fit, logits are computed twice: 4
            products. If the weight's gradient is narrower than float32, its float32 sum over several waves is workspace
            as well. None: a wave of 1024 tokens (mosaic_gpu: 2048; xla on a CPU: 256), without such a sum except for
            xla on GPUs. mosaic_tpu keeps nothing if the weight is frozen, if the objective uses the entropy, or if
            several waves would take longer. chunked_logits takes a chunk of at least 64 tokens; full_logits ignores it.
    """
    if (teacher_hidden is None) != (teacher_weight is None):
        raise ValueError("teacher_hidden and teacher_weight must be given together")
    teacher = None
    if teacher_hidden is not None:
        teacher = TeacherArguments(teacher_hidden, teacher_weight, kind, beta, teacher_temperature, teacher_softcap)
    elif "divergence" in autodiff.names_of(objective):
        raise ValueError("objective: divergence needs a teacher: give teacher_hidden and teacher_weight")
    further: dict[str, Any] = {"vocabulary": vocabulary, "weight_copy": weight_copy, "teacher": teacher}
    rows: dict[str, Any] = {"where": where, "weights": weights, "ignore_index": ignore_index, "operands": operands}
    inputs = checked_inputs(hidden, weight, labels, temperature=temperature, **rows, **further)
    shares: Any = np.ones(inputs.labels.shape, np.float32) if weights is None else as_array(weights)
    inputs, weight, shares, operands = same_varying((inputs, weight, shares, tuple(map(as_array, operands))))
    dtypes, varying = [x.dtype for x in operands], varying_axes(inputs.hidden)
    traced = autodiff.close_objective(objective, dtypes, varying, teacher is not None)
    options = checked_options(softcap, dtype, inputs[:2], (inputs.hidden, weight), workspace, teacher)
    options = dataclasses.replace(options, entropy_slopes=traced.uses_entropy, token_slopes=traced.uses_tokens)
    if traced.uses_mean_logit:
        shared = min(len(weight), np.shape(weight if teacher_weight is None else teacher_weight)[0])
        options = dataclasses.replace(options, mean_over=shared if vocabulary is None else int(vocabulary))

    def run(rows: LeadingDims, inputs: Inputs, weight: Array, shares: Array, operands: Any, closed: Any) -> Any:
        operands = tuple(map(rows.flat, operands))
        shares = jnp.where(_has_bad_label(inputs), jnp.nan, rows.flat(shares).astype(jnp.float32))
        engine, terms = _engine(impl, inputs, options, rows.sharding), Terms(closed, shares, operands)
        loss, tokens = autodiff.loss(engine, options, inputs, (inputs.hidden, weight), terms)
        return loss, jax.tree.map(rows.folded, _without_bad_labels(tokens, inputs))

    arguments = weight, shares, operands, traced.function
    return run_on_mesh(run, sharding, inputs, arguments, lambda tokens: (jax.sharding.PartitionSpec(), tokens))


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """The engine that `impl=None` takes, and the reason in a short clause."""

    impl: str
    reason: str


def choose_impl(
    hidden: Float[Array, "*N D"] | jax.ShapeDtypeStruct,
    weight: Float[Array, "V D"] | jax.ShapeDtypeStruct,
    *,
    dtype: Any = None,
    softcap: float | None = None,
    sharding: HeadSharding | None = None,
) -> EngineChoice:
    """The engine that `impl=None` takes for these arguments, and the reason; never an engine with full logits.

    The device is that of the mesh of `sharding`, else of the set mesh, else JAX's default device. Arrays may be
    ShapeDtypeStructs.
    """
    inputs = jax.eval_shape(lambda h, w: checked_inputs(h.reshape(-1, h.shape[-1]), w), hidden, weight)
    return _choose(inputs, checked_options(softcap, dtype, (hidden, weight)), sharding)


def _load(impl: str) -> Any:
    return importlib.import_module(_MODULES[impl], __package__)


def _choose(inputs: Inputs, options: Options, sharding: HeadSharding | None) -> EngineChoice:
    platform = target.platform(None if sharding is None else sharding.mesh)
    impl, reason = _DEFAULTS.get(platform, _DEFAULTS["cpu"])
    why_not = Sharded.of(_load(impl), sharding).obstacle(inputs, options)
    return EngineChoice(impl, reason) if why_not is None else EngineChoice("xla", f"{impl} can't run: {why_not}")


def _engine(impl: str | None, inputs: Inputs, options: Options, sharding: HeadSharding | None) -> Engine:
    if impl not in (None, *_MODULES):
        raise ValueError(f"impl must be None or one of {', '.join(_MODULES)}, not {impl!r}")
    if not inputs.labels.size:  # without tokens, full logits are empty
        return full_logits
    impl = impl or _choose(inputs, options, sharding).impl
    engine: Engine = Sharded.of(_load(impl), sharding)
    why_not = engine.obstacle(inputs, options)
    if why_not is not None:
        raise ValueError(f"impl: {impl} can't run here: {why_not}")
    return engine


def _has_bad_label(inputs: Inputs) -> Bool[Array, "N"]:
    """Whether a row counts and has a label out of range."""
    return inputs.live & ((inputs.labels < 0) | (inputs.labels >= _columns(inputs)))


def _without_bad_labels(tokens: TokenLogprobs, inputs: Inputs) -> TokenLogprobs:
    bad = _has_bad_label(inputs)
    # A factor, so that gradients are NaN as well.
    return tokens._replace(logprob=tokens.logprob * jnp.where(bad, jnp.nan, 1), likeliest=tokens.likeliest & ~bad)


def _columns(inputs: Inputs) -> Int[Array, ""]:
    """The number of columns of logits: the vocabulary's rows that both weights have."""
    columns = number_of_columns(inputs)
    return columns if inputs.teacher is None else jnp.minimum(columns, len(inputs.teacher.weight))
