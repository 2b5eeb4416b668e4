"""What the Pallas TPU kernels can't do is a ValueError that names the argument, before anything is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from strict_tpu import strict_interpreter

from kernels.lm_head import TokenLogprobs, token_logprobs

LABELS = jnp.zeros(8, jnp.int32)
V6E = AbstractMesh(
    (1,), ("chip",), (AxisType.Auto,), abstract_device=AbstractDevice("TPU v6 lite", num_cores=1, platform="tpu")
)


def outputs(hidden: Any, weight: Any) -> TokenLogprobs:
    return token_logprobs(hidden, weight, LABELS, impl="mosaic_tpu")


def test_a_cpu_without_the_interpreter_is_refused() -> None:
    with pytest.raises(ValueError, match="CPU"):
        outputs(jnp.zeros((8, 128)), jnp.zeros((256, 128)))


@pytest.mark.parametrize("argument", ["hidden", "weight"])
def test_float16_is_refused(argument: str) -> None:
    arrays = {"hidden": jnp.zeros((8, 128)), "weight": jnp.zeros((256, 128))}
    arrays[argument] = arrays[argument].astype(jnp.float16)
    with strict_interpreter(), pytest.raises(ValueError, match=f"{argument} is float16"):
        outputs(**arrays)


def test_features_that_fit_no_tile_are_refused_and_the_largest_term_is_named() -> None:
    arguments = [jax.ShapeDtypeStruct((n, 1 << 22), jnp.float32) for n in (8, 256)]
    with jax.sharding.use_abstract_mesh(V6E), pytest.raises(ValueError, match=r"MiB of VMEM, \d+ of them for its \w+"):
        jax.eval_shape(outputs, *arguments)
