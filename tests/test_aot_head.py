"""The head's Pallas kernels through the real TPU compiler, for TPUs that aren't there (`make aot` installs it).

Sizes are those of Qwen2.5, of 0.5B to 7B, at 8192 tokens, with the vocabulary whole and in shards over 2, 4 and 8
devices. That a program compiles shows that its tiles fit the chip. Temporaries are by the compiler's account of HBM.
Leaves out results, which strict interpretation checks on CPUs, and times, which only a TPU can tell.
"""

import importlib.util
import math
import re
from typing import Any, NamedTuple

import jax
import pytest
from jax.sharding import Mesh

from kernels.aot import head, listing, targets, work

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

    programme: str
    options: dict[str, Any]
    products: int
    kernels: set[str]


ENTRIES = {
    "forward alone": Entry("value", {}, 1, {"head_forward"}),
    "general backward": Entry("general", {}, 4, {"head_forward_mean", "head_weight_gradient"}),
    "loss without a workspace": Entry("loss", {"workspace": 0}, 4, {"head_forward_mean", "head_weight_gradient"}),
    "loss in one pass": Entry(
        "loss", {"workspace": 3072 * MIB}, 3, {"head_forward_mean_keep", "head_kept_weight_gradient"}
    ),
    "loss in one pass with float32 weights": Entry(
        "loss",
        {"workspace": 640 * MIB, "weight": "float32", "dtype": "bfloat16"},
        3,
        {"head_forward_mean_keep", "head_kept_weight_gradient"},
    ),
}
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

# An orthogonal array of strength 2: any two of entry, vocabulary, features and chip meet in every combination.
PAIRWISE = [
    pytest.param(entry, VOCABULARIES[j], FEATURES[(i + j) % 5 % 4], CHIPS[(i + 2 * j) % 5 % 4], id=name)
    for i, (name, entry) in enumerate(ENTRIES.items())
    for j in range(5)
]


def compiled(mesh: Mesh, entry: Entry, **sizes: Any) -> jax.stages.Compiled:
    options = {"hidden": "bfloat16", "weight": "bfloat16", "impl": "mosaic_tpu"} | entry.options | sizes
    return targets.compiled(*getattr(head, entry.programme)(mesh, **options), mesh)


def products(mesh: Mesh, entry: Entry, **sizes: Any) -> float:
    """Of all kernels, in those of tokens x vocabulary x features, by what the kernels say of themselves."""
    function, arguments = getattr(head, entry.programme)(mesh, impl="mosaic_tpu", **entry.options, **sizes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = work.parts(function, arguments)
    assert found is not None
    return sum(part.flops for part in found) / (2 * sizes["tokens"] * sizes["vocabulary"] * sizes["features"])


def kernels(program: jax.stages.Compiled) -> set[str]:
    """Names of the Pallas kernels in a compiled program."""
    calls = re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", program.as_text() or "")
    return {listing.own_name(name) for name in calls}


@pytest.mark.parametrize(("entry", "vocabulary", "features", "chip"), PAIRWISE)
def test_it_compiles_to_its_kernels_and_takes_no_more_products(
    entry: Entry, vocabulary: int, features: int, chip: str
) -> None:
    mesh = targets.mesh(chip)
    sizes = {"tokens": 8192, "vocabulary": vocabulary, "features": features}
    assert products(mesh, entry, **sizes) == entry.products
    program = compiled(mesh, entry, **sizes)
    assert kernels(program) == entry.kernels
    assert targets.memory(program)["temp"] <= entry.options.get("workspace", 0) + 64 * MIB + 2 * 8192 * features * 2


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


@pytest.mark.parametrize("tokens", [2048, 8192, 32768, 65536])
def test_without_a_workspace_temporaries_are_64_mib_and_one_array_of_hidden_s_shape(tokens: int) -> None:
    entry = ENTRIES["loss without a workspace"]
    program = compiled(targets.mesh("v6e"), entry, tokens=tokens, vocabulary=151936, features=2048)
    assert targets.memory(program)["temp"] <= 64 * MIB + 2 * tokens * 2048


# --- over eight chips ---

SHARDED = {"tokens": 8192, "vocabulary": 151936, "features": 2048}  # over (dp, fsdp), tp and fsdp, of two devices each
W, W_STORED, H = (75968, 2048), (75968, 1024), (2048, 2048)
"""What a device has: of W in a pass, of W as it is stored, of the hidden states."""


class Collective(NamedTuple):
    kind: str
    shapes: list[tuple[int, ...]]


def collectives(program: jax.stages.Compiled) -> list[Collective]:
    """Those in a compiled program with the shapes that come out; of asynchronous ones, the start."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
    lines = re.findall(rf"%\S+ = (.*?) ({kinds})(?:-start)?\(", program.as_text() or "")
    return [
        Collective(kind, [tuple(map(int, shape.split(","))) for shape in re.findall(r"\w\[([\d,]+)\]", result)])
        for result, kind in lines
    ]


@pytest.mark.parametrize("target", ["v6e:2x4", "v5p:2x2x2"])
@pytest.mark.parametrize("name", ["general backward", "loss without a workspace"])
def test_over_eight_chips_weights_are_gathered_once_a_pass_and_gradients_and_rows_sums_are_all_that_is_added_up(
    name: str, target: str
) -> None:
    mesh = targets.mesh(target, (2, 2, 2), ("dp", "fsdp", "tp"))
    program = compiled(mesh, ENTRIES[name], **SHARDED)
    assert kernels(program) == ENTRIES[name].kernels
    found = collectives(program)
    gathered = [shape for kind, shapes in found if kind == "all-gather" for shape in shapes if len(shape) > 1]
    passes = 2 if name == "general backward" else 1
    assert W in gathered
    assert len([shape for shape in gathered if shape == W]) <= passes
    assert set(gathered) <= {W, W_STORED}  # an asynchronous one names its operand, too
    added = [shape for kind, shapes in found if kind != "all-gather" for shape in shapes]
    assert {kind for kind, _ in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    whole = {shape for shape in added if math.prod(shape) > H[0]}  # else: one number a row at most
    assert whole <= {H, W, W_STORED}
    assert added.count(H) == 1
    assert W_STORED in added or W in added
