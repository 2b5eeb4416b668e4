"""Chooses the rows of a micro-batch and the rematerialisation by the available memory, if they are left open.

The update is compiled with the most rows. If they don't fit, it is compiled with as many rows as the compiler's figures
suggest. If not even the fewest rows fit, the smallest change that would fit is searched, also by compiling.

Where `products` is the faster `model.remat`, it is taken if `ENOUGH` tokens fit. `full` takes less memory. XLA for GPUs
repeats operations of a program that would fill the memory. The repetition costs more than `products` save.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from mllm.config.run import BatchShape, RunConfig
from mllm.errors import UserError
from mllm.model.load import Policy, fastest_remat
from mllm.parallel.mesh import bytes_on_device
from mllm.plan.memory import Phase, fitting_micro_batches, held_in_update, phase, size, update_account
from mllm.plan.programs import Programs
from mllm.plan.targets import CHIPS, Devices, at_hand

FILLED = 0.97
"""The share of the memory that a choice of rows may fill. Fragmentation needs the rest; the fewest rows may fill it."""
ENOUGH = 8_192
"""The tokens of a device and micro-batch from which on fewer rows don't cost more than `products` save."""


def fit(config: RunConfig, policy: Policy, mesh: Mesh) -> RunConfig:
    """The configuration for the devices of a mesh, with its open settings chosen; UserError as `fitted`."""
    devices = at_hand(mesh)
    if sure_to_fit(policy, config.batch_shape, devices.memory):
        return settled(config, config.batch_shape.micro, kinds(config, devices)[0])
    return fitted(config, devices)[0]


def fitted(config: RunConfig, devices: Devices) -> tuple[RunConfig, int | None]:
    """The configuration with rows and a rematerialisation that fit on the devices, where it leaves them open.

    The second result is the peak of its update in bytes, None if the update was not compiled. UserError is raised if
    the rows are open and not even the fewest rows fit; it names the smallest change that would fit.
    """
    shape, micro = config.batch_shape, config.micro_batch_size
    choices = [rows for rows in range(shape.shards, shape.micro + 1, shape.shards) if shape.total % rows == 0]
    *faster, last = kinds(config, devices)
    for remat in faster:
        enough = [rows for rows in choices if rows * shape.length >= ENOUGH * shape.shards]
        some = [micro] if micro else enough or choices[-1:]
        rows, update = most_rows(settled(config, None, remat), devices, some, doubtful=False)
        if has_room(update, remat, devices):
            return settled(config, rows, remat), update.peak
    if micro:
        return settled(config, micro, last), None
    rows, update = most_rows(settled(config, None, last), devices, choices)
    config = settled(config, rows, last)
    if update.peak > devices.memory:
        missing = f"{size(update.peak - devices.memory)} too much for an update of the fewest rows"
        change = next(changes_that_fit(config, update, devices), "more devices, or a smaller model")
        raise UserError(f"micro_batch_size: nothing fits on {devices.name} ({missing}); {change} would")
    return config, update.peak


def kinds(config: RunConfig, devices: Devices) -> tuple[str, ...]:
    """The kinds of rematerialisation to choose from, the fastest first and the one that takes the least memory last."""
    if config.model.remat != "auto":
        return (config.model.remat,)
    return tuple(dict.fromkeys((fastest_remat(devices.mesh), "full")))


def settled(config: RunConfig, rows: int | None, remat: str) -> RunConfig:
    """The configuration with the rows of a micro-batch and the kind of rematerialisation."""
    model = config.model.model_copy(update={"remat": remat})
    return config.model_copy(update={"micro_batch_size": rows, "model": model})


def has_room(update: Phase, remat: str, devices: Devices) -> bool:
    """Whether an update leaves memory to spare; with `products` enough that XLA repeats no operations."""
    return update.peak <= FILLED * devices.memory and not (remat == "products" and update.repeats)


def most_rows(config: RunConfig, devices: Devices, choices: Sequence[int], doubtful: bool = True) -> tuple[int, Phase]:
    """The most rows of the `choices`, which ascend, that fit, and their update; if none fit, rows that don't.

    If no choice fits by an estimate, the fewest rows are compiled if `doubtful`.
    """
    tried: dict[int, Phase] = {}

    def fits(rows: int) -> bool:
        if rows not in tried:
            tried[rows] = compiled_update(settled(config, rows, config.model.remat), devices)
        return has_room(tried[rows], config.model.remat, devices)

    rows = choices[-1]
    if not fits(rows):
        estimated = fitting_micro_batches(tried[rows], config.batch_shape, int(FILLED * devices.memory))
        likely = [number for number in choices if number in estimated]
        if not (likely or doubtful):
            return rows, tried[rows]
        rows = max(likely, default=choices[0])
        while not fits(rows) and rows > choices[0]:
            rows = choices[choices.index(rows) - 1]
        while fits(rows) and fits(more := choices[choices.index(rows) + 1]):
            rows = more
    return rows, tried[rows]


def compiled_update(config: RunConfig, devices: Devices) -> Phase:
    """The memory of an update, by the compiler. The activations include the head's, which a plan compiles by itself."""
    shapes = Programs(config, devices.mesh)
    account = update_account(shapes, devices)
    return phase("update", account.peak, held_in_update(shapes), 0)._replace(repeats=account.repeats)


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
        lengths = {"data": {"max_length": max(config.examples.max_length // 2, 1)}}
    elif config.rollout is not None:
        lengths = {"rollout": {"max_completion_length": max(config.rollout.max_completion_length // 2, 1)}}
    candidates: list[dict[str, dict[str, Any]]] = [
        *([{"model": {"remat": "full"}}] if config.model.remat != "full" else []),
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
