"""DPO's source of data: pairs of completions, or completions with a label, each with the reference's log-probabilities.

An example is two sequences. A pair's sequences are neighbours in one row, so that sums over a row's segments are all
that its loss needs, in any micro-batch; their common prompt is computed in each. A completion with a label stands
alone: the second sequence, its prompt with another example's completion, only serves to estimate KTO's z0 before the
update, in a batch of its own. The reference's log-probabilities are computed before training, at every start.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from mllm.algorithms.dpo.settings import DpoConfig
from mllm.algorithms.sft.source import BatchPlan, RowBatches, SftSource
from mllm.data.batch import Batch, Floats
from mllm.data.packing import add_sequence
from mllm.data.source import WAY_OUT, Fixed, Step
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.parallel.processes import local_rows, raise_everywhere
from mllm.stopwatch import Stopwatch
from mllm.training.algorithm import Parts
from mllm.training.step import logprobs_of

LogprobPass = Callable[[Params, Batch], Float[np.ndarray, "B T"]]
"""The log-probabilities of the labels in this process's rows under any parameters; all processes must call it."""


class PreferenceInputs(NamedTuple):
    """`Batch.inputs` of DPO and its kin, float32; an array that the loss doesn't need is None."""

    share: Float[Any, "B"]
    """1 over the number of examples in the whole batch, in every row."""
    reference_logprobs: Floats | None = None
    """At a sequence's first learned token its log-probability under the reference, in nats; 0 elsewhere."""
    labels: Floats | None = None
    """At a completion's first learned token 1 or -1, as it is labelled true or false; 0 elsewhere."""
    kl: Float[Any, "B"] | None = None
    """KTO's z0, in every row."""


class Preferences(NamedTuple):
    """The examples of an update, or of a part of a validation."""

    batch: Batch
    mismatched: Batch | None
    """The prompts of labelled completions, each with another example's completion; None: the examples are pairs."""


class PreferenceBatches(RowBatches[Preferences]):
    """Batches of preferences. Weights are 1 over the number of examples in the whole batch, at each learned token."""

    reference: Float[np.ndarray, "N 2"] | None = None
    """The reference's log-probabilities of all examples' sequences; None: they are not needed, or not yet known."""

    def make(self, plan: BatchPlan) -> Preferences:
        """This process's rows; a sequence's label and reference stand where its first learned token is predicted."""
        batch, local = self.empty(plan)
        examples = self.documents.read([index for index, _ in local])

        def fill(*parts: int) -> Batch:
            filled = Batch(*(np.copy(array) for array in batch[:5]))
            reference, labels = np.zeros((2, *batch.tokens.shape), np.float32)
            for (index, row), example in zip(local, examples, strict=True):
                for part in parts:
                    tokens, learned = example[part]
                    _, predicts = add_sequence(filled, row, tokens, learned, 1 / len(plan), len(tokens))
                    labels[row, predicts[0]] = 1 if example.desirable else -1
                    if self.reference is not None:
                        reference[row, predicts[0]] = self.reference[index, part]
            inputs = PreferenceInputs(
                np.full(len(batch.tokens), 1 / len(plan), np.float32),
                None if self.reference is None else reference,
                labels if self.documents.form == "labelled" else None,
            )
            return filled._replace(inputs=inputs)

        return Preferences(fill(0), fill(1)) if self.documents.form == "labelled" else Preferences(fill(0, 1), None)

    def compute_reference(self, params: Params, logprobs: LogprobPass) -> Float[np.ndarray, "N 2"]:
        """The log-probabilities of all sequences under these parameters; all processes must call it, and get the same.

        Each is summed in float64 and kept in float32.
        """
        reference = np.zeros((len(self.documents), 2), np.float32)
        with tqdm(desc="reference", total=len(reference), unit=" examples", delay=2, disable=None) as bar:
            for plan in self.plans_of_all():
                with raise_everywhere():
                    (batch, mismatched), (_, local) = self.make(plan), self.empty(plan)
                sums = row_sums(logprobs(params, batch), batch)
                if mismatched is not None:
                    mismatched_sums = row_sums(logprobs(params, mismatched), mismatched)
                    sums = [np.stack(pair, 1) for pair in zip(sums, mismatched_sums, strict=True)]
                queues = [iter(row.reshape(-1, 2)) for row in sums]
                part = [(int(index), next(queues[row]).tolist()) for index, row in local]
                for index, values in chain(*self.share.gather(part)):
                    reference[index] = values
                bar.update(len(plan))
        return reference


