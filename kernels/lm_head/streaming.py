"""The head in plain XLA, a tile of logits at a time: the CPU's implementation and every other backend's fallback.

Rows that count are moved ahead of those that don't by a stable sort, and a `while_loop` takes them in blocks, so that
the time follows their number. There are two ways to the gradients:

- Recomputation. Statistics a block at a time; backward goes over tiles of the vocabulary, with a loop over the blocks
  inside, so that a tile of dW is summed in float32 and leaves once. 4 matrix products.
- Waves (`token_loss` with a workspace). The products of a block with the whole vocabulary are kept; once the rows'
  normalisers are known, so are the objective's slopes, and dh and dW follow. 3 matrix products.

Leaves out: sharding (given sharded arrays, XLA partitions as it likes), and fusion of the products with the softmax.

Suffixes: N rows, M rows rounded up to whole blocks, R rows of a block; D features; V vocabulary, C tiles of T columns.
`y` is the product of hidden states and weight, `z` the logits: y after softcap and temperature.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Integer

from kernels.lm_head.contract import Inputs, Objective, Terms, TokenLogprobs, weighted_sum
from kernels.lm_head.live_rows import LiveRows, live_rows, round_up
from kernels.lm_head.manual_axes import vary, varying_axes
from kernels.lm_head.online_softmax import Columns, Softmax, finish, include, logit_slopes, nothing

_CPU_BLOCK, _BLOCK = 256, 1024
_TILE, _TILE_ELEMENTS = 2048, 2**22  # columns at most, and elements of a tile of dW: 16 MiB in float32
_LEAST_WAVE, _MOST_WAVE = 64, 2048  # fewer rows would touch all of dW too often, more make a tile too large

_Gradients = tuple[Array | None, Array | None]  # by hidden [N, D] and weight [V, D]; None where not asked for


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known while tracing."""

    block: int
    tile: int
    tiles: int
    softcap: float | None
    dtype: jnp.dtype
    wants_hidden: bool = True
    wants_weight: bool = True


def token_logprobs(inputs: Inputs, *, softcap: float | None, dtype: jnp.dtype) -> TokenLogprobs:
    return _token_logprobs(_plan(inputs, softcap, dtype), inputs)


def token_loss(
    inputs: Inputs,
    objective: Objective,
    terms: Terms,
    *,
    softcap: float | None,
    dtype: jnp.dtype,
    workspace: int | None,
) -> tuple[Float[Array, ""], TokenLogprobs]:
    # A custom rule differentiates by its arguments only: what the objective closes over has to become one of them.
    scalars = [_zeros(inputs, dtype=x.dtype) for x in (terms.weights, terms.weights, *terms.operands)]
    objective, closed_over = jax.closure_convert(objective, *scalars)
    terms = terms._replace(shared=tuple(closed_over))
    loss, tokens = _token_loss(_plan(inputs, softcap, dtype), workspace, objective, inputs, terms)
    return loss, lax.stop_gradient(tokens)


# --- the two rules of differentiation -----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprobs(plan: _Plan, inputs: Inputs) -> TokenLogprobs:
    return _statistics(plan, inputs, live_rows(inputs.live, plan.block)).outputs()


def _token_logprobs_forward(plan: _Plan, inputs: Any) -> tuple[TokenLogprobs, Any]:
    plan, inputs = _asked_for(plan, inputs), _values(inputs)
    live = live_rows(inputs.live, plan.block)
    softmax = _statistics(plan, inputs, live)
    return softmax.outputs(), (plan, inputs, live, softmax)


def _token_logprobs_backward(_: _Plan, saved: Any, cotangents: TokenLogprobs) -> tuple[Inputs]:
    plan, inputs, live, softmax = saved
    slopes = TokenLogprobs(*map(_instantiate, cotangents))
    return (_cotangent(_gradients(plan, inputs, live, softmax, slopes)),)


