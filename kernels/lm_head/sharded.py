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
from jaxtyping import Array, Float

from kernels.lm_head.contract import Engine, Gradients, Inputs, Objective, Options, Terms, gradient_dtypes
from kernels.lm_head.layout import HeadSharding
from kernels.lm_head.softmax import Slopes, Softmax
from kernels.lm_head.two_softmaxes import Divergence, Pair, PairEngine, TwoSoftmaxes


@dataclasses.dataclass(frozen=True)
class _OnMesh:
    """The passes of an engine on every device of a mesh."""

    sharding: HeadSharding

    @property
    def _rows(self) -> PartitionSpec:
        return PartitionSpec(self.sharding.tokens)

    @property
    def _saved(self) -> PartitionSpec:
        """The layout of saved arrays: each shard of the vocabulary has its own."""
        return PartitionSpec(self.sharding.vocabulary, self.sharding.tokens)

    @property
    def _gradients(self) -> tuple[PartitionSpec, PartitionSpec]:
        return self.sharding.hidden_spec, self.sharding.weight_spec

    def _on_devices(
        self, pass_: Callable[..., Any], out_specs: Any, inputs: Inputs, options: Options, *given: tuple[Any, Any]
    ) -> Any:
        """`pass_(inputs, options, *arguments)` on each device's part; `given` are pairs (argument, its specs).

        The rows of W are padded to a multiple of the vocabulary's devices, and so are those of a dW that is returned.
        """
        vocabulary = inputs.weight.shape[0]

        def on_device(own: Inputs, *arguments: Any) -> Any:
            return pass_(*self._prepared(own, options, vocabulary), *arguments)

        arguments, specs = [x for x, _ in given], [spec for _, spec in given]
        return jax.shard_map(
            on_device, mesh=self.sharding.mesh, in_specs=(self._inputs, *specs), out_specs=out_specs, check_vma=False
        )(self._padded(inputs), *arguments)

    @property
    def _inputs(self) -> Inputs:
        """The layout of a pass's arguments."""
        return Inputs(*self._gradients, self._rows, self._rows, PartitionSpec())  # type: ignore[arg-type]

    def _padded(self, inputs: Inputs) -> Inputs:
        """The inputs, with rows of W for all devices of the vocabulary."""
        missing = -len(inputs.weight) % self.sharding.devices(self.sharding.vocabulary)
        return inputs._replace(weight=jnp.pad(inputs.weight, ((0, missing), (0, 0)))) if missing else inputs

    def _prepared(self, own: Inputs, options: Options, vocabulary: int) -> tuple[Inputs, Options]:
        """The engine's arguments on one device: W's features gathered, labels counted from its first row of W."""
        at, weight, labels, columns = self.sharding, own.weight, own.labels, None
        if at.features is not None:
            if options.dtype.itemsize < weight.dtype.itemsize:
                weight = weight.astype(options.dtype)
            weight = lax.all_gather(weight, at.features, axis=1, tiled=True)
        if at.vocabulary is not None:
            first = lax.axis_index(at.vocabulary) * len(weight)
            labels = labels.astype(jnp.int32) - first
            columns = jnp.clip(vocabulary - first, 0, len(weight))
        wide, (dh, dw) = jnp.dtype(jnp.float32), gradient_dtypes(own, options)
        dtypes = dh if at.vocabulary is None else wide, wide if at.tokens else dw
        options = dataclasses.replace(
            options, vocabulary_axis=at.vocabulary, token_axes=at.tokens, gradient_dtypes=dtypes
        )
        return own._replace(weight=weight, labels=labels, columns=columns), options

    def _summed(self, gradients: Gradients, dtypes: tuple[jnp.dtype, jnp.dtype]) -> Gradients:
        """The gradients summed over the devices that have a part of the sum; each keeps its part of the array."""
        at, (dh, dw) = self.sharding, gradients
        if dh is not None:
            dh = (dh if at.vocabulary is None else lax.psum(dh, at.vocabulary)).astype(dtypes[0])
        return dh, None if dw is None else self._weight_summed(dw, dtypes[1])

    def _weight_summed(self, dw: Float[Array, "V D"], dtype: Any) -> Float[Array, "V d"]:
        """dW summed over the tokens' axes, and of its features those that this device stores."""
        at = self.sharding
        others = tuple(axis for axis in at.tokens if axis != at.features)
        if at.features not in at.tokens:
            if at.features is not None:
                width = dw.shape[1] // at.devices(at.features)
                dw = lax.dynamic_slice_in_dim(dw, lax.axis_index(at.features) * width, width, 1)
            return (lax.psum(dw, others) if others else dw).astype(dtype)
        # The sums are scattered by rows, and the rows exchanged for features: scattered by features, XLA for TPUs would
        # add up the whole on every device, and in bfloat16.
        rows = len(dw)
        dw = jnp.pad(dw, ((0, -rows % at.devices(at.features)), (0, 0)))
        dw = lax.psum_scatter(dw, at.features, scatter_dimension=0, tiled=True)
        dw = (lax.psum(dw, others) if others else dw).astype(dtype)
        return lax.all_to_all(dw, at.features, split_axis=1, concat_axis=0, tiled=True)[:rows]


