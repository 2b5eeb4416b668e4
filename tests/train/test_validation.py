"""Validation measures every learned token once, as full logits in float64 would, on any mesh."""

import jax
import numpy as np
import pytest
from tiny import ARCHITECTURE, config, make_forward

from mllm.data.batch import Batch
from mllm.data.documents import Documents, Size
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.train.validation import make_validation

COUNT = 21
"""With 8 rows the last batch is incomplete, packed or not."""
RNG = np.random.default_rng(0)
MODEL = {"architecture": {**ARCHITECTURE, "initializer_range": 0.2}}


class Listed(Documents):
    def __init__(self, documents):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def size(self, index):
        return Size(len(self[index]), int(self[index][:, 2].sum()))

    def read(self, indices):
        return [self.documents[index] for index in indices]


def settings(packing=True, **sections):
    return config("sft", micro_batch_size=4, data={"max_length": 24, "packing": packing}, model=MODEL, **sections)


@pytest.fixture(scope="module")
def expected():
    """The documents, half of whose labels are the model's likeliest, and their metrics from logits in float64."""
    one = settings()
    mesh = make_mesh(one.mesh)
    policy = load_policy(one, mesh)
    params, hidden_of = policy.initial_params(), jax.jit(make_forward(one, policy.graphdef, mesh).hidden)
    documents, logprobs, correct = [], [], []
    for _ in range(COUNT):
        length = int(RNG.integers(2, 20))
        tokens, learned = RNG.integers(0, 260, (1, 20)), RNG.random(length) < 0.6
        places = np.arange(20)[None]
        row = Batch(*(x.astype(np.int32) for x in (tokens, places, places < length, tokens)), np.ones((1, 20), "f"))
        hidden, weight = hidden_of(params, shard_batch(mesh, row))
        logits = np.asarray(hidden[0, :length], np.float64) @ np.asarray(weight, np.float64).T
        labels = np.where(RNG.random(length) < 0.5, logits.argmax(1), RNG.integers(0, 260, length))
        learned[0] = True
        documents.append(np.stack([tokens[0, :length], labels, learned], 1).astype(np.int32))
        of_label = logits[np.arange(length), labels]
        logprobs.extend((of_label - np.log(np.exp(logits).sum(1)))[learned])
        correct.extend((of_label == logits.max(1))[learned])
    loss = -np.mean(logprobs)
    metrics = {"loss": loss, "perplexity": np.exp(loss), "token_accuracy": np.mean(correct)}
    assert 0.3 < metrics["token_accuracy"] < 0.7
    return Listed(documents), {f"validation/{name}": value for name, value in metrics.items()}


@pytest.mark.parametrize("sections", [{}, {"packing": False}, {"mesh": {"dp": 2, "fsdp": 2, "tp": 2}}])
def test_it_is_the_mean_over_the_learned_tokens_of_all_documents(expected, sections):
    documents, metrics = expected
    one = settings(**sections)
    mesh = make_mesh(one.mesh)
    policy = load_policy(one, mesh)
    params = jax.device_put(policy.initial_params(), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    polls = []
    validate = make_validation(
        one.data, one.batch_size, documents, make_forward(one, policy.graphdef, mesh), lambda: polls.append(1)
    )
    measured = validate(params, 0)
    assert measured.keys() == metrics.keys()
    for name, value in measured.items():
        np.testing.assert_allclose(value, metrics[name], rtol=2e-6, err_msg=name)
    assert validate(params, 7) == measured
    assert len(polls) == 2 * (2 if one.data.packing else 3)
