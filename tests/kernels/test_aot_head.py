"""The head's TPU kernels through the real TPU compiler, for TPUs that aren't there (`make aot` installs it).

Sizes are those of models of 135M to 70B at 8192 tokens, with the vocabulary whole, odd, and in shards over 2 and 8
devices. By default each size of hidden states is compiled once; `-m "aot and slow"` adds every chip and every way to
call the head. That a program compiles shows that its tiles fit the chip. Temporaries are by the compiler's account of
HBM.

Left out: results, which strict interpreters check on CPUs; matrix products, which test_head_work.py counts in
the traced programs; and times, which only a TPU can tell.
"""

import importlib.util
import math
from typing import Any, NamedTuple

import head_programs as head
import jax
import pytest
from compiled_program import exchanged, kernels
from jax.sharding import Mesh

from mllm.plan import targets

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs"),
]

MIB = 2**20
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
FEATURES = (576, 896, 1536, 2048, 2560, 3584, 4096, 5120, 8192)
VOCABULARIES = (32000, 50257, 128256, 151936, 152064, 256000, 75968, 32003, 18992)


class Entry(NamedTuple):
    """A way to call the head, and what it should compile to."""

    program: str
    options: dict[str, Any]
    kernels: set[str]


MIXED = {"weight": "float32", "dtype": "bfloat16"}
ONE_PASS = {"head_forward_mean_keep", "head_kept_weight_gradient"}
ENTRIES = {
    "forward alone": Entry("value", {}, {"head_forward"}),
    "forward alone with float32 weights": Entry("value", MIXED, {"head_forward"}),
    "general backward": Entry("general", {}, {"head_forward_mean", "head_weight_gradient"}),
    "loss in one pass": Entry("loss", {"workspace": 5120 * MIB}, ONE_PASS),
    "loss in one pass with float32 weights": Entry("loss", MIXED | {"workspace": 640 * MIB}, ONE_PASS),
}
WITHOUT_WORKSPACE = Entry("loss", {"workspace": 0}, {"head_forward_mean", "head_weight_gradient"})
BACKWARD = {"head_hidden_gradient", "head_weight_gradient"}
WITH_ENTROPY = {
    "general backward": Entry("general", {"entropy": True}, {"head_forward_mean", *BACKWARD}),
    "loss": Entry("loss", {"entropy": True, "workspace": 0}, {"head_forward", *BACKWARD}),
}

FLOAT32 = {
    name: ENTRIES[name]._replace(options={"hidden": "float32", "weight": "float32"})
    for name in ("forward alone", "general backward")
}

# Every entry with all features and all vocabularies, and every size of hidden states on all chips. The loss without a
# workspace isn't among them: its kernels are those of the general backward.
CASES = [
    pytest.param(
        entry,
        VOCABULARIES[(2 * i + j) % 9],
        features,
        CHIPS[(i + j) % 4],
        id=f"{name}, {features}",
        marks=[pytest.mark.slow] * (i != j % 5),
    )
    for i, (name, entry) in enumerate(ENTRIES.items())
    for j, features in enumerate(FEATURES)
]


def compiled(mesh: Mesh, entry: Entry, **sizes: Any) -> jax.stages.Compiled:
    options = {"hidden": "bfloat16", "weight": "bfloat16", "impl": "mosaic_tpu"} | entry.options | sizes
    return targets.compiled(*getattr(head, entry.program)(mesh, **options), mesh)


