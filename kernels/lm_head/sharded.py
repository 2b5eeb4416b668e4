"""The head over a mesh of devices: an engine's passes inside `jax.shard_map`, on a device's own tokens and rows of W.

docs/head.md says what devices exchange. Where gradients are bfloat16, XLA for TPUs rounds dh, and dW after its first
sum, ahead of adding them up. JAX differentiates nothing in here. Hidden states whose features are spread are not
supported.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .contract import Engine, Gradients, Inputs, Options, Teacher, Terms, gradient_dtypes
from .layout import HeadSharding
from .shapes import Array, Float


@dataclasses.dataclass(frozen=True)
class Sharded:
    """An engine that runs the passes of another, with its types, on every device of a mesh."""

    engine: Engine
    sharding: HeadSharding

    @classmethod
    def of(cls, engine: Any, sharding: HeadSharding | None) -> Any:
        """The engine on every device of a mesh, if there is one of several devices."""
        return engine if sharding is None or sharding.mesh.size == 1 else cls(engine, sharding.in_use())

    def obstacle(self, inputs: Any, options: Options) -> str | None:
        """The engine's reason, given one device's part of the arrays."""
        reasons: list[str | None] = []

        def pass_(*arguments: Any) -> tuple[()]:
            reasons.append(self.engine.obstacle(*arguments))
            return ()

        jax.eval_shape(lambda inputs: self.run(pass_, (), inputs, options), inputs)
        return reasons[0]

    def forward(self, inputs: Any, options: Options) -> tuple[Any, Any]:
        def pass_(*arguments: Any) -> tuple[Any, Any]:
            softmax, saved = self.engine.forward(*arguments)
            return softmax, jax.tree.map(lambda x: x[None], saved)

        return self.run(pass_, (self.rows, self._saved), inputs, options)

    def gradients(self, inputs: Any, softmax: Any, saved: Any, slopes: Any, options: Options) -> Gradients:
        def pass_(part: Any, local: Options, softmax: Any, saved: Any, slopes: Any) -> tuple[Any, Gradients]:
            saved = jax.tree.map(lambda x: x[0], saved)
            return (), self.engine.gradients(part, softmax, saved, slopes, local)

        pairs = ((softmax, self.rows), (saved, self._saved), (slopes, self.rows))
        return self.run_and_sum(pass_, (), inputs, options, *pairs)[1]

    def loss_and_gradients(self, inputs: Any, terms: Terms, options: Options) -> tuple[Any, Gradients]:
        def pass_(part: Any, local: Options, terms: Terms) -> tuple[Any, Gradients]:
            return self.engine.loss_and_gradients(part, terms, local)

        pair = (terms, Terms(PartitionSpec(), self.rows, self.rows))  # type: ignore[arg-type]
        return self.run_and_sum(pass_, self.rows, inputs, options, pair)

    @property
    def rows(self) -> PartitionSpec:
        """The layout of arrays [N, ...]."""
        return PartitionSpec(self.sharding.tokens)

    @property
    def _saved(self) -> PartitionSpec:
        """The layout of saved arrays: each shard of the vocabulary has its own."""
        return PartitionSpec(self.sharding.vocabulary, self.sharding.tokens)

    def _specs(self, inputs: Inputs) -> Any:
        """The layout of a pass's arguments."""
        replicated: Any = PartitionSpec()
        states, weight = self.sharding.hidden_spec, self.sharding.weight_spec
        columns, teacher = None if inputs.columns is None else replicated, None
        if inputs.teacher is not None:
            teacher = Teacher(states, weight, replicated)  # type: ignore[arg-type]
        return Inputs(states, weight, self.rows, self.rows, replicated, columns, teacher)  # type: ignore[arg-type]

    def run(
        self, pass_: Callable[..., Any], out_specs: Any, inputs: Any, options: Options, *pairs: tuple[Any, Any]
    ) -> Any:
        """`pass_(inputs, options, *arguments)` on each device's part; `pairs` have each argument and its specs.

        Where the vocabulary is spread, the rows of both weights are cut to what both have, and padded to a multiple of
        its devices; and so are the rows of a dW that is returned.
        """
        shards, teacher = self.sharding.devices(*self.sharding.vocabulary_axes), inputs.teacher
        rows = len(inputs.weight) if teacher is None else min(len(inputs.weight), len(teacher.weight))

        def even(weight: Array) -> Array:
            weight = weight if len(weight) == rows else weight[:rows]
            return jnp.pad(weight, ((0, -rows % shards), (0, 0))) if rows % shards else weight

        if shards > 1:
            inputs = inputs._replace(weight=even(inputs.weight))
            if teacher is not None:
                inputs = inputs._replace(teacher=teacher._replace(weight=even(teacher.weight)))

        def on_device(part: Inputs, *arguments: Any) -> Any:
            return pass_(*self._prepared(part, options, rows), *arguments)

        arguments, specs = [x for x, _ in pairs], [spec for _, spec in pairs]
        in_specs = self._specs(inputs), *specs
        return jax.shard_map(
            on_device, mesh=self.sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(inputs, *arguments)

    def run_and_sum(
        self, pass_: Callable[..., Any], out_specs: Any, inputs: Any, options: Options, *pairs: tuple[Any, Any]
    ) -> tuple[Any, Gradients]:
        """What `pass_` gives, with the gradients in it summed over the devices that have a part of the sum."""
        at, dtypes, rows = self.sharding, gradient_dtypes(inputs, options), len(inputs.weight)

        def summed(*arguments: Any) -> tuple[Any, Gradients]:
            beside, (dh, dw) = pass_(*arguments)
            if dh is not None:
                dh = (dh if at.vocabulary is None else lax.psum(dh, at.vocabulary)).astype(dtypes[0])
            return beside, (dh, None if dw is None else self._weight_summed(dw, dtypes[1]))

        beside, (dh, dw) = self.run(summed, (out_specs, (at.hidden_spec, at.weight_spec)), inputs, options, *pairs)
        return beside, (dh, None if dw is None else jnp.pad(dw[:rows], ((0, max(0, rows - len(dw))), (0, 0))))

    def _prepared(self, part: Inputs, options: Options, vocabulary: int) -> tuple[Inputs, Options]:
        """The engine's arguments on one device: W's features gathered, labels counted from its first row of W."""
        at, labels, columns, teacher = self.sharding, part.labels, part.columns, part.teacher
        weight = self._with_features(part.weight, options)
        if teacher is not None:
            teacher = teacher._replace(weight=self._with_features(teacher.weight, options))
        axes = at.vocabulary_axes
        if axes:
            first = lax.axis_index(axes) * len(weight)
            labels = labels - first
            columns = jnp.clip((vocabulary if columns is None else columns) - first, 0, len(weight))
        wide, (dh, dw) = jnp.dtype(jnp.float32), gradient_dtypes(part, options)
        dtypes = wide if axes else dh, wide if at.tokens else dw
        options = dataclasses.replace(
            options, vocabulary_axis=axes or None, token_axes=at.tokens, gradient_dtypes=dtypes
        )
        return part._replace(weight=weight, labels=labels, columns=columns, teacher=teacher), options

    def _with_features(self, weight: Float[Array, "V d"], options: Options) -> Float[Array, "V D"]:
        """All features of a weight, of which each device stores some."""
        if self.sharding.features is None:
            return weight
        if options.dtype.itemsize < weight.dtype.itemsize:
            weight = weight.astype(options.dtype)
        return lax.all_gather(weight, self.sharding.features, axis=1, tiled=True)

    def _weight_summed(self, dw: Float[Array, "V D"], dtype: Any) -> Float[Array, "V d"]:
        """dW summed over the tokens' axes: the features of it that this device stores."""
        at = self.sharding
        axes = tuple(axis for axis in at.tokens if axis != at.features)
        if at.features not in at.tokens:
            if at.features is not None:
                width = dw.shape[1] // at.devices(at.features)
                dw = lax.dynamic_slice_in_dim(dw, lax.axis_index(at.features) * width, width, 1)
            return (lax.psum(dw, axes) if axes else dw).astype(dtype)
        # The sums are scattered by rows, and the rows exchanged for features: scattered by features, XLA for TPUs would
        # add up the whole on every device, and in bfloat16.
        rows = len(dw)
        dw = jnp.pad(dw, ((0, -rows % at.devices(at.features)), (0, 0)))
        dw = lax.psum_scatter(dw, at.features, scatter_dimension=0, tiled=True)
        dw = (lax.psum(dw, axes) if axes else dw).astype(dtype)
        return lax.all_to_all(dw, at.features, split_axis=1, concat_axis=0, tiled=True)[:rows]
