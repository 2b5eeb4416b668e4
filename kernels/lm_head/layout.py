"""The layout of the head's arrays on a mesh: tokens over some of its axes, the vocabulary over another, W in shards.

On a mesh with Explicit axes, array types contain their shardings, and every operation must state its result's sharding.
The head's loops and gathers don't, so the head runs with all axes in Auto mode (`jax.sharding.auto_axes`). Without a
`HeadSharding` it takes the layout from the types.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .contract import Inputs
from .shapes import Array, Float


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """The mesh axes that shard tokens and weight; None: replicated.

    `tokens` shards hidden states [N, D] and every array of tokens by rows ([B, T, D]: B over `tokens`). `vocabulary`
    shards the rows of the weight [V, D], `features` its columns. A gradient has its argument's layout. N, B and D must
    be divisible by the devices along their axes. A V that is not divisible is padded, which copies the weight.
    """

    mesh: Mesh | AbstractMesh
    tokens: tuple[str, ...]
    vocabulary: str | tuple[str, ...] | None = None
    features: str | None = None

    def __post_init__(self) -> None:
        tokens: Any = self.tokens
        if isinstance(tokens, str):
            raise ValueError(f"sharding: tokens must be a tuple of axes: ({tokens!r},), not {tokens!r}")
        if not isinstance(self.features, str | None):
            raise ValueError(f"sharding: features must be an axis or None, not {self.features!r}")

    @property
    def vocabulary_axes(self) -> tuple[str, ...]:
        return _axes(self.vocabulary)

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
        features = self.features if self.devices(self.features) > 1 else None
        parts = self.tokens, self.vocabulary_axes
        tokens, vocabulary = (tuple(axis for axis in axes if self.devices(axis) > 1) for axes in parts)
        auto = self.mesh.update(axis_types=(AxisType.Auto,) * len(self.mesh.axis_names))
        return HeadSharding(auto, tokens, vocabulary or None, features)

    def check(self, hidden: Float[Array, "N D"], weight: Float[Array, "V D"], prefix: str = "") -> None:
        """Raise ValueError if the arrays can't have this layout; `prefix` begins their names."""
        for axis in (*self.tokens, *self.vocabulary_axes, self.features):
            if axis not in (None, *self.mesh.axis_names):
                raise ValueError(f"sharding: {axis!r} is none of the mesh's axes {', '.join(self.mesh.axis_names)}")
        for axis in self.vocabulary_axes:
            if axis in (*self.tokens, self.features):
                raise ValueError(f"sharding: {axis!r} is the vocabulary's, and can't be another's axis as well")
        if hidden.shape[0] % self.devices(*self.tokens):
            shards = f"{self.devices(*self.tokens)} shards over {', '.join(self.tokens)}"
            raise ValueError(f"{prefix}hidden: {hidden.shape[0]} tokens don't make {shards}; add some that don't count")
        if weight.shape[1] % self.devices(self.features):
            shards = f"{self.devices(self.features)} shards over {self.features}; set sharding's features to None"
            raise ValueError(f"{prefix}weight: {weight.shape[1]} features don't make {shards}")


# --- leading dims ---------------------------------------------------------------------------------------------------


class LeadingDims(NamedTuple):
    """How leading dims [B, T, ...] become rows [N] and back."""

    sharding: HeadSharding | None
    flat: Callable[[Array], Array]  # [B, T, ..., *rest] -> [N, *rest]
    folded: Callable[[Array], Array]  # [N, *rest] -> [B, T, ..., *rest]


# --- meshes with Explicit axes ----------------------------------------------------------------------------------------


def run_on_mesh(
    function: Callable[..., Any],
    sharding: HeadSharding | None,
    inputs: Inputs,
    others: Sequence[Any] = (),
    out_specs: Callable[[PartitionSpec], Any] = lambda tokens: tokens,
) -> Any:
    """`function(rows, inputs, *others)`, in Auto mode if a mesh with Explicit axes is set or is in the arrays' types.

    The inputs have any leading dims, and `function` gets them in rows [N, ...]; `others` are trees of arrays.
    `out_specs` takes the spec of an array [*N] to a prefix of the tree of results. Without a sharding, the types' is
    taken.
    """
    hidden, weight, arrays = inputs.hidden, inputs.weight, jax.tree.leaves((inputs, others))
    meshes = (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays))
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is not None and sharding is None:
        hidden_spec, weight_spec = (jax.typeof(x).sharding.spec for x in (hidden, weight))
        sharding = _sharding_of(mesh, hidden_spec, weight_spec, weight.shape[1])

    def in_rows(inputs: Inputs, *others: Any) -> Any:
        lead = inputs.labels.shape
        flat = lambda x: x.reshape(math.prod(lead), *x.shape[len(lead) :])  # noqa: E731
        rows = LeadingDims(sharding, flat, lambda x: x.reshape(*lead, *x.shape[1:]))
        inputs = inputs.each_row(rows.flat)
        if rows.sharding is not None:
            rows.sharding.check(inputs.hidden, inputs.weight)
            if inputs.teacher is not None:
                rows.sharding.check(inputs.teacher.hidden, inputs.teacher.weight, "teacher_")
        return function(rows, inputs, *others)

    if mesh is None or sharding is None:
        return in_rows(inputs, *others)
    if sharding.mesh.shape != mesh.shape:
        raise ValueError(f"sharding: its mesh {dict(sharding.mesh.shape)} is not the arguments' {dict(mesh.shape)}")
    dims = sharding.tokens or None, *[None] * hidden.ndim
    tokens = PartitionSpec(*dims[: hidden.ndim - 1])
    run = jax.sharding.auto_axes(in_rows, axes=mesh.explicit_axes, out_sharding=out_specs(tokens))
    # Outside of `jit`, JAX would not change the axes' mode.
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run)(inputs, *others)


def _sharding_of(mesh: AbstractMesh, hidden: PartitionSpec, weight: PartitionSpec, width: int) -> HeadSharding:
    """The layout that the types of hidden [*N, D] and weight [V, D] say; `width` is D.

    If an axis would shard both tokens and vocabulary, it shards the weight's features instead, if they are divisible.
    """
    tokens, *inner = (*map(_axes, hidden[:-1]), ())
    if any(inner):
        raise ValueError(f"hidden must be spread over its first dim alone, and its type says {hidden}")
    vocabulary, columns = map(_axes, weight)
    if len(columns) > 1:
        raise ValueError(f"weight's features must be spread over one axis, and its type says {weight}")
    features = next(iter(columns), None)
    shared = [axis for axis in vocabulary if axis in tokens]
    if shared:
        vocabulary = tuple(axis for axis in vocabulary if axis not in tokens)
        features = features or (shared[0] if width % mesh.shape[shared[0]] == 0 else None)
    return HeadSharding(mesh, tokens, vocabulary or None, features)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dim of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
