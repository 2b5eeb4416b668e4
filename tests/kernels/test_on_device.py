"""The head on a TPU or a Hopper GPU against float64: its kernels, and the xla engine.

    JAX_PLATFORMS=tpu python -m pytest -m tpu tests/kernels/test_on_device.py
    JAX_PLATFORMS=cuda python -m pytest -m gpu tests/kernels/test_on_device.py

`make device` runs them; most of the time is compiling. On an H200 every test has passed.

Shapes are off every tile. Only a device can show a race: so the same call must give the same bits again and
again. Left out: programs that tests on a CPU compile or interpret.
"""

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OBJECTIVES, SCALES, Problem, check, check_loss, loss_and_gradients, random_cotangents, random_problem

from lm_head import target  # noqa: F401  in the condition below
from lm_head.gpu import tiles as gpu_tiles
from lm_head.gpu.tiles import Sizes, Tiles
from lm_head.tpu import tiles as tpu_tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.tpu,
    pytest.mark.skipif(
        "jax.default_backend() != 'tpu' and target.why_not_hopper() is not None", reason="needs a TPU or a Hopper GPU"
    ),
]
BONUS, CROSS_ENTROPY = OBJECTIVES["entropy bonus"], OBJECTIVES["cross-entropy"]
BF16 = jnp.bfloat16


def kernels() -> str:
    """The engine of this device's kernels."""
    return f"mosaic_{jax.default_backend()}"


@pytest.mark.parametrize("softmax", SCALES)
@pytest.mark.parametrize("impl", ["the kernels", "xla"])
def test_values_and_gradients_match_float64(impl: str, softmax: str) -> None:
    impl, live = kernels() if impl == "the kernels" else impl, np.random.default_rng(5).random(300) < 0.3
    problem = random_problem((300, 712, 192), SCALES[softmax], BF16)
    check(problem, random_cotangents(300), impl=impl, live=live)
    check_loss(problem, BONUS, cases.sparse_weights(300), impl=impl, workspace=0)


@pytest.mark.parametrize("workspace", [0, 1_000_000, 2_000_000, None], ids=["none", "columns", "waves", "all"])
def test_every_workspace_matches_float64(workspace: int | None) -> None:
    """Room for nothing, for some columns, for some rows and a float32 sum of dW, and for all logits."""
    problem = random_problem((600, 1400, 192), dtype=BF16)
    small: Any = tpu_tiles.override(rows=128, columns=256, step=128)
    if jax.default_backend() == "gpu":
        small = gpu_tiles.override(Sizes(Tiles(), 512, wave_rows=(0, 0)))
    with small:
        check_loss(problem, CROSS_ENTROPY, cases.sparse_weights(600), impl=kernels(), workspace=workspace)


# --- races, and the size that counts


def off(values: jax.Array, right: jax.Array) -> jax.Array:
    values, right = values.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.abs(values - right).max() / jnp.abs(right).max()


@pytest.mark.parametrize("workspace", [0, 640 << 20], ids=["no workspace", "workspace"])
def test_results_at_qwens_size_match_xla_and_repeat(workspace: int) -> None:
    """Half of the rows have the entropy's gradient alone: elsewhere the label's part hides the other parts."""
    tokens, features, vocabulary = 8192, 2048, 151936
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, features), BF16)
    weight = jax.random.normal(keys[1], (vocabulary, features), BF16) * BF16(features**-0.5)
    problem = Problem(hidden, weight, jax.random.randint(keys[2], (tokens,), 0, vocabulary))
    learned = jnp.arange(tokens) % 2 == 0
    given = problem, lambda logprob, entropy, learned: -learned * logprob - 0.01 * entropy, [jnp.float32(learned)]
    loss, rows = first = loss_and_gradients(*given, impl=kernels(), workspace=workspace)
    for _ in range(20):
        again = loss_and_gradients(*given, impl=kernels(), workspace=workspace)
        assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, again, first)))
    right_loss, right = loss_and_gradients(*given, impl="xla", workspace=0)
    assert max(map(off, (loss, *rows[:3]), (right_loss, *right[:3]))) <= 1e-4
    hit = jnp.zeros(vocabulary, bool).at[jnp.where(learned, problem.labels, vocabulary)].set(True, mode="drop")
    for x, y, labelled in ((rows.hidden, right.hidden, learned), (rows.weight, right.weight, hit)):
        for chosen in (labelled, ~labelled):
            assert off(*(jnp.where(chosen[:, None], one, 0) for one in (x, y))) <= 0.02
