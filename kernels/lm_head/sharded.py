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

from .contract import Engine, Gradients, Inputs, Options, Terms, gradient_dtypes
from .layout import HeadSharding
from .shapes import Array, Float
from .two_softmaxes import Pair


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
        found: list[str | None] = []

        def pass_(*own: Any) -> tuple[()]:
            found.append(self.engine.obstacle(*own))
            return ()

        jax.eval_shape(lambda inputs: self.run(pass_, (), inputs, options), inputs)
        return found[0]

    def forward(self, inputs: Any, options: Options) -> tuple[Any, Any]:
        def pass_(*own: Any) -> tuple[Any, Any]:
            softmax, saved = self.engine.forward(*own)
            return softmax, jax.tree.map(lambda x: x[None], saved)

        return self.run(pass_, (self.rows, self._saved), inputs, options)

    def gradients(self, inputs: Any, softmax: Any, saved: Any, slopes: Any, options: Options) -> Gradients:
        def pass_(own: Any, local: Options, softmax: Any, saved: Any, slopes: Any) -> tuple[Any, Gradients]:
            saved = jax.tree.map(lambda x: x[0], saved)
            return (), self.engine.gradients(own, softmax, saved, slopes, local)

        given = ((softmax, self.rows), (saved, self._saved), (slopes, self.rows))
        return self.run_and_sum(pass_, (), inputs, options, *given)[1]

    def loss_and_gradients(self, inputs: Any, terms: Terms, options: Options) -> tuple[Any, Gradients]:
        def pass_(own: Any, local: Options, terms: Terms) -> tuple[Any, Gradients]:
            return self.engine.loss_and_gradients(own, terms, local)

        given = (terms, Terms(PartitionSpec(), self.rows, self.rows))  # type: ignore[arg-type]
        return self.run_and_sum(pass_, self.rows, inputs, options, given)

    @property
    def rows(self) -> PartitionSpec:
        """The layout of arrays [N, ...]."""
        return PartitionSpec(self.sharding.tokens)

    @property
    def _saved(self) -> PartitionSpec:
        """The layout of saved arrays: each shard of the vocabulary has its own."""
        return PartitionSpec(self.sharding.vocabulary, self.sharding.tokens)

    @property
    def _gradients(self) -> tuple[PartitionSpec, PartitionSpec]:
        return self.sharding.hidden_spec, self.sharding.weight_spec

    @property
    def _inputs(self) -> Inputs:
        """The layout of a pass's arguments."""
        return Inputs(*self._gradients, self.rows, self.rows, PartitionSpec())  # type: ignore[arg-type]

    def run(
        self, pass_: Callable[..., Any], out_specs: Any, inputs: Any, options: Options, *given: tuple[Any, Any]
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

    def run_and_sum(
        self, pass_: Callable[..., Any], out_specs: Any, inputs: Any, options: Options, *given: tuple[Any, Any]
    ) -> tuple[Any, Gradients]:
        """What `pass_` gives beside the gradients of a device's part, which are summed; dW has the weight's rows."""
        student = getattr(inputs, "student", inputs)
        dtypes, rows = gradient_dtypes(student, options), len(student.weight)

        def summed(*own: Any) -> tuple[Any, Gradients]:
            beside, gradients = pass_(*own)
            return beside, self._summed(gradients, dtypes)

        beside, (dh, dw) = self.run(summed, (out_specs, self._gradients), inputs, options, *given)
        return beside, (dh, None if dw is None else jnp.pad(dw[:rows], ((0, max(0, rows - len(dw))), (0, 0))))

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


class ShardedPair(Sharded):
    """An engine of pairs on a mesh."""

    def run(
        self, pass_: Callable[..., Any], out_specs: Any, inputs: Pair, options: Options, *given: tuple[Any, Any]
    ) -> Any:
        """`pass_(pair, options, *arguments)` on each device's part, which has the same tokens of both vocabularies."""
        pair, shared = inputs, inputs.common
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
        return super().run(on_device, out_specs, student, options, *given)
