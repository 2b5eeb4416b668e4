"""The head's two entry points: arguments are checked, leading dims flattened, an implementation picked.

Leaves the rest to the implementations on flat rows: the reference, and the engines of one table.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, Shaped

from kernels.lm_head import autodiff, reference, target, xla
from kernels.lm_head.autodiff import Engine
from kernels.lm_head.contract import Inputs, Objective, Options, Terms, TokenLogprobs
from kernels.lm_head.gpu import engine as mosaic_gpu
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.manual_axes import vary, varying_axes
from kernels.lm_head.sharded import HeadSharding, Sharded
from kernels.lm_head.tpu import engine as mosaic_tpu

Impl = Literal["reference", "xla", "mosaic_tpu", "mosaic_gpu"]

_ENGINES: Mapping[str, Engine] = {"xla": xla, "mosaic_tpu": mosaic_tpu, "mosaic_gpu": mosaic_gpu}
_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


def token_logprobs(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "*N"],
    *,
    where: Bool[Array, "*N"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    dtype: Any = None,
    impl: Impl | None = None,
    sharding: HeadSharding | None = None,
) -> TokenLogprobs:
    """Log-probability of each label, log-normaliser and entropy under `softmax(z)`: float32 [*N], in nats.

    `z = cap(hidden @ weight.T) / temperature`, with `cap(y) = softcap * tanh(y / softcap)` where there is a softcap.
    Differentiable in `hidden` and `weight` under any cotangent of the three (reverse mode, first order):
    `dz = g_logprob (onehot - p) + g_lse p - g_entropy p (log p + entropy)`. A gradient that isn't asked for isn't
    computed (2 matrix products backward instead of 3), and gradients have the dtype of what they belong to.

    Args:
        hidden: bfloat16, float16 or float32, as `weight`; they may differ.
        labels: rows of `weight`. A traced label can't be checked; out of range, it hits nothing: its logprob is `-lse`.
        where: the rows that count. The others cost (almost) nothing, give 0, get no gradient and may have any label.
        temperature: positive; a number, or a scalar that may be traced. Differentiation takes it for a constant.
        softcap: positive, a Python number.
        dtype: of the matrix products' operands, cast tile by tile as they are read; every sum is float32. None: the
            wider of the arguments' dtypes. float32 products have the device's highest precision.
        impl: None for the best that runs here, which never makes full logits; or a name.
        sharding: how `hidden`, `weight` and all that is given for each token lie on a mesh, in and outside of `jit`
            alike; the work is then divided accordingly, and so lie results and gradients. None: on one device.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    if where is not None and jnp.result_type(where) != jnp.bool_:
        raise ValueError(f"where must be boolean, not {jnp.result_type(where)}")
    live = np.ones(np.shape(labels), np.bool_) if where is None else where
    hidden, weight, flat_labels, flat_live = _rows(hidden, weight, labels, {"where": live})
    _check_labels(flat_labels, flat_live, vocabulary=weight.shape[0])
    inputs = Inputs(hidden, weight, flat_labels, flat_live, _temperature(temperature))
    inputs = _same_varying(inputs)
    options = Options(_softcap(softcap), _product_dtype(dtype, hidden, weight))
    engine = _engine(impl, inputs, options, sharding)
    if engine is None:
        flat = reference.token_logprobs(inputs, softcap=options.softcap, dtype=options.dtype)
    else:
        flat = autodiff.token_logprobs(engine, inputs, options)
    return TokenLogprobs(*(x.reshape(np.shape(labels)) for x in flat))


