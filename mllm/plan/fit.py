"""Chooses the rows of a micro-batch by the available memory, if the configuration leaves them open.

The update is compiled with the most rows. If they don't fit, it is compiled with as many rows as the compiler's figures
suggest. If not even the fewest rows fit, the smallest change that would fit is searched, also by compiling.
"""

from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from mllm.config.run import BatchShape, RunConfig
from mllm.errors import UserError
from mllm.model.load import Policy
from mllm.parallel.mesh import bytes_on_device
from mllm.plan.memory import Phase, fitting_micro_batches, held_in_update, phase, size, update_peak
from mllm.plan.programs import Programs
from mllm.plan.targets import CHIPS, Devices, at_hand

FILLED = 0.97
"""The share of the memory that a choice of rows may fill. Fragmentation needs the rest; the fewest rows may fill it."""


def fit(config: RunConfig, policy: Policy, mesh: Mesh) -> RunConfig:
    """The configuration for the devices of a mesh, with a number of rows; UserError as `with_micro_batch`."""
    devices = at_hand(mesh)
    if config.micro_batch_size is not None or sure_to_fit(policy, config.batch_shape, devices.memory):
        return config.model_copy(update={"micro_batch_size": config.batch_shape.micro})
    return with_micro_batch(config, devices)[0]


def with_micro_batch(config: RunConfig, devices: Devices) -> tuple[RunConfig, int | None]:
    """The configuration with the largest micro-batch that fits on the devices, if `micro_batch_size` is None.

    The second result is the peak of its update in bytes, None if nothing was compiled. UserError is raised if not even
    the fewest rows fit; it names the smallest change that would fit.
    """
    if config.micro_batch_size is not None:
        return config, None
    shape = config.batch_shape
    choices = [rows for rows in range(shape.shards, shape.micro + 1, shape.shards) if shape.total % rows == 0]
    tried: dict[int, Phase] = {}

    def fits(rows: int) -> bool:
        if rows not in tried:
            tried[rows] = compiled_update(config.model_copy(update={"micro_batch_size": rows}), devices)
        return tried[rows].peak <= (devices.memory if rows == choices[0] else FILLED * devices.memory)

    rows = choices[-1]
    if not fits(rows):
        estimated = fitting_micro_batches(tried[rows], shape, int(FILLED * devices.memory))
        rows = max((number for number in estimated if number in choices), default=choices[0])
        while not fits(rows) and rows > choices[0]:
            rows = choices[choices.index(rows) - 1]
        if not fits(rows):
            missing = f"{size(tried[rows].peak - devices.memory)} too much for an update of the fewest rows"
            change = next(changes_that_fit(config, tried[rows], devices), "more devices, or a smaller model")
            raise UserError(f"micro_batch_size: nothing fits on {devices.name} ({missing}); {change} would")
        while fits(more := choices[choices.index(rows) + 1]):
            rows = more
    return config.model_copy(update={"micro_batch_size": rows}), tried[rows].peak


def compiled_update(config: RunConfig, devices: Devices) -> Phase:
    """The memory of an update, by the compiler. The activations include the head's, which a plan compiles by itself."""
    shapes = Programs(config, devices.mesh)
    return phase("update", update_peak(shapes, devices), held_in_update(shapes), 0)


def sure_to_fit(policy: Policy, shape: BatchShape, memory: int) -> bool:
    """Whether an update surely fits, by an estimate of several times the compiler's figure."""
    sizes = policy.architecture
    layer = 16 * sizes.hidden_size + 6 * sizes.intermediate_size + 4 * shape.length * sizes.num_attention_heads
    numbers = shape.micro // shape.shards * shape.length * (sizes.num_hidden_layers * layer + 4 * sizes.vocab_size)
    return 8 * bytes_on_device(policy.params) + 2 * 4 * numbers < memory / 2


def changes_that_fit(config: RunConfig, update: Phase, devices: Devices) -> Iterator[str]:
    """The smallest changes of a configuration that would let an update of few rows fit, or the card that would hold
    it."""
    lengths: dict[str, Any] = {}
    if config.examples is not None:
        lengths = {"data": {"max_length": config.examples.max_length // 2}}
    elif config.rollout is not None:
        lengths = {"rollout": {"max_completion_length": config.rollout.max_completion_length // 2}}
    candidates: list[dict[str, dict[str, Any]]] = [
        *([{"model": {"remat": "full"}}] if config.model.remat == "none" else []),
        lengths,
        *([] if config.model.lora else [{"model": {"lora": {"rank": 32, "alpha": 64.0}}}]),
    ]
    for settings in candidates:
        dump = config.model_dump()
        for section, values in settings.items():
            dump[section] = dump[section] | values
        changed = type(config).model_validate(dump | {"micro_batch_size": config.batch_shape.shards})
        if compiled_update(changed, devices).peak <= devices.memory:
            ((section, values),) = settings.items()
            yield ", ".join(f"{section}.{name}={value}" for name, value in values.items()).replace("'", "")
    cards = sorted((chip.memory, chip.kind) for chip in CHIPS.values())
    yield from (f"{'an' if kind[0] == 'N' else 'a'} {kind}" for memory, kind in cards if memory >= update.peak)
