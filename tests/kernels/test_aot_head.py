"""The head's TPU kernels through the real TPU compiler, for TPUs that aren't there (`make aot` installs it).

The sizes are of models of 135M to 70B parameters, at 8192 tokens. The vocabulary is whole, odd, or sharded over
devices. By default each kernel is compiled once; `-m "aot and slow"` adds every way on every chip. That a program
compiles shows that its tiles fit the chip. Temporaries are by the compiler's account of HBM.

Left out: results, which strict interpreters check on CPUs; matrix products, which test_work.py counts; and times.
"""

from typing import Any

import head_programs as head
import jax
import pytest
from compiled_program import FOR_TPUS, kernels

from mllm.plan import targets

pytestmark = FOR_TPUS
MIB = 2**20
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
FEATURES = (576, 896, 1536, 2048, 2560, 3584, 4096, 5120, 8192)
VOCABULARIES = (32000, 50257, 128256, 151936, 152064, 262144, 75968, 32003, 18992)
NARROW = {"tokens": 1000, "vocabulary": 49152, "features": 576}
MIXED = {"weight": "float32", "dtype": "bfloat16"}
FLOAT32 = {"hidden": "float32", "weight": "float32"}
IN_TWO_PASSES = {"head_forward_mean", "head_weight_gradient"}
IN_ONE_PASS = {"head_forward_mean_keep", "head_kept_weight_gradient"}
BACKWARD = {"head_hidden_gradient", "head_weight_gradient"}
ENTRIES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("value", {}, {"head_forward"}),
    ("value", MIXED, {"head_forward"}),
    ("general", {}, IN_TWO_PASSES),
    ("loss", {"workspace": 5120 * MIB}, IN_ONE_PASS),
    ("loss", MIXED | {"workspace": 640 * MIB}, IN_ONE_PASS),
    ("general", {"entropy": True}, {"head_forward_mean", *BACKWARD}),
    ("loss", {"entropy": True, "workspace": 0}, {"head_forward", *BACKWARD}),
    ("value", FLOAT32, {"head_forward"}),
    ("general", FLOAT32, IN_TWO_PASSES),
]
"""Ways to call the head, and the kernels that each should compile to."""
DAILY = (ENTRIES[0], ENTRIES[3], ENTRIES[5])
"""The ways that have all kernels between them."""
slow = pytest.mark.slow

# Every entry with every size of hidden states. By default three entries run with one size. Chips and vocabularies
# take turns. float32 products are for small models.
CASES = [
    pytest.param(
        *entry,
        VOCABULARIES[(2 * i + j) % 9],
        features,
        "v5e" if entry is ENTRIES[4] else CHIPS[(i + 2 * j) % 4],  # a v6e takes no small waves
        marks=[slow] * (i != j or entry not in DAILY),
    )
    for i, entry in enumerate(ENTRIES)
    for j, features in enumerate(reversed(FEATURES))
    if features <= 2048 or entry[1] is not FLOAT32
]
# Gemma 3 270M and 1B
CASES += [pytest.param(*ENTRIES[4][:2], IN_TWO_PASSES, 262144, features, "v6e", marks=slow) for features in (640, 1152)]


def compiled(chip: str, program: str, **options: Any) -> jax.stages.Compiled:
    mesh = targets.mesh(chip)
    return targets.compiled(*getattr(head, program)(mesh, impl="mosaic_tpu", **options), mesh)


@pytest.mark.parametrize(("program", "options", "names", "vocabulary", "features", "chip"), CASES)
def test_a_program_compiles_to_its_kernels_within_its_memory(program, options, names, vocabulary, features, chip):
    executable = compiled(chip, program, vocabulary=vocabulary, features=features, **options)
    assert kernels(executable) == names
    two_of_hidden_s_shape = 2 * 8192 * features * (4 if "hidden" in options else 2)
    temporaries = options.get("workspace", 0) + 64 * MIB + two_of_hidden_s_shape
    if features % 128:  # XLA keeps such arrays transposed, without padding, and copies the weight to gather rows of it
        temporaries += vocabulary * -(-features // 128) * 128 * (4 if options.get("weight") else 2)
    assert targets.memory(executable).temporaries <= temporaries


@pytest.mark.parametrize(
    ("program", "options", "most"),
    [
        # 64 MiB and hidden's shape are less than the weight, padded from 576 to 640 columns, and its gradient.
        pytest.param("general", NARROW, 64 * MIB + 2 * 1000 * 576, marks=slow),
        ("loss", {**NARROW, "workspace": 0}, 64 * MIB + 2 * 1000 * 576),
        ("loss", {"workspace": 0}, 34.5 * MIB),  # as the README says
    ],
)
def test_no_workspace_takes_the_documented_temporaries(program, options, most):
    assert targets.memory(compiled("v6e", program, **options)).temporaries <= most
