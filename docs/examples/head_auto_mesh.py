"""The head on a mesh of four devices with Auto axes: `HeadSharding` says the layout.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python docs/examples/head_auto_mesh.py
"""

import jax
from jax.sharding import AxisType

from lm_head import HeadSharding, token_loss

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
sharding = HeadSharding(mesh, tokens=("data",), vocabulary="model", features="data")
hidden = jax.random.normal(jax.random.key(0), (8, 16, 64))
weight = jax.random.normal(jax.random.key(1), (1000, 64)) / 8
labels = jax.random.randint(jax.random.key(2), (8, 16), 0, 1000)


@jax.jit
def step(hidden, weight):
    def loss(h, w):
        return token_loss(h, w, labels, lambda logprob, entropy: -logprob, sharding=sharding)[0]

    return jax.value_and_grad(loss, (0, 1))(hidden, weight)


loss, (dh, dw) = step(hidden, weight)
