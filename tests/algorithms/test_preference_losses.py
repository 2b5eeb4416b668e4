"""The losses and metrics of preferences: against the papers' formulas in float64, and against TRL's trainers.

TRL's for DPO are stored in tests/fixtures/preferences.json; the formulas are written as loops over sequences.
"""

import json
import math
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import config as run_config
from tiny import load_weights, with_inputs

from mllm.algorithms.dpo.algorithm import validation_metrics
from mllm.algorithms.dpo.losses import pairs_of, preference_loss, preference_metrics
from mllm.algorithms.dpo.settings import DpoConfig
from mllm.algorithms.dpo.source import PreferenceBatches, PreferenceInputs
from mllm.algorithms.examples import make_validation
from mllm.algorithms.recipes import recipe_of
from mllm.config.data import DataConfig
from mllm.config.model import HeadConfig, MeshConfig
from mllm.config.run import BatchShape
from mllm.data.batch import Batch
from mllm.data.packing import add_sequence, empty_batch
from mllm.data.tokenizing import Document, Documents, Pair
from mllm.model import weights
from mllm.model.decoder import Decoder
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.training.head import Head
from mllm.training.step import Forward, accumulate, make_logprob_pass

FIXTURES = Path(__file__).parent.parent / "fixtures"
SETTINGS = {
    "sigmoid": {"beta": 0.3},
    "cDPO": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.2},
    "simpo": {"beta": 2.0, "gamma": 0.7},
    "orpo": {"beta": 0.6},
}


def config_of(name):
    return DpoConfig(loss_type="sigmoid" if name == "cDPO" else name, **SETTINGS[name])


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def formula(config, sequences):
    """The mean loss over examples in float64; a sequence is (log-probabilities, the reference's sum)."""

    def ratio(logprobs, reference):
        return sum(logprobs) - reference

    def mean(logprobs, *_):
        return sum(logprobs) / len(logprobs)

    def odds(sequence):
        return math.exp(mean(*sequence)) / (1 - math.exp(mean(*sequence)))

    beta, losses = config.beta, []
    for w, worse in zip(sequences[::2], sequences[1::2], strict=True):
        margin, smoothing = beta * (ratio(*w) - ratio(*worse)), config.label_smoothing
        match config.loss_type:
            case "sigmoid":
                loss = -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)
            case "ipo":
                loss = (ratio(*w) / len(w[0]) - ratio(*worse) / len(worse[0]) - 1 / (2 * beta)) ** 2
            case "simpo":
                loss = -log_sigmoid(beta * mean(*w) - beta * mean(*worse) - config.gamma)
            case "orpo":
                loss = -mean(*w) - beta * log_sigmoid(math.log(odds(w) / odds(worse)))
        losses.append(loss)
    return sum(losses) / len(losses)


def make_rows(config, seed=0):
    """A batch of rows of many sequences of odd lengths, one row of padding; the log-probabilities; the sequences.

    Of the sequences there are the places of their learned tokens, some with a given token between.
    """
    rng = np.random.default_rng(seed)
    shape = rows, length = 6, 41
    integers = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segments", "labels")}
    weights_, reference = np.zeros((2, *shape), np.float32)
    logprob, sequences = -rng.uniform(0.05, 3, shape), []
    for row in range(rows - 1):
        start, segment = 0, 0
        while start + 18 < length:
            for _ in range(2):
                prompt, learned = rng.integers(1, 4), rng.integers(1, 6)
                segment += 1
                integers["segments"][row, start : start + prompt + learned] = segment
                places = start + prompt - 1 + np.delete(np.arange(learned), [1] if learned > 3 else [])
                weights_[row, places] = 1.0
                if config.needs_reference:
                    reference[row, places[0]] = rng.normal(-2 * learned, 2)
                sequences.append((row, places))
                start += prompt + learned
    share = np.full(rows, 2 / len(sequences), np.float32)
    inputs = PreferenceInputs(share, reference)
    batch = Batch(**integers, weights=weights_ * share[0], inputs=inputs)
    return batch, logprob, sequences


