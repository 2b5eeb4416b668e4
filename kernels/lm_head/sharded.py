"""The head over a mesh of devices: tokens over some of its axes, the vocabulary over another, W stored in shards.

An engine's pass runs inside `jax.shard_map`, on a device's own tokens and its rows of W; docs/head.md says what devices
exchange. Where gradients are bfloat16, XLA for TPUs rounds dh, and dW after its first sum, ahead of adding them up.
JAX differentiates nothing in here. Hidden states whose features are spread are not supported.

On a mesh with Explicit axes, array types say how arrays are laid out. The head's loops and gathers don't say how
results are laid out, as Explicit axes demand. So the head runs with all axes in Auto mode (`jax.sharding.auto_axes`),
and takes the layout from the types where no `HeadSharding` is given.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from kernels.lm_head.contract import Engine, Gradients, Inputs, Objective, Options, Terms, gradient_dtypes
from kernels.lm_head.softmax import Slopes, Softmax
from kernels.lm_head.two_softmaxes import Divergence, Pair, PairEngine, TwoSoftmaxes


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """The layout of tokens and weight on a mesh, by names of its axes; None: whole on every device.

    Hidden states [N, D] and all that is given for each token are spread over `tokens` in the order of the rows
    ([B, T, D]: B over `tokens`, T over `sequence`), the rows of the weight [V, D] over `vocabulary`, its columns over
    `features`; gradients have the layout of what they belong to. N, B, T and D must be divisible by the devices along
    their axes. A V that is not is padded, which copies the weight.
    """

    mesh: Mesh | AbstractMesh
    tokens: tuple[str, ...]
    vocabulary: str | None = None
    features: str | None = None
    sequence: tuple[str, ...] = ()

    @property
    def of_rows(self) -> "HeadSharding":
        """The layout of rows [N] that each device has made of its own part of [B, T]."""
        return dataclasses.replace(self, tokens=(*self.tokens, *self.sequence), sequence=())

    @property
    def hidden_spec(self) -> PartitionSpec:
        return PartitionSpec(self.tokens, None)

    @property
    def weight_spec(self) -> PartitionSpec:
        return PartitionSpec(self.vocabulary, self.features)

    def devices(self, *axes: str | None) -> int:
        return math.prod(1 if axis is None else self.mesh.shape[axis] for axis in axes)

    def in_use(self) -> "HeadSharding":
        """This layout without the axes along which there is one device, on the same mesh with Auto axes."""
        vocabulary, features = (axis if self.devices(axis) > 1 else None for axis in (self.vocabulary, self.features))
        tokens = tuple(axis for axis in self.tokens if self.devices(axis) > 1)
        auto = self.mesh.update(axis_types=(AxisType.Auto,) * len(self.mesh.axis_names))
        return HeadSharding(auto, tokens, vocabulary, features, self.sequence)

    def check(self, hidden: Float[Array, "N D"], weight: Float[Array, "V D"], prefix: str = "") -> None:
        """Raise ValueError where the arrays can't be laid out so, or are laid out otherwise; `prefix` begins names."""
        for axis in (*self.tokens, self.vocabulary, self.features):
            if axis not in (None, *self.mesh.axis_names):
                raise ValueError(f"sharding: {axis!r} is none of the mesh's axes {', '.join(self.mesh.axis_names)}")
        if self.vocabulary is not None and self.vocabulary in (*self.tokens, self.features):
            raise ValueError(f"sharding: {self.vocabulary!r} is the vocabulary's, and can't be another's axis as well")
        if hidden.shape[0] % self.devices(*self.tokens):
            shards = f"{self.devices(*self.tokens)} shards over {', '.join(self.tokens)}"
            raise ValueError(f"{prefix}hidden: {hidden.shape[0]} tokens don't make {shards}; add some that don't count")
        if weight.shape[1] % self.devices(self.features):
            shards = f"{self.devices(self.features)} shards over {self.features}"
            way_out = "set sharding's features to None"
            raise ValueError(f"{prefix}weight: {weight.shape[1]} features don't make {shards}; {way_out}")
        uneven = weight.shape[0] % self.devices(self.vocabulary)
        weight_spec = PartitionSpec(None, self.features) if uneven else self.weight_spec
        for name, array, spec in (("hidden", hidden, self.hidden_spec), ("weight", weight, weight_spec)):
            if isinstance(array, jax.core.Tracer) or len(array.sharding.device_set) == 1:
                continue  # unknown, or still to be spread
            if not array.sharding.is_equivalent_to(NamedSharding(self.mesh, spec), 2):
                laid_out = f"laid out as sharding says, by {spec}, and has {array.sharding}"
                raise ValueError(f"{prefix}{name} must be {laid_out}")


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


