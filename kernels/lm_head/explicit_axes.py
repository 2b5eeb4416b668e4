"""Meshes with Explicit axes, whose array types say how arrays are laid out.

The head's loops and gathers don't say how results are laid out, as Explicit axes demand. So the head runs with all
axes in Auto mode (`jax.sharding.auto_axes`), and takes the layout from the types where no `HeadSharding` is given.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array

from kernels.lm_head.sharded import HeadSharding


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
        return function(None if sharding is None else sharding.in_auto_mode(), *arrays)
    if sharding is None:
        hidden_spec, weight_spec = (jax.typeof(x).sharding.spec for x in arrays[:2])
        sharding = _sharding_of(mesh, hidden_spec, weight_spec, arrays[1].shape[1])
        tokens = PartitionSpec(*hidden_spec[:-1])
    elif sharding.mesh.shape != mesh.shape:
        raise ValueError(f"sharding: its mesh {dict(sharding.mesh.shape)} is not the arguments' {dict(mesh.shape)}")
    else:
        tokens = PartitionSpec(sharding.tokens, *[None] * (arrays[0].ndim - 2))
    run = jax.sharding.auto_axes(
        functools.partial(function, sharding.in_auto_mode()), axes=mesh.explicit_axes, out_sharding=out_specs(tokens)
    )
    # Outside of `jit`, JAX would not change the axes' mode.
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run)(*arrays)


def _sharding_of(mesh: AbstractMesh, hidden: PartitionSpec, weight: PartitionSpec, width: int) -> HeadSharding:
    """The layout that the types of hidden [*N, D] and weight [V, D] say; `width` is D.

    Where the vocabulary is spread over an axis of the tokens, the weight's features are, if they can be, instead.
    """
    tokens = tuple(axis for entry in hidden[:-1] for axis in _axes(entry))
    vocabulary, features = (next(iter(_axes(entry)), None) for entry in weight)
    if vocabulary in tokens:
        vocabulary, features = None, vocabulary if width % mesh.shape[vocabulary] == 0 else None
    return HeadSharding(mesh, tokens, vocabulary, features)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dim of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
