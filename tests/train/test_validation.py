"""Validation measures every learned token once, as full logits in float64 would, on any mesh."""

import jax
import numpy as np
import pytest
from tiny import ARCHITECTURE, config, forward_of

from mllm.algorithms.sft.algorithm import make_validation
from mllm.algorithms.sft.source import SftBatches
from mllm.data.batch import Batch
from mllm.data.tokenizing import Document, Documents
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.parallel.processes import RowShare

COUNT = 21
"""With 8 rows the last batch is incomplete, packed or not."""
RNG = np.random.default_rng(0)
MODEL = {"architecture": {**ARCHITECTURE, "initializer_range": 0.2}}


def settings(packing=True, **sections):
    return config("sft", micro_batch_size=4, data={"max_length": 24, "packing": packing}, model=MODEL, **sections)


@pytest.fixture(scope="module")
def expected():
    """The documents, half of whose labels are the model's likeliest, and their metrics from logits in float64."""
    one = settings()
    mesh = make_mesh(one.mesh)
    policy = load_policy(one, mesh)
    params, hidden_of = policy.initial_params(), jax.jit(forward_of(policy.graphdef, mesh, one).states)
    tokens = RNG.integers(0, 260, (COUNT, 20)).astype(np.int32)
    places = np.tile(np.arange(20, dtype=np.int32), (COUNT, 1))
    for place in range(1, 21):  # the last logits are those of the documents as they are
        batch = Batch(tokens, places, np.ones_like(tokens), tokens, np.ones(tokens.shape, np.float32))
        hidden, weight, _ = hidden_of(params, shard_batch(mesh, batch))
        logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
        if place < 20:
            tokens[:, place] = np.where(RNG.random(COUNT) < 0.5, logits[:, place - 1].argmax(-1), tokens[:, place])
    documents, logprobs, correct = [], [], []
    for ids, own in zip(tokens, logits, strict=True):
        length = int(RNG.integers(2, 20))
        learned = RNG.random(length) < 0.6
        learned[:2] = False, True
        documents.append(Document(ids[:length], learned))
        before = own[:length][np.flatnonzero(learned) - 1]
        of_label = np.take_along_axis(before, ids[:length][learned, None], 1)[:, 0]
        logprobs.extend(of_label - np.log(np.exp(before).sum(1)))
        correct.extend(of_label == before.max(1))
    loss = -np.mean(logprobs)
    metrics = {"loss": loss, "perplexity": np.exp(loss), "token_accuracy": np.mean(correct)}
    assert 0.3 < metrics["token_accuracy"] < 0.7
    sizes = [document.size for document in documents]
    listed = Documents(sizes, lambda indices: [documents[index] for index in indices])
    return listed, {f"validation/{name}": value for name, value in metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections", [{"packing": False}, pytest.param({"mesh": {"dp": 2, "fsdp": 2, "tp": 2}}, marks=pytest.mark.nightly)]
)
def test_it_is_the_mean_over_the_learned_tokens_of_all_documents(expected, sections):
    documents, metrics = expected
    one = settings(**sections)
    mesh = make_mesh(one.mesh)
    policy = load_policy(one, mesh)
    params = jax.device_put(policy.initial_params(), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    polls = []
    batches = SftBatches(one.data, documents, one.batch_size, share=RowShare.of_mesh(mesh))
    validate = make_validation(forward_of(policy.graphdef, mesh, one), batches.validate, lambda: polls.append(1))
    measured = validate(params, 0)
    assert measured.keys() == metrics.keys()
    for name, value in measured.items():
        np.testing.assert_allclose(value, metrics[name], rtol=2e-6, err_msg=name)
    assert validate(params, 7) == measured
    assert len(polls) == 2 * (2 if one.data.packing else 3)