@dataclasses.dataclass(frozen=True)
class Sharded(_OnMesh):
    """An engine that runs the passes of another on every device of a mesh."""

    engine: Engine

    def forward(self, inputs: Inputs, options: Options) -> tuple[Softmax, Any]:
        def pass_(own: Inputs, options: Options) -> tuple[Softmax, Any]:
            softmax, saved = self.engine.forward(own, options)
            return softmax, jax.tree.map(lambda x: x[None], saved)

        return self._on_devices(pass_, (self._rows, self._saved), inputs, options)

    def gradients(self, inputs: Inputs, softmax: Softmax, saved: Any, slopes: Slopes, options: Options) -> Gradients:
        def pass_(own: Inputs, local: Options, softmax: Softmax, saved: Any, slopes: Slopes) -> Gradients:
            saved = jax.tree.map(lambda x: x[0], saved)
            return self._summed(
                self.engine.gradients(own, softmax, saved, slopes, local), gradient_dtypes(inputs, options)
            )

        given = ((softmax, self._rows), (saved, self._saved), (slopes, self._rows))
        dh, dw = self._on_devices(pass_, self._gradients, inputs, options, *given)
        return dh, None if dw is None else dw[: len(inputs.weight)]

    def loss_and_gradients(
        self,
        inputs: Inputs,
        objective: Objective,
        terms: Terms,
        options: Options,
        into: Float[Array, "V D"] | None = None,
    ) -> tuple[Softmax, Gradients]:
        def pass_(own: Inputs, local: Options, terms: Terms) -> tuple[Softmax, Gradients]:
            softmax, gradients = self.engine.loss_and_gradients(own, objective, terms, local)
            return softmax, self._summed(gradients, gradient_dtypes(inputs, options))

        given = (terms, Terms(self._rows, self._rows, PartitionSpec()))  # type: ignore[arg-type]
        softmax, (dh, dw) = self._on_devices(pass_, (self._rows, self._gradients), inputs, options, given)
        dw = None if dw is None else dw[: len(inputs.weight)]
        return softmax, (dh, dw if dw is None or into is None else into + dw)

    def obstacle(self, inputs: Inputs, options: Options) -> str | None:
        """The engine's reason, given one device's part of the arrays."""
        found: list[str | None] = []

        def pass_(own: Inputs, options: Options) -> tuple[()]:
            found.append(self.engine.obstacle(own, options))
            return ()

        jax.eval_shape(lambda inputs: self._on_devices(pass_, (), inputs, options), inputs)
        return found[0]