def token_loss(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "*N"],
    objective: Objective,
    *operands: Shaped[Array, "*N"],
    weights: Float[Array, "*N"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    workspace: int | None = None,
    dtype: Any = None,
    impl: Impl | None = None,
    sharding: HeadSharding | None = None,
) -> tuple[Float[Array, ""], TokenLogprobs]:
    """`sum_i weights_i * objective(logprob_i, entropy_i, *operands_i)`, and the tokens' statistics without gradient.

    Cross-entropy is `lambda logprob, entropy: -logprob`. The loss is a float32 scalar, differentiable in `hidden`,
    `weight`, `weights`, floating operands, and floating values that `objective` closes over (reverse mode, first
    order). Asked for the value alone, it does none of the gradient's work.

    Args beyond those of `token_logprobs`:
        objective: any differentiable function of scalars (it runs under `jax.vmap`, a token at a time). What differs
            from token to token reaches it as an operand, floating, integer or boolean.
        weights: each token's share in the loss; rows of weight 0 are those that don't count. None: 1 everywhere.
        workspace: bytes that the loss may take beside the gradients and a few tiles. Of as many tokens as fit, a wave,
            what backward needs is kept, and loss and gradients come out of one pass of 3 matrix products; where the
            smallest wave doesn't fit, logits are computed twice: 4 products. The float32 sum that a gradient of a
            narrower weight needs over several waves (4 bytes for each of its elements) is workspace, too.
            streaming keeps float32 products, of 64 to 2048 tokens; None: room for 256 of them (1024 on accelerators),
            but not for such a sum. mosaic_tpu keeps exponentials in `dtype`, and 32 bytes of maxima for each tile of
            columns, of 128 tokens or more; None: room for 1024 of them, but not for such a sum. It has no use for a
            workspace where the weight is frozen or the objective uses the entropy. mosaic_gpu keeps float16 logits, of
            all tokens and as many columns as fit; None: room for those of 1024 tokens. The reference ignores it.

    Raises:
        ValueError: names the argument; before anything is compiled.
    """
    if workspace is not None and (not isinstance(workspace, int) or workspace < 0):
        raise ValueError(f"workspace must be None or a number of bytes, not {workspace!r}")
    weights_or_ones = np.ones(np.shape(labels), np.float32) if weights is None else weights
    named = {f"operands[{i}]": operand for i, operand in enumerate(operands)}
    hidden, weight, flat_labels, flat_weights, *flat_operands = _rows(
        hidden, weight, labels, {"weights": weights_or_ones, **named}
    )
    live = flat_weights != 0
    _check_labels(flat_labels, live, vocabulary=weight.shape[0])
    _check_objective(objective, flat_operands)
    inputs = Inputs(hidden, weight, flat_labels, live, _temperature(temperature))
    terms = Terms(jnp.asarray(flat_weights, jnp.float32), tuple(flat_operands))
    inputs, terms = _same_varying((inputs, terms))
    options = Options(_softcap(softcap), _product_dtype(dtype, hidden, weight), workspace)
    engine = _engine(impl, inputs, options, sharding)
    if engine is None:
        loss, flat = reference.token_loss(
            inputs, objective, terms, softcap=options.softcap, dtype=options.dtype, workspace=workspace
        )
    else:
        loss, flat = autodiff.token_loss(engine, inputs, objective, terms, options)
    return loss, TokenLogprobs(*(x.reshape(np.shape(labels)) for x in flat))


def _engine(impl: str | None, inputs: Inputs, options: Options, sharding: HeadSharding | None) -> Engine | None:
    """The engine to use; None for the reference."""
    if impl not in (None, "reference", *_ENGINES):
        raise ValueError(f"impl must be None or one of reference, {', '.join(_ENGINES)}, not {impl!r}")
    if sharding is not None:
        sharding.check(inputs.hidden, inputs.weight)
    if impl == "reference" or not inputs.labels.size:  # of no tokens, full logits are empty
        return None
    if impl is None:
        kernels = _placed(_preferred(inputs, sharding), sharding)
        return kernels if kernels.obstacle(inputs, options) is None else _placed("xla", sharding)
    engine = _placed(impl, sharding)
    why_not = engine.obstacle(inputs, options)
    if why_not is not None:
        raise ValueError(f"impl: {impl} can't run here: {why_not}")
    return engine


def _preferred(inputs: Inputs, sharding: HeadSharding | None) -> str:
    """What is fastest on this platform, where it can run. Of kernels for GPUs that is only said by a measurement."""
    platform = target.platform(None if sharding is None else sharding.mesh)
    if platform == "gpu" and gpu_tiles.faster(inputs.weight.shape[1]):
        return "mosaic_gpu"
    return "mosaic_tpu" if platform == "tpu" else "xla"


