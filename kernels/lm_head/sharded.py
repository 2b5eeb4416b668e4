"""The head over a mesh of devices: an engine's passes inside `jax.shard_map`, on a device's own tokens and rows of W.

docs/head.md describes the communication. If gradients are bfloat16, XLA for TPUs rounds dh, and dW after its first sum,
before it sums them over devices. JAX differentiates nothing in this module. Hidden states with sharded features are not
supported.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from . import full_logits
from .contract import Engine, Gradients, Inputs, Options, Teacher, Terms, gradient_dtypes
from .layout import HeadSharding
from .shapes import Array, Float

_MOST_GATHERED = 2**14  # tokens that are gathered at a time; by arithmetic a v6e then takes 5 % longer, to add up dW


class Results(NamedTuple):
    """The results of a pass: arrays [N, ...], residuals [N, ...] for a later pass, and gradients."""

    rows: Any = ()
    saved: Any = None
    gradients: Gradients = (None, None)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """An engine that runs another engine's passes on every device of a mesh."""

    engine: Engine
    sharding: HeadSharding

    @classmethod
    def of(cls, engine: Any, sharding: HeadSharding | None) -> Any:
        """The engine on every device of a mesh, if there is one of several devices."""
        return engine if sharding is None or sharding.mesh.size == 1 else cls(engine, sharding.in_use())

    def obstacle(self, inputs: Any, options: Options) -> str | None:
        """The engine's reason, given one device's part of the arrays."""
        reasons: list[str | None] = []

        def pass_(part: Inputs, local: Options, *_: Any) -> Results:
            reasons.append(self.engine.obstacle(part, local))
            return Results()

        jax.eval_shape(lambda inputs: self.run(pass_, inputs, options), inputs)
        return reasons[0]

    def forward(self, inputs: Any, options: Options) -> tuple[Any, Any]:
        return self.run(lambda part, local, *_: Results(*self.engine.forward(part, local)), inputs, options)[:2]

    def gradients(self, inputs: Any, softmax: Any, saved: Any, slopes: Any, options: Options) -> Gradients:
        def pass_(part: Inputs, local: Options, given: Any, saved: Any) -> Results:
            return Results(gradients=self.engine.gradients(part, given[0], saved, given[1], local))

        return self.run(pass_, inputs, options, (softmax, slopes), saved).gradients

    def loss_and_gradients(self, inputs: Any, terms: Terms, options: Options) -> tuple[Any, Gradients]:
        def pass_(part: Inputs, local: Options, given: Any, _: Any) -> Results:
            softmax, gradients = self.engine.loss_and_gradients(part, Terms(terms.objective, *given), local)
            return Results(softmax, None, gradients)

        results = self.run(pass_, inputs, options, terms[1:])
        return results.rows, results.gradients

    def work(self, inputs: Inputs, options: Options) -> HeadSharding:
        """The layout of the work with the fewest bytes exchanged; `features` are not sharded in it.

        Devices that store different features of W compute different rows of W, for the tokens of all these devices. If
        the tokens' hidden states have more bytes than W, the devices gather W instead, and each computes its tokens.
        """
        at = self.sharding
        if at.features is None:
            return at
        others = tuple(axis for axis in at.tokens if axis != at.features)
        heads: list[Any] = [inputs] if inputs.teacher is None else [inputs, inputs.teacher]
        # Each side is gathered, and its gradient scattered in float32.
        tokens = sum(x.hidden.size * (x.hidden.dtype.itemsize + 4 * options.wants_hidden) for x in heads)
        words = sum(x.weight.size * (_exchanged(x.weight, options).itemsize + 4 * options.wants_weight) for x in heads)
        fewer = tokens // at.devices(*others) <= words // at.devices(*at.vocabulary_axes)
        if fewer or at.features not in at.tokens:
            return HeadSharding(at.mesh, others, (*at.vocabulary_axes, at.features))
        return dataclasses.replace(at, features=None)

    def run(
        self, pass_: Callable[..., Results], inputs: Any, options: Options, given: Any = (), saved: Any = None
    ) -> Results:
        """`pass_(inputs, options, given, saved)` on each device's part, and gradients summed over devices.

        Passes with gradients get arrays [N, ...] in `given`, and the residuals of an earlier pass in `saved`. If rows
        of the weights are sharded, they are cut to the rows that both weights have, and padded to a multiple of the
        devices.
        """
        stored, at, teacher, words = self.sharding, self.work(inputs, options), inputs.teacher, len(inputs.weight)
        shards = stored.devices(*stored.vocabulary_axes, stored.features)
        rows = words if teacher is None else min(words, len(teacher.weight))
        dtypes = gradient_dtypes(inputs, options)

        def even(weight: Array) -> Array:
            weight = weight if len(weight) == rows else weight[:rows]
            return jnp.pad(weight, ((0, -rows % shards), (0, 0))) if rows % shards else weight

        if shards > 1:
            inputs = inputs._replace(weight=even(inputs.weight))
            if teacher is not None:
                inputs = inputs._replace(teacher=teacher._replace(weight=even(teacher.weight)))

        def on_device(part: Inputs, given: Any, saved: Any) -> Results:
            part, local = self._prepared(part, options, at, rows)
            number, own = len(part.labels), next((x for x in at.vocabulary_axes if x in stored.tokens), None)
            one = own is None or self.engine is full_logits  # full logits, a baseline, take all tokens at once
            blocks = 1 if one else -(-number * at.devices(own) // _MOST_GATHERED)
            size = -(-number // blocks)

            def of_block(dw: Array | None, i: Any) -> tuple[Array | None, Results]:
                """Gathers a block of tokens, if it has to; dh and rows are of the device's own tokens."""

                def take(x: Array) -> Array:
                    x = jnp.pad(x, ((0, blocks * size - number), *[(0, 0)] * (x.ndim - 1)))
                    x = x.reshape(blocks, size, *x.shape[1:])[i]
                    return x if own is None else lax.all_gather(x, own, tiled=True)

                block = jax.tree.map(take, given), jax.tree.map(lambda x: x[0, i], saved)
                mine = part.each_row(take)
                mine = mine._replace(labels=mine.labels - lax.axis_index(at.vocabulary_axes) * len(part.weight))
                results = pass_(mine, local, *block)
                (dh, more), mine = results.gradients, results.rows
                if own is not None:
                    mine = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index(own) * size, size), mine)
                dh = None if dh is None else _summed(dh, at.vocabulary_axes, own).astype(dtypes[0])
                return more if dw is None or more is None else dw + more, Results(mine, results.saved, (dh, None))

            if blocks == 1:
                dw, results = of_block(None, 0)
                results = jax.tree.map(lambda x: x[None], results)
            else:
                nothing = jnp.zeros(part.weight.shape) if given and options.wants_weight else None
                dw, results = lax.scan(of_block, nothing, jnp.arange(blocks))
            mine, dh = jax.tree.map(
                lambda x: x.reshape(-1, *x.shape[2:])[:number], (results.rows, results.gradients[0])
            )
            if dw is not None:
                axis, gathers = stored.features, stored.features in at.tokens
                # Scattered by features, XLA for TPUs would add up the whole on every device, and in bfloat16.
                dw = _summed(dw, at.tokens, axis if gathers else None).astype(dtypes[1])
                dw = dw if axis is None else lax.all_to_all(dw, axis, split_axis=1, concat_axis=0, tiled=True)
                if gathers:  # else XLA sums dW up at the end of the backward pass, and holds all of it until then
                    dh, dw = lax.optimization_barrier((dh, dw))
            return Results(mine, jax.tree.map(lambda x: x[None], results.saved), (dh, dw))

        everywhere: Any = PartitionSpec()
        token, states, weight = PartitionSpec(stored.tokens), stored.hidden_spec, stored.weight_spec
        columns = None if inputs.columns is None else everywhere
        of_teacher = None if teacher is None else Teacher(states, weight, everywhere)  # type: ignore[arg-type]
        of_inputs = Inputs(states, weight, token, token, everywhere, columns, of_teacher)  # type: ignore[arg-type]
        of_saved = PartitionSpec(at.vocabulary, None, at.tokens)  # each shard of the vocabulary has its own, in blocks
        results = jax.shard_map(
            on_device,
            mesh=at.mesh,
            in_specs=(of_inputs, token, of_saved),
            out_specs=Results(token, of_saved, (states, weight)),  # type: ignore[arg-type]
            check_vma=False,
        )(inputs, given, saved)
        dh, dw = results.gradients
        dw = None if dw is None else jnp.pad(dw[:words], ((0, max(0, words - len(dw))), (0, 0)))
        return results._replace(gradients=(dh, dw))

    def _prepared(self, part: Inputs, options: Options, at: HeadSharding, vocabulary: int) -> tuple[Inputs, Options]:
        """The engine's arguments on one device, but for tokens: W with all features, and its share of the columns."""
        columns, teacher, axes = part.columns, part.teacher, at.vocabulary_axes
        weight = self._with_features(part.weight, at, options)
        if teacher is not None:
            teacher = teacher._replace(weight=self._with_features(teacher.weight, at, options))
        if axes or len(weight) > vocabulary:
            first = lax.axis_index(axes) * len(weight)
            columns = jnp.clip((vocabulary if columns is None else columns) - first, 0, len(weight))
        wide, (dh, dw) = jnp.dtype(jnp.float32), gradient_dtypes(part, options)
        dtypes = wide if axes else dh, wide if self.sharding.tokens else dw
        options = dataclasses.replace(
            options, vocabulary_axis=axes or None, token_axes=at.tokens, gradient_dtypes=dtypes
        )
        return part._replace(weight=weight, columns=columns, teacher=teacher), options

    def _with_features(self, weight: Float[Array, "V d"], at: HeadSharding, options: Options) -> Float[Array, "W D"]:
        """All features of a device's rows of a weight; the device stores some of the features.

        Features are exchanged for rows, and then rows gathered: a gather of features would copy the whole weight.
        """
        axis = self.sharding.features
        if axis is None:
            return weight
        weight = weight.astype(_exchanged(weight, options))
        weight = lax.all_to_all(weight, axis, split_axis=0, concat_axis=1, tiled=True)
        return weight if axis in at.vocabulary_axes else lax.all_gather(weight, axis, tiled=True)


def _exchanged(weight: Any, options: Options) -> jnp.dtype:
    """The dtype of a weight in exchanges between devices."""
    return min(weight.dtype, options.dtype, key=lambda dtype: dtype.itemsize)


def _summed(part: Float[Array, "R D"], axes: tuple[str, ...], scattered: str | None) -> Float[Array, "r D"]:
    """The sum over mesh axes; along the axis `scattered` each device gets its own rows of the sum."""
    if scattered is not None:
        part = lax.psum_scatter(part, scattered, scatter_dimension=0, tiled=True)
    rest = tuple(axis for axis in axes if axis != scattered)
    return lax.psum(part, rest) if rest else part
