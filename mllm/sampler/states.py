"""The states of delta nets of the sequences that are decoded, one a slot, and which sequence has which.

A state stands for all tokens of its sequence but the last, as the sequence's pages do. A state is as large as the keys
and values of many tokens. So there is one array of states, and decode steps change it in place. A sequence keeps its
slot while its turn is answered. No token can be taken back from a state. If a stop text ends before the last decoded
token, the sequence is prefilled once more.
"""

from functools import partial

import jax
import numpy as np
from jaxtyping import Int

from mllm.model.decoder import Decoder
from mllm.model.delta_net import DeltaState, empty_state
from mllm.model.layout import Layout
from mllm.sampler.decoding import STATE_AXES, States
from mllm.sampler.slots import on_devices, put_rows, take_rows, zeros


def abstract_states(model: Decoder, rows: int) -> States:
    """The shapes, dtypes and, with a layout, shardings of the states of so many sequences; empty without delta nets."""
    config, layout = model.config, model.layout
    if not (layers := config.layers_of("delta")):
        return ()
    spec = jax.eval_shape(partial(empty_state, rows, config.delta_net, model.dtype))
    if layout is not None:
        spec = DeltaState(*(layout.abstract(x.shape, x.dtype, axes) for x, axes in zip(spec, STATE_AXES, strict=True)))
    return (spec,) * len(layers)


class SlotStates:
    """The states of all slots, on the devices. Arrays [X, ...] have all shards."""

    def __init__(self, model: Decoder) -> None:
        """No slots yet."""
        self.model, self.layout = model, model.layout
        self.used = bool(abstract_states(model, 1))
        """Whether the model has delta nets."""
        self.sequences = np.full((1 if self.layout is None else self.layout.row_shards, 0), -1)
        """The sequence of each slot's state, -1 for none."""
        self.layers: list[DeltaState] = []

    def arrange(self, sequences: Int[np.ndarray, "X B"]) -> None:
        """Move these sequences' states into the slots, -1 for an empty slot; a new sequence's state is undefined."""
        if not self.used:
            return
        slots = self.slots_of(sequences)
        unmoved = np.arange(sequences.shape[1])
        # A slot without a sequence may have any state.
        sources = np.where(slots < self.sequences.shape[1], slots, np.minimum(unmoved, self.sequences.shape[1] - 1))
        moved = sequences.shape != self.sequences.shape or (sources != unmoved).any()
        self.sequences = sequences
        if not self.layers:
            self.layers = [*zeros(abstract_states(self.model, sequences.size))()]
        elif moved:
            placed = on_devices(self.layout, sources)
            for index, states in enumerate(self.layers):  # one at a time: no second copy of every layer is held
                self.layers[index] = move(states, placed, layout=self.layout)

    def insert(self, prompts: States, sources: Int[np.ndarray, "X M"], sequences: Int[np.ndarray, "X M"]) -> None:
        """Copy the states of the prompts in the rows `sources` to these sequences; -1 is none."""
        placed = on_devices(self.layout, (sources, self.slots_of(sequences)))
        for index, states in enumerate(prompts):
            self.layers[index] = enter(self.layers[index], states, *placed, layout=self.layout)

    def slots_of(self, sequences: Int[np.ndarray, "X M"]) -> Int[np.ndarray, "X M"]:
        """The slot of each of these sequences; the number of slots stands for none."""
        slots = np.full(sequences.shape, self.sequences.shape[1])
        for shard, (row, wanted) in enumerate(zip(self.sequences.tolist(), sequences.tolist(), strict=True)):
            slot_of = {sequence: index for index, sequence in enumerate(row) if sequence >= 0}
            slots[shard] = [slot_of.get(sequence, len(row)) for sequence in wanted]
        return slots


@partial(jax.jit, static_argnames="layout")
def move(states: DeltaState, sources: Int[jax.Array, " B"], *, layout: Layout | None) -> DeltaState:
    """Each device's states of these slots."""
    return take_rows(layout, states, sources)


@partial(jax.jit, static_argnames="layout", donate_argnums=0)
def enter(
    states: DeltaState,
    prompts: DeltaState,
    sources: Int[jax.Array, " M"],
    slots: Int[jax.Array, " M"],
    *,
    layout: Layout | None,
) -> DeltaState:
    """The states with each device's prompts of the rows `sources` in these slots; beyond the last is none."""
    return put_rows(layout, states, take_rows(layout, prompts, sources), slots)
