"""A checksum depends on every bit and its place in the array, and not on the devices that hold it."""

import copy
import json
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mllm.config.model import MeshConfig
from mllm.parallel.mesh import make_mesh
from mllm.store.checksum import FACTORS, checksums, sums
from mllm.store.run_store import Damaged, seal, unseal

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


def expected_checksum(array):
    """The checksum, computed word by word with Python's integers."""
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
    sums = []
    for factors in FACTORS:
        total = 0
        for index, word in np.ndenumerate(np.asarray(array).view(kind)):
            place = 1
            for dim, i in enumerate(index):
                place = (place * 31 + i * factors[dim]) % 2**32
            for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
                place = (place ^ place >> shift) * factor % 2**32
            total += int(word) * ((place ^ place >> 16) | 1)
        sums.append(f"{total % 2**32:08x}")
    return "".join(sums)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_checksum_of_each_array_does_not_depend_on_the_layout(layout):
    arrays = {dtype: random_bits(dtype) for dtype in DTYPES}
    found = checksums({name: placed(array, layout) for name, array in arrays.items()})
    assert found == {name: expected_checksum(array) for name, array in arrays.items()}
    assert checksums({}) == {}


def test_every_bit_changes_both_sums():
    shapes = [(), (2, 3, 5)]
    arrays = {f"{dtype} {shape}": random_bits(dtype, shape) for dtype in DTYPES for shape in shapes}
    before = {name: expected_checksum(array) for name, array in arrays.items()}
    assert checksums({name: placed(array) for name, array in arrays.items()}) == before
    for name, array in arrays.items():
        bits = 1 if array.dtype == bool else 8 * array.dtype.itemsize
        for place in {0, array.size // 2, array.size - 1}:
            for bit in {0, bits // 2, bits - 1}:
                after = expected_checksum(flipped(array, place, bit))
                assert after[:8] != before[name][:8]
                assert after[8:] != before[name][8:]


def test_checksums_need_no_memory_even_for_more_elements_than_32_bits_count():
    layout = NamedSharding(MESH, PartitionSpec("fsdp", "tp"))
    arrays = [jax.ShapeDtypeStruct((2**20, 2**13), dtype, sharding=layout) for dtype in ("float32", "bfloat16")]
    program = sums.lower(arrays, NamedSharding(MESH, PartitionSpec())).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**16


# Documents

DOCUMENT = {"position": {"data": [1, 2.5, None, "½"], "done": False}, "best": 0.1, "arrays": {"a": "0f"}}


def test_a_sealed_document_comes_back_and_every_changed_bit_of_it_is_found():
    sealed = seal(document := copy.deepcopy(DOCUMENT))
    document["position"]["done"] = True
    text = json.dumps(sealed).encode()
    assert unseal(json.loads(text)) == DOCUMENT
    found = 0
    for place, bit in product(range(len(text)), range(8)):
        damaged = bytearray(text)
        damaged[place] ^= 1 << bit
        try:
            assert unseal(json.loads(damaged)) == DOCUMENT  # the same in other letters: \\u00bD
        except ValueError:
            pass
        except Damaged:
            found += 1
    assert found > 100


@pytest.mark.parametrize("other", [{}, [], None, "crc32", {"position": 1}, {"crc32": "00000000"}])
def test_what_was_never_sealed_is_damaged(other):
    with pytest.raises(Damaged):
        unseal(other)
