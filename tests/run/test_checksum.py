"""A checksum depends on every bit and its place in the array, and not on the devices that hold it."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mllm.config.model import MeshConfig
from mllm.parallel.mesh import make_mesh
from mllm.run.checksum import checksums, sums

MESH = make_mesh(MeshConfig(dp=2, fsdp=2, tp=2))
LAYOUTS = [(), ("fsdp", "tp"), ("tp", ("dp", "fsdp"))]
DTYPES = ["float32", "bfloat16", "int32", "bool", "float8_e4m3fn"]


def placed(array, layout=()):
    # From the host: a program that XLA makes to split an array on a CPU may change bfloat16 NaNs.
    return jax.device_put(np.asarray(array), NamedSharding(MESH, PartitionSpec(*layout)))


def random_bits(dtype, shape=(8, 16)):
    """An array of random bits, with NaNs of every kind."""
    if dtype == "bool":
        return np.random.default_rng(0).integers(0, 2, shape).astype(bool)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[jnp.dtype(dtype).itemsize]
    bits = np.random.default_rng(0).integers(0, np.iinfo(kind).max, shape, kind)
    return np.asarray(bits).view(jnp.dtype(dtype)).reshape(shape)


def flipped(array, place, bit):
    """The array with one bit of one element flipped."""
    elements = np.array(array).reshape(-1)
    elements.view(np.uint8).reshape(array.size, -1)[place, bit // 8] ^= 1 << bit % 8
    return elements.reshape(array.shape)


def test_array_checksums_do_not_depend_on_the_layout():
    arrays = {dtype: random_bits(dtype) for dtype in DTYPES}
    first, *others = [checksums({name: placed(array, layout) for name, array in arrays.items()}) for layout in LAYOUTS]
    assert others == [first, first]
    assert checksums({}) == {}
    # Checkpoints that are there stay readable.
    assert checksums({"a": placed((np.arange(12) ** 8).astype(np.int32).reshape(3, 4))}) == {"a": "e251668ce502f3e6"}


@pytest.mark.slow
def test_every_bit_changes_both_sums():
    for dtype, shape in [("float32", ()), *product(DTYPES, [(2, 3, 5)])]:
        array = random_bits(dtype, shape)
        bits = 1 if array.dtype == bool else 8 * array.dtype.itemsize
        places = product({0, array.size // 2, array.size - 1}, {0, bits // 2, bits - 1})
        changed = {str(place): placed(flipped(array, *place)) for place in places}
        digests = checksums({"": placed(array), **changed})
        for half in (slice(8), slice(8, 16)):
            assert digests[""][half] not in [digests[place][half] for place in changed]


def test_checksums_need_no_memory_beyond_2_32_elements():
    layout = NamedSharding(MESH, PartitionSpec("fsdp", "tp"))
    arrays = [jax.ShapeDtypeStruct((2**20, 2**13), dtype, sharding=layout) for dtype in ("float32", "bfloat16")]
    program = sums.lower(arrays, NamedSharding(MESH, PartitionSpec())).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**16