def on_devices(
    pass_: Callable[..., Any], engine: Engine, inputs: Inputs, options: Options, *given: Array, sums: bool = False
) -> Any:
    """`pass_(inputs, options, *given)` where the engine's passes run: on each device's part.

    All that is given and returned has rows [N, ...]; with `sums`, what is returned are `Gradients` of a device's part.
    """
    if not isinstance(engine, Sharded):
        return pass_(inputs, options, *given)
    dtypes = gradient_dtypes(inputs, options)

    def own_part(own: Inputs, options: Options, *given: Array) -> Any:
        found = pass_(own, options, *given)
        return engine._summed(found, dtypes) if sums else found

    specs = engine._gradients if sums else engine._rows
    found = engine._on_devices(own_part, specs, inputs, options, *((x, engine._rows) for x in given))
    return (found[0], None if found[1] is None else found[1][: len(inputs.weight)]) if sums else found


@dataclasses.dataclass(frozen=True)
class ShardedPair(_OnMesh):
    """An engine for divergences that runs the passes of another on every device of a mesh."""

    engine: PairEngine

    def forward(self, pair: Pair, how: Divergence, options: Options) -> TwoSoftmaxes:
        return self._on_pairs(lambda own, local: self.engine.forward(own, how, local), self._rows, pair, options)

    def gradients(
        self, pair: Pair, found: TwoSoftmaxes, slopes: Float[Array, "N"], how: Divergence, options: Options
    ) -> Gradients:
        def pass_(own: Pair, local: Options, found: TwoSoftmaxes, slopes: Array) -> Gradients:
            return self._summed(
                self.engine.gradients(own, found, slopes, how, local), gradient_dtypes(pair.student, options)
            )

        given = (found, self._rows), (slopes, self._rows)
        return self._whole(pair, self._on_pairs(pass_, self._gradients, pair, options, *given))

    def loss_and_gradients(
        self, pair: Pair, weights: Float[Array, "N"], how: Divergence, options: Options
    ) -> tuple[TwoSoftmaxes, Gradients]:
        def pass_(own: Pair, local: Options, weights: Array) -> tuple[TwoSoftmaxes, Gradients]:
            found, gradients = self.engine.loss_and_gradients(own, weights, how, local)
            return found, self._summed(gradients, gradient_dtypes(pair.student, options))

        given = (weights, self._rows)
        found, gradients = self._on_pairs(pass_, (self._rows, self._gradients), pair, options, given)
        return found, self._whole(pair, gradients)

    def obstacle(self, pair: Pair, options: Options) -> str | None:
        """The engine's reason, given one device's part of the arrays."""
        found: list[str | None] = []

        def pass_(own: Pair, options: Options) -> tuple[()]:
            found.append(self.engine.obstacle(own, options))
            return ()

        jax.eval_shape(lambda pair: self._on_pairs(pass_, (), pair, options), pair)
        return found[0]

    def _on_pairs(
        self, pass_: Callable[..., Any], out_specs: Any, pair: Pair, options: Options, *given: tuple[Any, Any]
    ) -> Any:
        """`pass_(pair, options, *arguments)` on each device's part, which has the same tokens of both vocabularies."""
        shared = min(len(model.weight) for model in pair)
        most = jnp.int32(shared) if pair.student.columns is None else pair.student.columns
        if self.sharding.vocabulary is not None:
            pair = Pair(*(model._replace(weight=model.weight[:shared]) for model in pair))
        student, teacher = (model._replace(columns=None) for model in pair)

        def on_device(student: Inputs, local: Options, teacher: Inputs, most: Array, *arguments: Any) -> Any:
            teacher, _ = self._prepared(teacher, options, shared)
            axis, rows = self.sharding.vocabulary, len(student.weight)
            first = 0 if axis is None else lax.axis_index(axis) * rows
            own = (model._replace(columns=jnp.clip(most - first, 0, rows)) for model in (student, teacher))
            return pass_(Pair(*own), local, *arguments)

        given = (self._padded(teacher), self._inputs), (most, PartitionSpec()), *given
        return self._on_devices(on_device, out_specs, student, options, *given)

    def _whole(self, pair: Pair, gradients: Gradients) -> Gradients:
        """Gradients with rows of dW for all of the student's vocabulary, and no more."""
        dh, dw = gradients
        rows = len(pair.student.weight)
        return dh, None if dw is None else jnp.pad(dw[:rows], ((0, max(0, rows - len(dw))), (0, 0)))