@pytest.mark.parametrize(("entry", "vocabulary", "features", "chip"), CASES)
def test_a_program_compiles_to_its_kernels_within_its_memory(
    entry: Entry, vocabulary: int, features: int, chip: str
) -> None:
    mesh = targets.mesh(chip)
    sizes = {"tokens": 8192, "vocabulary": vocabulary, "features": features}
    program = compiled(mesh, entry, **sizes)
    assert kernels(program) == entry.kernels
    two_of_hidden_s_shape = 2 * 8192 * features * 2
    temporaries = entry.options.get("workspace", 0) + 64 * MIB + two_of_hidden_s_shape
    if features % 128:  # XLA keeps such arrays transposed, without padding, and copies weight and dW for the kernels
        temporaries += 2 * vocabulary * -(-features // 128) * 128 * (4 if entry.options.get("weight") else 2)
    assert targets.memory(program)["temp"] <= temporaries


@pytest.mark.parametrize(
    ("entry", "chip", "features"),
    [
        pytest.param(WITH_ENTROPY["general backward"], "v5p", 3584, id="general-v5p", marks=pytest.mark.slow),
        pytest.param(WITH_ENTROPY["general backward"], "v6e", 2048, id="general-v6e", marks=pytest.mark.slow),
        pytest.param(WITH_ENTROPY["loss"], "v5e", 896, id="loss-v5e"),
        pytest.param(WITH_ENTROPY["loss"], "tpu7x", 1536, id="loss-tpu7x", marks=pytest.mark.slow),
        pytest.param(FLOAT32["forward alone"], "tpu7x", 2048, id="float32-forward-tpu7x", marks=pytest.mark.slow),
        pytest.param(FLOAT32["general backward"], "v5e", 896, id="float32-general-v5e", marks=pytest.mark.slow),
    ],
)
def test_entropies_with_a_gradient_and_float32_products_compile(entry: Entry, chip: str, features: int) -> None:
    mesh = targets.mesh(chip)
    sizes = {"tokens": 8192, "vocabulary": 18992, "features": features}
    assert kernels(compiled(mesh, entry, **sizes)) == entry.kernels


@pytest.mark.parametrize("configured", ["highest", "tensorfloat32"])
def test_the_kernels_compile_at_any_default_matmul_precision(configured: str) -> None:
    sizes, mesh = {"tokens": 256, "vocabulary": 1000, "features": 256}, targets.mesh("v6e")
    with jax.default_matmul_precision(configured):
        for entry in (WITH_ENTROPY["general backward"], ENTRIES["loss in one pass"]):
            assert kernels(compiled(mesh, entry, **sizes)) == entry.kernels


@pytest.mark.parametrize("tokens", [8192, *(pytest.param(n, marks=pytest.mark.slow) for n in (2048, 32768, 65536))])
def test_without_a_workspace_a_loss_takes_64_mib_and_one_array_of_hidden_s_shape(tokens: int) -> None:
    mesh, sizes = targets.mesh("v6e"), {"tokens": tokens, "vocabulary": 151936, "features": 2048}
    temporaries = targets.memory(compiled(mesh, WITHOUT_WORKSPACE, **sizes))["temp"]
    assert temporaries <= 64 * MIB + 2 * tokens * 2048
    if tokens == 8192:
        assert temporaries <= 34.5 * MIB  # as the README says


# --- over eight chips, two along each of dp, fsdp and tp ---

SHARDED = {"tokens": 8192, "vocabulary": 151936, "features": 2048}
W = (151936 // 2, 2048)
"""Shape of a device's part of the weight in a pass."""
H = (8192 // 4, 2048)
"""Shape of a device's part of the hidden states."""


@pytest.mark.parametrize(
    ("entry", "target"),
    [
        pytest.param(WITHOUT_WORKSPACE, "v6e:2x4", id="loss without a workspace, v6e"),
        pytest.param(WITHOUT_WORKSPACE, "v5p:2x2x2", id="loss without a workspace, v5p", marks=pytest.mark.slow),
        pytest.param(ENTRIES["general backward"], "v6e:2x4", id="general backward, v6e", marks=pytest.mark.slow),
        pytest.param(ENTRIES["loss in one pass"], "v5p:2x2x2", id="loss in one pass, v5p", marks=pytest.mark.slow),
    ],
)
def test_eight_chips_gather_weights_once_and_sum_only_gradients_and_numbers_of_rows(entry: Entry, target: str) -> None:
    """The list of what is exchanged is complete but for scalars.

    Three things in it are XLA's doing. It merges the gathers of forward and backward where nothing stands between them;
    it pads what is scattered, and exchanges a few rows for that; and it narrows what is summed over tp (dh) and dp (dW)
    to bfloat16, the gradients' dtype, before the sum.
    """
    mesh = targets.mesh(target, (2, 2, 2), ("dp", "fsdp", "tp"))
    program = compiled(mesh, entry, **SHARDED)
    assert kernels(program) == entry.kernels
    a_number_a_row = [array for array in exchanged(program) if math.prod(array.shape) == H[0]]
    assert {(array.kind, array.dtype) for array in a_number_a_row} == {("all-reduce", "f32")}
    assert len(a_number_a_row) <= 5  # the maximum, for backward in the products' units, too, and three sums
    others = sorted(array for array in exchanged(program) if array not in a_number_a_row)
    permuted = [array for array in others if array.kind == "collective-permute"]
    assert sum(math.prod(array.shape) for array in permuted) < 0.01 * math.prod(W)
    *sums, scattered = [array for array in others if array not in permuted]
    assert sums == [
        ("all-gather", "bf16", W),
        ("all-reduce", "bf16", H),
        ("all-reduce", "bf16", (W[0] // 2, W[1])),
        ("all-to-all", "bf16", (W[0] // 2, 2, W[1] // 2)),
    ]
    assert (scattered.kind, scattered.dtype) == ("reduce-scatter", "f32")
    assert W[0] // 2 <= scattered.shape[0] < 1.01 * W[0] // 2