def row_sums(logprobs: Float[np.ndarray, "B T"], batch: Batch) -> list[Float[np.ndarray, " S"]]:
    """The sums over each row's sequences, in their order, in float64."""
    return [np.bincount(row, values)[1:] for row, values in zip(batch.segments, logprobs, strict=True)]


class PreferenceSource(SftSource):
    """A `mllm.data.source.Source` over batches of preferences."""

    kind = PreferenceBatches
    batches: PreferenceBatches
    checksum: str | None = None
    """The checksum of the reference's parameters; None: there is no reference."""

    def __init__(self, dpo: DpoConfig, parts: Parts) -> None:
        """UserError is raised as by `SftSource`."""
        self.form = dpo.form
        logprobs = logprobs_of(parts.forward)
        self.logprobs: LogprobPass = lambda params, batch: local_rows(logprobs(params, batch))
        super().__init__(parts)
        self.heldout: PreferenceBatches | None = None
        if self.validation is not None:
            size, config = self.batches.batch_size, self.batches.config
            self.heldout = PreferenceBatches(config, self.validation, size, share=self.rows)

    def set_reference(self, params: Params, checksum: str) -> None:
        """Compute the log-probabilities of these parameters, the reference, which is known by their `checksum`.

        All processes must call this before training.
        """
        self.checksum = checksum
        for batches in filter(None, (self.batches, self.heldout)):
            batches.reference = batches.compute_reference(params, self.logprobs)

    def next(self, params: Params, step: int, watch: Stopwatch, fixed: Fixed) -> Step:
        preferences, counts = self.read(watch)
        if preferences.mismatched is None:
            return self.step_of(preferences.batch, counts)
        with watch.phase("log-prob"):
            kl = self.estimate_kl(params, preferences.mismatched)
        return self.step_of(with_kl(preferences.batch, kl), {"kl": kl, **counts})

    def heldout_batches(self, params: Params) -> Iterator[Batch]:
        """The validation's batches for the policy's parameters."""
        assert self.heldout is not None
        for batch, mismatched in self.heldout.validate():
            yield batch if mismatched is None else with_kl(batch, self.estimate_kl(params, mismatched))

    def estimate_kl(self, params: Params, mismatched: Batch) -> float:
        """KTO's z0: the mean log-ratio of policy and reference over the whole batch's mismatched sequences, at least 0.

        The mean is over the whole update, whatever its micro-batches.
        """
        ratio = np.sum(self.logprobs(params, mismatched), dtype=np.float64)
        ratio -= np.sum(mismatched.inputs.reference_logprobs)
        local = float(ratio), int(mismatched.segments.max(1).sum())
        ratios, counts = zip(*self.rows.gather(local), strict=True)
        return max(0.0, sum(ratios) / sum(counts))

    def position(self) -> dict[str, Any]:
        return super().position() | ({} if self.checksum is None else {"reference": self.checksum})

    def seek(self, position: Mapping[str, Any]) -> None:
        if None not in (self.checksum, recorded := position.get("reference")) and self.checksum != recorded:
            raise UserError(f"model: the run began with another reference: {WAY_OUT}")
        super().seek(position)


def with_kl(batch: Batch, kl: float) -> Batch:
    """The batch with z0."""
    return batch._replace(inputs=batch.inputs._replace(kl=np.full(len(batch.tokens), kl, np.float32)))
