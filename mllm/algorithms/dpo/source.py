"""DPO's source of data: pairs of completions, each with the reference's log-probability.

A pair's sequences are neighbours in one row, so its loss needs only sums over a row's segments, in any micro-batch. The
common prompt is computed twice. The reference's log-probabilities are computed before training, at every start.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from mllm.algorithms.dpo.settings import DpoRun
from mllm.algorithms.examples import ExampleSource, Validation
from mllm.algorithms.rows import BatchPlan, RowBatches
from mllm.data.batch import Batch, Floats
from mllm.data.packing import add_sequence
from mllm.data.source import WAY_OUT
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.parallel.processes import local_rows, raise_everywhere
from mllm.training.recipe import Parts
from mllm.training.step import logprobs_of

LogprobPass = Callable[[Params, Batch], Float[np.ndarray, "B T"]]
"""The log-probabilities of the labels in this process's rows under any parameters; all processes must call it."""


class PreferenceInputs(NamedTuple):
    """`Batch.inputs` of DPO and its kin, float32."""

    share: Float[Any, "B"]
    """1 over the number of pairs in the whole batch, in every row."""
    reference_logprobs: Floats | None = None
    """At a sequence's first learned token its log-probability under the reference, in nats; 0 elsewhere. None: the loss
    has no reference."""


class PreferenceBatches(RowBatches):
    """Batches of pairs. Weights are 1 over the number of pairs in the whole batch, at each learned token."""

    reference: Float[np.ndarray, "N 2"] | None = None
    """The reference's log-probabilities of all pairs' sequences; None: they are not needed, or not yet known."""

    def make(self, plan: BatchPlan) -> Batch:
        """This process's rows; a sequence's reference stands where its first learned token is predicted."""
        batch, local = self.empty(plan)
        reference = np.zeros(batch.tokens.shape, np.float32)
        pairs = self.documents.read([index for index, _ in local])
        for (index, row), pair in zip(local, pairs, strict=True):
            for part, (tokens, counts) in enumerate(pair):
                _, predicts = add_sequence(batch, row, tokens, counts, 1 / len(plan), len(tokens))
                if self.reference is not None:
                    reference[row, predicts[0]] = self.reference[index, part]
        share = np.full(len(batch.tokens), 1 / len(plan), np.float32)
        return batch._replace(inputs=PreferenceInputs(share, None if self.reference is None else reference))

    def compute_reference(self, params: Params, logprobs: LogprobPass) -> Float[np.ndarray, "N 2"]:
        """The log-probabilities of all sequences under these parameters; all processes must call it, and get the same.

        Each is summed in float64 and kept in float32.
        """
        reference = np.zeros((len(self.documents), 2), np.float32)
        with tqdm(desc="reference", total=len(reference), unit=" examples", delay=2, disable=None) as bar:
            for plan in self.plans_of_all():
                with raise_everywhere():
                    batch, (_, local) = self.make(plan), self.empty(plan)
                sums = row_sums(logprobs(params, batch), batch)
                queues = [iter(row.reshape(-1, 2)) for row in sums]
                part = [(int(index), next(queues[row]).tolist()) for index, row in local]
                for index, values in chain(*self.share.gather(part)):
                    reference[index] = values
                bar.update(len(plan))
        return reference


def row_sums(logprobs: Float[np.ndarray, "B T"], batch: Batch) -> list[Float[np.ndarray, " S"]]:
    """The sums over each row's sequences, in their order, in float64."""
    return [np.bincount(row, values)[1:] for row, values in zip(batch.segments, logprobs, strict=True)]


class PreferenceSource(ExampleSource[PreferenceBatches]):
    """A `mllm.data.source.ReferencedSource` over batches of pairs."""

    def __init__(self, config: DpoRun, parts: Parts, validation: Validation) -> None:
        """UserError is raised as by `ExampleSource`."""
        super().__init__(config, parts, PreferenceBatches, validation, pairs=True)
        logprobs = logprobs_of(parts.forward)
        self.logprobs: LogprobPass = lambda params, batch: local_rows(logprobs(params, batch))
        self.checksum: str | None = None
        """The checksum of the reference's parameters; None: there is no reference."""

    def set_reference(self, params: Params, checksum: str) -> None:
        """Compute the log-probabilities of these parameters, the reference, which is known by their `checksum`.

        All processes must call this before training.
        """
        self.checksum = checksum
        for batches in filter(None, (self.batches, self.heldout)):
            batches.reference = batches.compute_reference(params, self.logprobs)

    def position(self) -> dict[str, Any]:
        return super().position() | ({} if self.checksum is None else {"reference": self.checksum})

    def seek(self, position: Mapping[str, Any]) -> None:
        if None not in (self.checksum, recorded := position.get("reference")) and self.checksum != recorded:
            raise UserError(f"model: the run began with another reference: {WAY_OUT}")
        super().seek(position)