# --- leading dims ---------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """How leading dims [B, T, ...] become rows [N] and back. A device whose T is spread keeps its part of the rows."""

    sharding: HeadSharding | None  # of the rows
    flat: Callable[[Array], Array]  # [B, T, ..., *rest] -> [N, *rest]
    folded: Callable[[Array], Array]  # [N] -> [B, T, ...]


def rows_of(lead: tuple[int, ...], sharding: HeadSharding | None) -> Rows:
    """The rows of arrays with these leading dims; ValueError where they can't be laid out so."""
    count = math.prod(lead)
    if sharding is None or not sharding.sequence:
        return Rows(sharding, lambda x: x.reshape(count, *x.shape[len(lead) :]), lambda x: x.reshape(lead))
    sizes = sharding.devices(*sharding.tokens), sharding.devices(*sharding.sequence)
    if len(lead) != 2 or lead[0] % sizes[0] or lead[1] % sizes[1]:
        shards = f"{sizes[0]} x {sizes[1]} shards over {', '.join(sharding.tokens)} x {', '.join(sharding.sequence)}"
        raise ValueError(f"hidden: leading dims {list(lead)} don't make {shards}; add tokens that don't count")
    own, apart = (lead[0] // sizes[0], lead[1] // sizes[1]), PartitionSpec(sharding.tokens, sharding.sequence)
    rows = sharding.of_rows
    together, mesh = PartitionSpec(rows.tokens), sharding.in_use().mesh
    local = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def flat(x: Array) -> Array:
        return local(lambda x: x.reshape(-1, *x.shape[2:]), in_specs=apart, out_specs=together)(x)

    return Rows(rows, flat, local(lambda x: x.reshape(own), in_specs=together, out_specs=apart))


# --- meshes with Explicit axes ----------------------------------------------------------------------------------------


def run_on_mesh(
    function: Callable[..., Any],
    sharding: HeadSharding | None,
    arrays: Sequence[Array],
    out_specs: Callable[[PartitionSpec], Any],
) -> Any:
    """`function(sharding, *arrays)`, in Auto mode if a mesh with Explicit axes is set or is in the arrays' types.

    `arrays` begins with hidden [*N, D] and weight [V, D]. `out_specs` takes the spec of an array [*N] to a prefix of
    the tree of results. Without a sharding, `function` gets the one that the types have.
    """
    meshes = (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays))
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return function(sharding, *arrays)
    if sharding is None:
        hidden_spec, weight_spec = (jax.typeof(x).sharding.spec for x in arrays[:2])
        sharding = _sharding_of(mesh, hidden_spec, weight_spec, arrays[1].shape[1])
        tokens = PartitionSpec(*hidden_spec[:-1])
    elif sharding.mesh.shape != mesh.shape:
        raise ValueError(f"sharding: its mesh {dict(sharding.mesh.shape)} is not the arguments' {dict(mesh.shape)}")
    else:
        dims = sharding.tokens, sharding.sequence or None, *[None] * arrays[0].ndim
        tokens = PartitionSpec(*dims[: arrays[0].ndim - 1])
    in_auto_mode = functools.partial(function, sharding)
    run = jax.sharding.auto_axes(in_auto_mode, axes=mesh.explicit_axes, out_sharding=out_specs(tokens))
    # Outside of `jit`, JAX would not change the axes' mode.
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run)(*arrays)


def _sharding_of(mesh: AbstractMesh, hidden: PartitionSpec, weight: PartitionSpec, width: int) -> HeadSharding:
    """The layout that the types of hidden [*N, D] and weight [V, D] say; `width` is D.

    Where the vocabulary is spread over an axis of the tokens, the weight's features are, if they can be, instead.
    """
    tokens, *others = (*map(_axes, hidden[:-1]), ())
    sequence = sum(others, ())
    vocabulary, features = (next(iter(_axes(entry)), None) for entry in weight)
    if vocabulary in (*tokens, *sequence):
        vocabulary, features = None, vocabulary if width % mesh.shape[vocabulary] == 0 else None
    return HeadSharding(mesh, tokens, vocabulary, features, sequence)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dim of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
