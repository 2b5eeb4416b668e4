"""The head on a mesh of four devices with Explicit axes: types say the layout.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python docs/examples/head_mesh.py
"""

import jax
from jax.sharding import PartitionSpec as P

from lm_head import token_loss

mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
with jax.set_mesh(mesh):
    hidden = jax.device_put(jax.random.normal(jax.random.key(0), (8, 16, 64)), P("data"))
    weight = jax.device_put(jax.random.normal(jax.random.key(1), (1000, 64)) / 8, P("model"))  # or P("data"), ...
    labels = jax.device_put(jax.random.randint(jax.random.key(2), (8, 16), 0, 1000), P("data"))


@jax.jit
def step(hidden, weight, labels):
    def loss(hidden, weight):
        return token_loss(hidden, weight, labels, lambda logprob, entropy: -logprob)[0]

    return jax.value_and_grad(loss, (0, 1))(hidden, weight)


with jax.set_mesh(mesh):
    loss, (dh, dw) = step(hidden, weight, labels)
assert dh.sharding.spec == P("data", None, None)
assert dw.sharding.spec == P("model", None)