_token_logprobs.defvjp(_token_logprobs_forward, _token_logprobs_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _token_loss(
    plan: _Plan, workspace: int | None, objective: Objective, inputs: Inputs, terms: Terms
) -> tuple[Float[Array, ""], TokenLogprobs]:
    tokens = _token_logprobs(plan, inputs)
    return weighted_sum(objective, inputs.live, tokens.logprob, tokens.entropy, terms), tokens


def _token_loss_forward(
    plan: _Plan, workspace: int | None, objective: Objective, inputs: Any, terms: Any
) -> tuple[tuple[Float[Array, ""], TokenLogprobs], Any]:
    plan, inputs, terms = _asked_for(plan, inputs), _values(inputs), _values(terms)
    wave = _wave(plan, inputs, workspace)
    plan = dataclasses.replace(plan, block=wave or plan.block)
    live = live_rows(inputs.live, plan.block)
    if wave:
        softmax, gradients = _waves(plan, inputs, live, objective, terms)
        to_recompute = None
    else:
        softmax, gradients = _statistics(plan, inputs, live), (None, None)
        to_recompute = (plan, inputs, live, softmax)
    tokens = softmax.outputs()
    total = functools.partial(weighted_sum, objective, inputs.live)
    loss, pull = jax.vjp(total, tokens.logprob, tokens.entropy, terms)
    return (loss, tokens), (pull, gradients, to_recompute)


def _token_loss_backward(
    _plan_: _Plan, _workspace: int | None, _objective: Objective, saved: Any, cotangents: Any
) -> tuple[Inputs, Terms]:
    pull, gradients, to_recompute = saved
    g_loss = _instantiate(cotangents[0])
    g_logprob, g_entropy, g_terms = pull(g_loss)
    if to_recompute is None:
        gradients = jax.tree.map(lambda x: (g_loss * x).astype(x.dtype), gradients)
    else:
        plan, inputs, live, softmax = to_recompute
        slopes = TokenLogprobs(g_logprob, jnp.zeros_like(g_logprob), g_entropy)
        gradients = _gradients(plan, inputs, live, softmax, slopes)
    return _cotangent(gradients), g_terms


_token_loss.defvjp(_token_loss_forward, _token_loss_backward, symbolic_zeros=True)


def _asked_for(plan: _Plan, inputs: Any) -> _Plan:
    return dataclasses.replace(plan, wants_hidden=inputs.hidden.perturbed, wants_weight=inputs.weight.perturbed)


def _values(perturbable: Any) -> Any:
    return jax.tree.map(lambda x: x.value, perturbable)


def _instantiate(cotangent: Any) -> Array:
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent


def _cotangent(gradients: _Gradients) -> Inputs:
    return Inputs(*gradients, None, None, None)  # type: ignore[arg-type]  # None: no cotangent


# --- the passes ---------------------------------------------------------------------------------------------------


def _statistics(plan: _Plan, inputs: Inputs, live: LiveRows) -> Softmax:
    """Forward: 1 matrix product."""

    def block(i: Array, all_M: Softmax) -> Softmax:
        row_R, live_R = live.block(i, plan.block)
        h_RD, labels_R = inputs.hidden[row_R], inputs.labels[row_R]

        def tile(c: Array, running: Any) -> Any:
            w_TD, columns = _tile(plan, inputs, c, labels_R)
            return include(running, _logits(plan, inputs, _dot(plan, h_RD, w_TD, (1, 1))), columns)

        softmax_R = finish(lax.fori_loop(0, plan.tiles, tile, nothing(_zeros(inputs, plan.block))))
        return _keep(plan, all_M, softmax_R, live_R, i)

    all_M = live.over_blocks(plan.block, block, _no_statistics(inputs, live))
    return jax.tree.map(lambda x: x[live.place], all_M)


def _gradients(plan: _Plan, inputs: Inputs, live: LiveRows, softmax: Softmax, slopes: TokenLogprobs) -> _Gradients:
    """Backward by recomputation: 3 matrix products, 2 for one gradient alone."""

    def tile(c: Array, carry: Any) -> Any:
        dh_MD, dw_VD = carry

        def block(i: Array, carry: Any) -> Any:
            dh_MD, dw_TD = carry
            row_R, live_R = live.block(i, plan.block)
            h_RD = inputs.hidden[row_R]
            w_TD, columns = _tile(plan, inputs, c, inputs.labels[row_R])
            softmax_R = jax.tree.map(lambda x: x[row_R], softmax)
            slopes_R = jax.tree.map(lambda g: jnp.where(live_R, g[row_R], 0), slopes)
            y_RT = _dot(plan, h_RD, w_TD, (1, 1))
            dy_RT = _product_slopes(plan, inputs, y_RT, softmax_R, slopes_R, columns)
            if plan.wants_hidden:
                dh_MD = _add(dh_MD, _dot(plan, dy_RT, w_TD, (1, 0)), i * plan.block)
            if plan.wants_weight:
                dw_TD += _dot(plan, dy_RT, h_RD, (0, 0))
            return dh_MD, dw_TD

        dw_TD = _zeros(inputs, plan.tile, features) if plan.wants_weight else None
        dh_MD, dw_TD = live.over_blocks(plan.block, block, (dh_MD, dw_TD))
        return dh_MD, None if dw_TD is None else _add(dw_VD, dw_TD, _start(plan, inputs, c))

    vocabulary, features = inputs.weight.shape
    dh_MD = _zeros(inputs, len(live.row), features) if plan.wants_hidden else None
    dw_VD = _zeros(inputs, vocabulary, features, dtype=inputs.weight.dtype) if plan.wants_weight else None
    dh_MD, dw_VD = lax.fori_loop(0, plan.tiles, tile, (dh_MD, dw_VD))
    return None if dh_MD is None else dh_MD.astype(inputs.hidden.dtype)[live.place], dw_VD


def _waves(
    plan: _Plan, inputs: Inputs, live: LiveRows, objective: Objective, terms: Terms
) -> tuple[Softmax, _Gradients]:
    """Forward and gradients, keeping a block's products: 3 matrix products, 2 for one gradient alone."""

    def wave(i: Array, carry: Any) -> Any:
        all_M, dh_MD, dw_VD, y_CRT = carry
        row_R, live_R = live.block(i, plan.block)
        h_RD, labels_R = inputs.hidden[row_R], inputs.labels[row_R]

        def forward(c: Array, carry: Any) -> Any:
            running, y_CRT = carry
            w_TD, columns = _tile(plan, inputs, c, labels_R)
            y_RT = _dot(plan, h_RD, w_TD, (1, 1))
            return include(running, _logits(plan, inputs, y_RT), columns), lax.dynamic_update_index_in_dim(
                y_CRT, y_RT, c, 0
            )

        running, y_CRT = lax.fori_loop(0, plan.tiles, forward, (nothing(_zeros(inputs, plan.block)), y_CRT))
        softmax_R = finish(running)
        logprob_R, _, entropy_R = softmax_R.outputs()
        terms_R = Terms(terms.weights[row_R], tuple(x[row_R] for x in terms.operands), terms.shared)
        g_logprob, g_entropy = jax.grad(weighted_sum, (2, 3))(objective, live_R, logprob_R, entropy_R, terms_R)
        slopes_R = TokenLogprobs(g_logprob, jnp.zeros_like(g_logprob), g_entropy)

        def backward(c: Array, carry: Any) -> Any:
            dh_RD, dw_VD = carry
            w_TD, columns = _tile(plan, inputs, c, labels_R)
            dy_RT = _product_slopes(plan, inputs, y_CRT[c], softmax_R, slopes_R, columns)
            if plan.wants_hidden:
                dh_RD += _dot(plan, dy_RT, w_TD, (1, 0))
            if plan.wants_weight:
                dw_VD = _add(dw_VD, _dot(plan, dy_RT, h_RD, (0, 0)), _start(plan, inputs, c))
            return dh_RD, dw_VD

        dh_RD = _zeros(inputs, plan.block, features) if plan.wants_hidden else None
        dh_RD, dw_VD = lax.fori_loop(0, plan.tiles, backward, (dh_RD, dw_VD))
        dh_MD = None if dh_RD is None else _add(dh_MD, dh_RD, i * plan.block)
        return _keep(plan, all_M, softmax_R, live_R, i), dh_MD, dw_VD, y_CRT

    vocabulary, features = inputs.weight.shape
    one_wave = len(live.row) == plan.block
    sum_dtype = inputs.weight.dtype if one_wave else jnp.float32
    dh_MD = _zeros(inputs, len(live.row), features, dtype=inputs.hidden.dtype) if plan.wants_hidden else None
    dw_VD = _zeros(inputs, vocabulary, features, dtype=sum_dtype) if plan.wants_weight else None
    y_CRT = _zeros(inputs, plan.tiles, plan.block, plan.tile)
    carry = (_no_statistics(inputs, live), dh_MD, dw_VD, y_CRT)
    all_M, dh_MD, dw_VD, _ = live.over_blocks(plan.block, wave, carry)
    dh = None if dh_MD is None else dh_MD[live.place]
    dw = None if dw_VD is None else dw_VD.astype(inputs.weight.dtype)
    return jax.tree.map(lambda x: x[live.place], all_M), (dh, dw)


# --- blocks and tiles ---------------------------------------------------------------------------------------------


def _plan(inputs: Inputs, softcap: float | None, dtype: jnp.dtype) -> _Plan:
    vocabulary, features = inputs.weight.shape
    most = min(_TILE, max(256, _TILE_ELEMENTS // features))
    tile = min(vocabulary, round_up(-(-vocabulary // -(-vocabulary // most)), 128))
    block = _CPU_BLOCK if jax.default_backend() == "cpu" else _BLOCK
    return _Plan(min(block, round_up(len(inputs.labels), 8)), tile, -(-vocabulary // tile), softcap, dtype)


def _wave(plan: _Plan, inputs: Inputs, workspace: int | None) -> int:
    """Rows whose logits are kept, or 0 to compute them again."""
    rows = round_up(len(inputs.labels), 8)
    bytes_a_row = 4 * plan.tiles * plan.tile
    room = plan.block * bytes_a_row if workspace is None else workspace
    wave = min(rows, _MOST_WAVE, room // bytes_a_row // 8 * 8)
    if plan.wants_weight and inputs.weight.dtype != jnp.float32 and wave < rows:
        # Several waves are summed in float32, which is no gradient then but one more array.
        room = 0 if workspace is None else max(0, workspace - 4 * inputs.weight.size)
        wave = min(wave, room // bytes_a_row // 8 * 8)
    return wave if wave >= min(rows, _LEAST_WAVE) else 0


def _start(plan: _Plan, inputs: Inputs, c: Array) -> Array:
    """The last tile begins early enough to be a whole one."""
    return jnp.minimum(c * plan.tile, inputs.weight.shape[0] - plan.tile)


def _tile(plan: _Plan, inputs: Inputs, c: Array, labels_R: Integer[Array, "R"]) -> tuple[Float[Array, "T D"], Columns]:
    start = _start(plan, inputs, c)
    column_T = start + jnp.arange(plan.tile)
    fresh_T = column_T >= c * plan.tile
    w_TD = lax.dynamic_slice_in_dim(inputs.weight, start, plan.tile)
    return w_TD, Columns(fresh_T, fresh_T & (column_T == labels_R[:, None]))


def _dot(plan: _Plan, a: Array, b: Array, contract: tuple[int, int]) -> Float[Array, "_ _"]:
    precision = lax.Precision.HIGHEST if plan.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    a, b = a.astype(plan.dtype), b.astype(plan.dtype)
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _logits(plan: _Plan, inputs: Inputs, y_RT: Float[Array, "R T"]) -> Float[Array, "R T"]:
    capped = y_RT if plan.softcap is None else plan.softcap * jnp.tanh(y_RT / plan.softcap)
    return capped / inputs.temperature


def _product_slopes(
    plan: _Plan, inputs: Inputs, y_RT: Array, softmax_R: Softmax, slopes_R: TokenLogprobs, columns: Columns
) -> Float[Array, "R T"]:
    z_RT, pull = jax.vjp(functools.partial(_logits, plan, inputs), y_RT)
    return pull(logit_slopes(z_RT, softmax_R, slopes_R, columns))[0]


def _keep(plan: _Plan, all_M: Softmax, softmax_R: Softmax, live_R: Array, i: Array) -> Softmax:
    return jax.tree.map(lambda x, new: _add(x, jnp.where(live_R, new, 0), i * plan.block), all_M, softmax_R)


def _no_statistics(inputs: Inputs, live: LiveRows) -> Softmax:
    return Softmax(*(_zeros(inputs, len(live.row)) for _ in Softmax._fields))


def _add(x: Array, rows: Array, start: Array) -> Array:
    old = lax.dynamic_slice_in_dim(x, start, len(rows))
    return lax.dynamic_update_slice_in_dim(x, (old + rows).astype(x.dtype), start, 0)


def _zeros(inputs: Inputs, *shape: int, dtype: Any = jnp.float32) -> Array:
    """Zeros that vary, under `shard_map`, over the axes that the inputs varies over, as a loop's carry must."""
    return vary(jnp.zeros(shape, dtype), varying_axes(inputs.hidden))