def test_a_row_full_of_the_shortest_pairs_loses_none():
    batch = empty_batch((1, 8))
    for _ in range(4):
        add_sequence(batch, 0, np.array([5, 7]), np.array([False, True]), 1 / 2, 2)
    batch = batch._replace(inputs=PreferenceInputs(np.full(1, 1 / 2, np.float32)))
    chosen, rejected, present = pairs_of(jnp.where(batch.weights > 0, -1.0, 0.0), batch, per_token=False)
    assert present.sum() == -chosen.logprob.sum() == -rejected.logprob.sum() == 2


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_match_the_formula_in_micro_batches(name):
    config = config_of(name)
    batch, logprob, places = make_rows(config)

    def exact(logprob):
        references = [float(batch.inputs.reference_logprobs[row, at[0]]) for row, at in places]
        logprobs = [logprob[row, at].tolist() for row, at in places]
        return formula(config, list(zip(logprobs, references, strict=True)))

    expected = np.zeros_like(logprob)
    for row, at in places:
        step = np.zeros_like(logprob)
        step[row, at[0]] = 1e-6
        expected[row, at] = (exact(logprob + step) - exact(logprob - step)) / 2e-6
    compute = jax.jit(jax.value_and_grad(lambda logprob, batch: preference_loss(config, logprob, batch)))
    for rows in (6, 2):
        parts = [slice(start, None, 6 // rows) for start in range(6 // rows)]
        results = [compute(jnp.float32(logprob[p]), jax.tree.map(lambda x, p=p: x[p], batch)) for p in parts]
        np.testing.assert_allclose(sum(loss for loss, _ in results), exact(logprob), rtol=2e-6)
        for part, (_, gradient) in zip(parts, results, strict=True):
            np.testing.assert_allclose(gradient, expected[part], rtol=1e-4, atol=1e-6 * np.abs(expected).max())


def test_a_certain_completion_has_a_finite_gradient():
    """At the first step policy and reference are equal, and so are the ratios of chosen and rejected completions."""
    config = config_of("orpo")
    batch, logprob, _ = make_rows(config)
    certain = jnp.zeros(logprob.shape)
    gradient = jax.jit(jax.grad(lambda logprob: preference_loss(config, logprob, batch)))(certain)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0
    assert preference_metrics(config, certain, batch)["rewards/accuracies"] == 0.5
    config = config_of("sigmoid")
    batch, _, sequences = make_rows(config)
    reference = np.zeros(logprob.shape, np.float32)
    equal = with_inputs(batch, reference_logprobs=reference)
    assert preference_metrics(config, certain, equal)["rewards/accuracies"] == 0.5
    for row, at in sequences:
        reference[row, at[0]] = logprob[row, at].sum()
    close = with_inputs(batch, reference_logprobs=reference)
    for scale, tied in ((1e-7, True), (1e-3, False)):  # by rounding alone, and by more
        noisy = jnp.float32(logprob * (1 + scale * np.random.default_rng(1).normal(size=logprob.shape)))
        assert (preference_metrics(config, noisy, close)["rewards/accuracies"] == 0.5) == tied


@cache
def measured_by_trl():
    return json.loads((FIXTURES / "preferences.json").read_text())


def sequence(prompt, completion):
    tokens = np.array([*prompt, *completion], np.int32)
    return Document(tokens, np.arange(len(tokens)) >= len(prompt))


def documents():
    """TRL's examples."""
    given, end = measured_by_trl(), [measured_by_trl()["end"]]
    pairs = [[sequence(one["prompt"], one[part] + end) for part in ("chosen", "rejected")] for one in given["examples"]]
    examples = [Pair(*pair) for pair in pairs]
    sizes = np.array([one.size for one in examples], np.int32)
    return Documents(sizes, np.zeros(len(sizes), np.uint64), lambda at: [examples[i] for i in at], "trl's")


def make_forward(config):
    """The fixture's model. Three of six rows have a sequence, and a micro-batch has two rows."""
    mesh, rows = make_mesh(MeshConfig(fsdp=1)), BatchShape(length=24, micro=2, total=6, shards=1)
    graphdef, _ = nnx.split(Decoder.abstract(weights.read_config(FIXTURES / "tied"), dtype=jnp.float32))
    settings = {"task": None, "rollout": None, "eval": None, "dpo": config.model_dump(exclude_defaults=True)}
    recipe = recipe_of(run_config("dpo", data={"source": "a.jsonl", "max_length": 24}, **settings))
    return Forward(graphdef, mesh, Head(HeadConfig(), mesh), rows, recipe.loss, recipe.metrics)


@pytest.mark.slow
def test_losses_gradients_and_metrics_are_trl_s():
    """All of it: packed rows, the reference's pass over them, and the loss with its gradient in micro-batches."""
    trl = measured_by_trl()["trl"]["sigmoid"]
    config = DpoConfig(beta=trl["settings"]["beta"])
    batches = PreferenceBatches(DataConfig(source="a.jsonl", max_length=24), documents(), 6)
    forward, params = make_forward(config), load_weights(FIXTURES / "tied")
    compute = make_logprob_pass(forward)

    def logprobs(params, batch):
        return np.asarray(compute(params, batch._replace(inputs=None)))

    reference = jax.tree.map(lambda x: x, params)
    reference["norm"][...] = params["norm"][...] * measured_by_trl()["reference"]
    batches.reference = batches.compute_reference(reference, logprobs)
    (batch,) = batches.validate()
    assert np.count_nonzero(batch.segments.any(1)) > 2  # so that there are two micro-batches
    batch = shard_batch(forward.mesh, batch)
    loss, outputs, gradient = jax.jit(lambda *a: accumulate(forward.loss, *a, 2))(params, batch)
    metrics = forward.metrics(batch, outputs)
    np.testing.assert_allclose(loss, trl["loss"], rtol=1e-5)
    np.testing.assert_allclose(optax.tree.norm(gradient), trl["grad_norm"], rtol=1e-5)
    for metric, value in trl["metrics"].items():
        np.testing.assert_allclose(metrics[metric], value, rtol=1e-5, atol=1e-5, err_msg=metric)


@pytest.mark.slow
def test_validation_is_a_mean_over_examples_in_any_batches():
    """A validation may be interrupted between its batches."""
    config, metrics, polled = DpoConfig(loss_type="simpo"), [], []
    for rows in (6, 2):
        made = PreferenceBatches(DataConfig(source="a.jsonl", max_length=24), documents(), rows)
        batches = [*made.validate()]
        poll = partial(polled.append, rows)
        of_batch = partial(validation_metrics, config)
        validate = make_validation(of_batch, make_forward(config), lambda given=batches: given, poll)
        metrics.append(validate(load_weights(FIXTURES / "tied"), 0))
        assert polled.count(rows) == len(batches)
    assert len({np.max(batch.weights) for batch in batches}) > 1  # which hold different numbers of examples
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)
