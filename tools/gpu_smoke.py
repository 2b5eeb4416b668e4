"""What this device is, and whether the head's kernels work on it at all: python -m tools.gpu_smoke

Lines of JSON: first the device and versions; then, from a small problem, the relative errors of loss and gradients of
`mosaic_gpu` beside full logits. A fault of the kernels shows by how the process ends. `tools/gpu.py` starts it.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp

from kernels.lm_head import token_loss
from kernels.lm_head.api import Impl
from tools import machine

SHAPE = (1000, 576, 5000)
"""Of N, D and V: off every tile, of more than one chunk and cluster."""
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "torch", "triton", "flax", "optax")


def about() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "capability": getattr(device, "compute_capability", None),
        "driver": machine.driver(),
        "runtime": device.client.platform_version.splitlines()[0],
        "versions": machine.versions(PACKAGES),
    }


def errors(impl: Impl = "mosaic_gpu") -> dict[str, float]:
    """The value alone, then loss and gradients: the largest difference to full logits over the largest magnitude."""
    tokens, features, vocabulary = SHAPE
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (vocabulary, features)) * features**-0.5).astype(jnp.bfloat16)
    labels = jax.random.randint(keys[2], (tokens,), 0, vocabulary)

    def run(impl: Impl) -> Any:
        def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
            return token_loss(hidden, weight, labels, lambda logprob, entropy: -logprob, impl=impl)[0]

        value = jax.jit(loss)(hidden, weight)
        both, (dh, dw) = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, weight)
        return {"value": value, "loss": both, "dh": dh, "dW": dw}

    def error(found: jax.Array, right: jax.Array) -> float:
        found, right = found.astype(jnp.float32), right.astype(jnp.float32)
        return float(jnp.abs(found - right).max() / jnp.abs(right).max())

    return jax.tree.map(error, run(impl), run("reference"))


def main() -> None:
    found = about()
    print(json.dumps(found), flush=True)
    if found["platform"] == "gpu":
        print(json.dumps(errors()), flush=True)


if __name__ == "__main__":
    main()
