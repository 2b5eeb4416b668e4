"""The head in a Flax NNX model: python docs/examples/head_nnx.py"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lm_head import token_loss


class Model(nnx.Module):
    def __init__(self, vocabulary, features, rngs):
        self.embed = nnx.Embed(vocabulary, features, rngs=rngs)
        self.layer = nnx.Linear(features, features, rngs=rngs)
        self.head = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (vocabulary, features)))

    def __call__(self, tokens):  # the hidden states; the head takes it from here
        return jax.nn.gelu(self.layer(self.embed(tokens)))


def loss_fn(model, inputs, labels):
    weights = jnp.full(labels.shape, 1 / labels.size)
    loss, _ = token_loss(model(inputs), model.head[...], labels, lambda logprob, entropy: -logprob, weights=weights)
    return loss


@nnx.jit
def step(model, optimizer, inputs, labels):
    loss, grads = nnx.value_and_grad(loss_fn)(model, inputs, labels)
    optimizer.update(model, grads)
    return loss


model = Model(1000, 64, nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
inputs, labels = jax.random.randint(jax.random.key(1), (2, 8, 16), 0, 1000)
losses = [step(model, optimizer, inputs, labels) for _ in range(5)]
assert losses[-1] < losses[0]
