"""The head's Pallas kernels through the real TPU compiler, for TPUs that aren't there (`make aot` installs it).

Sizes are those of Qwen2.5, of 0.5B to 7B, at 8192 tokens, with the vocabulary whole and in shards over 2, 4 and 8
devices; of their combinations a quarter of a hundred that hold all pairs. That a program compiles shows that its tiles
fit the chip. Temporaries are by the compiler's account of HBM.
Leaves out results, which strict interpretation checks on CPUs, and times, which only a TPU can tell.
"""

import importlib.util
import math
from typing import Any, NamedTuple

import jax
import pytest
from compiled_program import exchanged, kernels
from jax.sharding import Mesh

from mllm.plan import head_programs as head
from mllm.plan import targets, work

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs"),
]

MIB = 2**20
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
FEATURES = (896, 1536, 2048, 3584)
VOCABULARIES = (151936, 152064, 75968, 37984, 18992)


class Entry(NamedTuple):
    """A way to call the head: the products it should take, in those of tokens x vocabulary x features, its kernels."""

    program: str
    options: dict[str, Any]
    products: int
    kernels: set[str]


MIXED = {"weight": "float32", "dtype": "bfloat16"}
ENTRIES = {
    "forward alone": Entry("value", {}, 1, {"head_forward"}),
    "forward alone with float32 weights": Entry("value", MIXED, 1, {"head_forward"}),
    "general backward": Entry("general", {}, 4, {"head_forward_mean", "head_weight_gradient"}),
    "loss in one pass": Entry(
        "loss", {"workspace": 3072 * MIB}, 3, {"head_forward_mean_keep", "head_kept_weight_gradient"}
    ),
    "loss in one pass with float32 weights": Entry(
        "loss",
        MIXED | {"workspace": 640 * MIB},
        3,
        {"head_forward_mean_keep", "head_kept_weight_gradient"},
    ),
}
WITHOUT_WORKSPACE = Entry("loss", {"workspace": 0}, 4, {"head_forward_mean", "head_weight_gradient"})
WITH_ENTROPY = {
    "general backward": Entry(
        "general", {"entropy": True}, 6, {"head_forward_mean", "head_hidden_gradient", "head_weight_gradient"}
    ),
    "loss": Entry(
        "loss",
        {"entropy": True, "workspace": 0},
        5,
        {"head_forward", "head_hidden_gradient", "head_weight_gradient"},
    ),
}

# An orthogonal array of strength 2: any two of entry, vocabulary, features and chip meet in every combination. The loss
# without a workspace isn't in it: its kernels are those of the general backward.
PAIRWISE = [
    pytest.param(entry, VOCABULARIES[j], FEATURES[(i + j) % 5 % 4], CHIPS[(i + 2 * j) % 5 % 4], id=name)
    for i, (name, entry) in enumerate(ENTRIES.items())
    for j in range(5)
]


def compiled(mesh: Mesh, entry: Entry, **sizes: Any) -> jax.stages.Compiled:
    options = {"hidden": "bfloat16", "weight": "bfloat16", "impl": "mosaic_tpu"} | entry.options | sizes
    return targets.compiled(*getattr(head, entry.program)(mesh, **options), mesh)


def products(mesh: Mesh, entry: Entry, **sizes: Any) -> float:
    """Of all kernels, in those of tokens x vocabulary x features, by what the kernels say of themselves."""
    function, arguments = getattr(head, entry.program)(mesh, impl="mosaic_tpu", **entry.options, **sizes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = work.parts(function, arguments)
    assert found is not None
    return sum(part.flops for part in found) / (2 * sizes["tokens"] * sizes["vocabulary"] * sizes["features"])


@pytest.mark.parametrize(("entry", "vocabulary", "features", "chip"), PAIRWISE)
def test_it_compiles_to_its_kernels_and_takes_no_more_products_and_memory(
    entry: Entry, vocabulary: int, features: int, chip: str
) -> None:
    mesh = targets.mesh(chip)
    sizes = {"tokens": 8192, "vocabulary": vocabulary, "features": features}
    assert products(mesh, entry, **sizes) == entry.products
    program = compiled(mesh, entry, **sizes)
    assert kernels(program) == entry.kernels
    two_of_hidden_s_shape = 2 * 8192 * features * 2
    assert targets.memory(program)["temp"] <= entry.options.get("workspace", 0) + 64 * MIB + two_of_hidden_s_shape


@pytest.mark.parametrize(
    ("entry", "chip", "features"),
    [
        (WITH_ENTROPY["general backward"], "v5p", 3584),
        (WITH_ENTROPY["general backward"], "v6e", 2048),
        (WITH_ENTROPY["loss"], "v5e", 896),
        (WITH_ENTROPY["loss"], "tpu7x", 1536),
    ],
    ids=["general-v5p", "general-v6e", "loss-v5e", "loss-tpu7x"],
)
def test_a_slope_by_the_entropy_takes_the_kernel_of_the_hidden_states(entry: Entry, chip: str, features: int) -> None:
    mesh = targets.mesh(chip)
    sizes = {"tokens": 8192, "vocabulary": 151936, "features": features}
    assert products(mesh, entry, **sizes) == entry.products
    assert kernels(compiled(mesh, entry, **sizes)) == entry.kernels


@pytest.mark.parametrize(
    ("name", "chip", "features"),
    [("forward alone", "tpu7x", 2048), pytest.param("general backward", "v5e", 896, marks=pytest.mark.slow)],
    ids=["forward-tpu7x", "general-v5e"],
)
def test_float32_products_compile(name: str, chip: str, features: int) -> None:
    sizes = {"tokens": 8192, "vocabulary": 18992, "features": features}
    program = compiled(targets.mesh(chip), ENTRIES[name], **sizes, hidden="float32", weight="float32")
    assert kernels(program) == ENTRIES[name].kernels


def test_without_a_workspace_the_loss_takes_four_products() -> None:
    assert products(targets.mesh("v6e"), WITHOUT_WORKSPACE, tokens=8192, vocabulary=151936, features=2048) == 4


@pytest.mark.parametrize("tokens", [2048, 8192, *(pytest.param(n, marks=pytest.mark.slow) for n in (32768, 65536))])
def test_without_a_workspace_temporaries_are_64_mib_and_one_array_of_hidden_s_shape(tokens: int) -> None:
    program = compiled(targets.mesh("v6e"), WITHOUT_WORKSPACE, tokens=tokens, vocabulary=151936, features=2048)
    assert targets.memory(program)["temp"] <= 64 * MIB + 2 * tokens * 2048


# --- over eight chips, two along each of dp, fsdp and tp ---

SHARDED = {"tokens": 8192, "vocabulary": 151936, "features": 2048}
W = (151936 // 2, 2048)
"""What a device has of the weight in a pass."""
H = (8192 // 4, 2048)
"""What a device has of the hidden states."""


@pytest.mark.parametrize("target", ["v6e:2x4", "v5p:2x2x2"])
@pytest.mark.parametrize(
    "entry",
    [ENTRIES["general backward"], WITHOUT_WORKSPACE, ENTRIES["loss in one pass"]],
    ids=["general backward", "loss without a workspace", "loss in one pass"],
)
def test_over_eight_chips_weights_are_gathered_once_and_gradients_and_rows_sums_are_all_that_is_added_up(
    entry: Entry, target: str
) -> None:
    """The list is complete but for scalars. Three things in it are XLA's doing.

    It merges the gathers of forward and backward, where nothing else stands between them; it pads what is scattered,
    and exchanges a few rows for that; and it narrows to bfloat16, in which gradients are asked for, what is then summed
    over tp (dh) and over dp (dW).
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