def _placed(name: str, sharding: HeadSharding | None) -> Engine:
    """The engine of that name, on every device of a mesh if there is one."""
    engine = _ENGINES[name]
    return engine if sharding is None or sharding.mesh.size == 1 else Sharded(engine, sharding.in_use())


def _rows(hidden: Any, weight: Any, labels: Any, per_token: Mapping[str, Any]) -> tuple[Any, ...]:
    """Hidden states [N, D], the weight, labels [N] and whatever else there is one of for each token, flattened."""
    for name, value in {"hidden": hidden, "weight": weight}.items():
        if jnp.result_type(value) not in _DTYPES:
            known = ", ".join(map(str, _DTYPES))
            raise ValueError(f"{name} must be one of {known}, not {jnp.result_type(value)}")
    if np.ndim(weight) != 2 or 0 in np.shape(weight):
        raise ValueError(f"weight must be [vocabulary, features], not {list(np.shape(weight))}")
    if np.ndim(hidden) == 0 or np.shape(hidden)[-1] != np.shape(weight)[1]:
        shapes = f"{list(np.shape(hidden))} beside a weight {list(np.shape(weight))}"
        raise ValueError(f"hidden must be [..., features], with the features of weight, not {shapes}")
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise ValueError(f"labels must be integers, not {jnp.result_type(labels)}")
    lead = np.shape(hidden)[:-1]
    for name, value in {"labels": labels, **per_token}.items():
        if np.shape(value) != lead:
            raise ValueError(f"{name} must have hidden's leading shape {list(lead)}, not {list(np.shape(value))}")
    flat = (_array(x).reshape(-1) for x in (labels, *per_token.values()))
    return (jnp.reshape(hidden, (-1, np.shape(hidden)[-1])), jnp.asarray(weight), *flat)


def _array(x: Any) -> Any:
    """Numpy arrays stay numpy, so that they can still be read under `jit`."""
    return x if isinstance(x, jax.Array) else np.asarray(x)


def _readable(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def _check_labels(labels: Any, live: Any, vocabulary: int) -> None:
    if _readable(labels) and _readable(live):
        wrong = np.asarray(labels)[np.asarray(live)]
        wrong = wrong[(wrong < 0) | (wrong >= vocabulary)]
        if wrong.size:
            raise ValueError(f"labels must be within [0, {vocabulary}), where they count; one is {wrong[0]}")


def _check_objective(objective: Objective, operands: list[Any]) -> None:
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    scalars = [jax.ShapeDtypeStruct((), jnp.result_type(x)) for x in operands]
    out = jax.eval_shape(objective, scalar, scalar, *scalars)
    if getattr(out, "shape", None) != () or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(f"objective must give one floating number a token, not {out}")


def _temperature(temperature: Any) -> jax.Array:
    if np.shape(temperature) != ():
        raise ValueError(f"temperature must be a scalar, not of shape {list(np.shape(temperature))}")
    if _readable(temperature) and not 0 < float(temperature) < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {float(temperature)}")
    return jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))


def _softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, jax.core.Tracer) or not 0 < float(softcap) < math.inf:
        raise ValueError(f"softcap must be None or a positive number known before tracing, not {softcap}")
    return float(softcap)


def _product_dtype(dtype: Any, hidden: Any, weight: Any) -> jnp.dtype:
    found = jnp.dtype(jnp.promote_types(hidden.dtype, weight.dtype) if dtype is None else dtype)
    if found not in _DTYPES:
        raise ValueError(f"dtype must be None or one of {', '.join(map(str, _DTYPES))}, not {found}")
    return found


def _same_varying(arrays: Any) -> Any:
    """Under `shard_map`, lets every argument vary over each axis that one of them varies over.

    The transpose of that cast is the sum over the axis: so a replicated weight gets the sum of its shards' gradients.
    """
    axes = varying_axes(*jax.tree.leaves(arrays))
    return jax.tree.map(lambda x: vary(x, axes), arrays)
