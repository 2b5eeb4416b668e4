"""Plans a run's memory before the run takes any: python train.py --config NAME --plan [--target v6e:2x4].

The run's programs are made from shapes (programs.py) and compiled, for the devices at hand or for other targets
(targets.py). The figures are the compiler's. In an update, the head is the head's temporaries, compiled alone for a
micro-batch; in decoding it is the logits. Activations are the rest of the peak. All lengths are at their limits. Time,
the host's memory and fragmentation are left out.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mllm.config.run import BatchShape, RunConfig
from mllm.errors import UserError
from mllm.model.layout import count
from mllm.parallel.mesh import bytes_on_device
from mllm.plan.programs import Programs, RolloutPrograms
from mllm.plan.targets import Account, Devices, account_of
from mllm.sampler.schedule import PREFILLED_BATCHES
from mllm.training.decode_limits import fitting_limits

COLUMNS = ("parameters", "optimizer", "gradients", "KV cache", "head", "activations")
Tell = Callable[[str], None]


class Phase(NamedTuple):
    """A phase of a run and its memory on each device, in bytes by `COLUMNS`."""

    name: str
    parts: dict[str, int]
    repeats: bool = False
    """As in the program's `Account`."""

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def size(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def subject(shapes: Programs) -> Iterator[str]:
    """The lines that describe the run: its model, its batch, and the size of its checkpoints."""
    config, rows, state = shapes.config, shapes.shape, shapes.state
    whole, trained = count(shapes.policy.params), count(state.params)
    adapters = f" ({trained:,} in adapters, which are trained)" if config.model.lora else ""
    yield f"{config.algorithm} of {config.model.source or 'a new model'}, {whole:,} parameters{adapters}"
    if (teacher := config.frozen_teacher) and shapes.teacher:
        yield f"teacher: {teacher.source}, {count(shapes.teacher.params):,} parameters in {teacher.dtype}"
    rollout, batch = config.rollout, f"batch_size {config.batch_size}"
    if (completions := shapes.demands.completions) and rollout:
        limits = f"{rollout.max_prompt_length} + {rollout.total_length - rollout.max_prompt_length}"
        batch += f", {completions} completions in a rollout, {limits} tokens at most"
    steps = f"{config.steps} steps" if config.steps else "steps by data.epochs"
    rows_part = f"micro_batch_size {rows.micro}, rows of {rows.length} tokens, remat {config.model.remat}"
    yield f"{batch}; {rows_part}; {steps}"
    nbytes, settings = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)), config.checkpoint
    # An older checkpoint is removed only when the new one is complete.
    most = 1 + (settings.keep + settings.keep_best if settings.every else 0)
    yield f"checkpoint: {size(nbytes)}; run_dir has up to {most} at a time, {size(nbytes * most)}"


def plan(config: RunConfig, devices: Devices, tell: Tell = print, update: int | None = None) -> None:
    """Print the run's description, the memory of each phase, and whether all phases fit.

    A known peak of the `update` is not compiled again. UserError is raised if a phase does not fit; it names a setting
    that would.
    """
    shape = ", ".join(f"{axis} {size}" for axis, size in devices.mesh.shape.items())
    memory = size(devices.memory)
    tell(f"{devices.name}: mesh {shape}, {devices.mesh.size} of {devices.available} devices, {memory} each")
    if devices.caveat:
        tell(f"{devices.name}: {devices.caveat}")
    shapes, rollouts, options = Programs(config, devices.mesh), None, config.rollout
    for line in subject(shapes):
        tell(line)
    if options is not None:
        tokens = None
        if options.max_slots is None:
            reference = shapes.demands.reference == "held"
            room = fitting_limits(shapes.policy, options, config.optimizer, reference, devices.memory, shapes.teacher)
            options, tokens = options.model_copy(update={"max_slots": room.slots}), room.tokens
        rollouts = RolloutPrograms(shapes, options, tokens)
    planned = phases(shapes, rollouts, devices, tell, update)
    tell(table(planned, devices.memory))
    largest = max(planned, key=lambda phase: phase.peak)
    fitting = fitting_micro_batches(planned[-1], shapes.shape, devices.memory)
    if largest.peak > devices.memory:
        slots = rollouts.slots if rollouts else 0
        raise UserError(remedy(planned, shapes.shape.micro, slots, devices, max(fitting, default=0)))
    tell(f"fits: the peak at full lengths is {size(largest.peak)}, in the phase {largest.name}, of {memory}")
    if rollouts:
        per_device = rollouts.slots // rollouts.shards
        states = bytes_on_device(rollouts.states())
        states_part = f", {size(states // per_device)} a slot for the states of delta nets" if states else ""
        tell(f"rollout: {rollouts.slots} slots, {per_device} a device{states_part}")
    tell(f"micro_batch_size: up to about {min(fitting[-1], config.batch_size)} rows would fit")


def phases(
    shapes: Programs, rollouts: RolloutPrograms | None, devices: Devices, tell: Tell, update: int | None = None
) -> list[Phase]:
    """The phases prefill, decode, answers and log-prob, if the run has them, and last the update.

    The peak of the `update` is compiled if it is not known.

    A line is printed after each phase is compiled.
    """
    planned: list[Phase] = []
    start = time.perf_counter()

    def add(phase: Phase) -> None:
        nonlocal start
        tell(f"{phase.name}: compiled in {time.perf_counter() - start:.0f} s")
        planned.append(phase)
        start = time.perf_counter()

    def peak(program: Callable[..., object], arguments: tuple[object, ...]) -> int:
        return account_of(program, arguments, devices).peak

    parameters, optimizer = map(bytes_on_device, (shapes.policy.params, shapes.state.opt_state))
    reference, teacher = frozen_beside(shapes)
    base = {"parameters": parameters + reference + teacher, "optimizer": optimizer}
    if rollouts is not None:
        # While tokens are sampled, the parameters and the optimizer's moments stay in memory.
        weights, shared = map(bytes_on_device, rollouts.weights())
        copied, prompts = weights - shared, bytes_on_device(rollouts.prefilled())
        cache = bytes_on_device(rollouts.cache()) + bytes_on_device(rollouts.states())
        known = {**base, "parameters": base["parameters"] + copied, "KV cache": cache + PREFILLED_BATCHES * prompts}
        beside = reference + teacher + optimizer + copied + cache + (PREFILLED_BATCHES - 1) * prompts
        add(phase("prefill", peak(*rollouts.prefill()) + beside, known, 0))
        beside = sum(base.values()) - shared + PREFILLED_BATCHES * prompts
        logits = rollouts.array((rollouts.slots, rollouts.model.config.vocab_size), jnp.float32, ("batch", "vocab"))
        add(phase("decode", peak(*rollouts.decode()) + beside, known, bytes_on_device(logits)))
        if rollouts.rollout.turns > 1:
            add(phase("answers", peak(*rollouts.extend()) + beside, known, 0))
    for policy, beside_optimizer in shapes.demands.passes:
        known = {**base, "optimizer": optimizer if beside_optimizer else 0}
        if policy == "teacher":
            beside = parameters + reference + known["optimizer"]
            add(phase("teacher", peak(*shapes.logprob(of_teacher=True)) + beside, known, 0))
        else:
            head = account_of(*shapes.head_of_logprob(), devices).temporaries
            beside = reference + teacher + known["optimizer"]
            add(phase("log-prob", peak(*shapes.logprob()) + beside, known, head))
    last = update_phase(shapes, devices, update)
    if update is None:
        add(last)
        return planned
    return [*planned, last]


def update_phase(shapes: Programs, devices: Devices, peak: int | None = None) -> Phase:
    """The phase of an update. Its `peak` is compiled if it is not known."""
    head = account_of(*shapes.head_of_update(), devices).temporaries
    return phase("update", peak or update_account(shapes, devices).peak, held_in_update(shapes), head)


def update_account(shapes: Programs, devices: Devices) -> Account:
    """The account of an update, with all that is in memory beside it."""
    reference, teacher = frozen_beside(shapes)
    beside = reference if shapes.demands.teacher_in_update else reference + teacher  # which its arguments lack
    account = account_of(*shapes.update(), devices)
    return account._replace(peak=account.peak + beside)


def held_in_update(shapes: Programs) -> dict[str, int]:
    """The bytes of an update that follow from shapes."""
    return {
        "parameters": bytes_on_device(shapes.policy.params) + sum(frozen_beside(shapes)),
        "optimizer": bytes_on_device(shapes.state.opt_state),
        "gradients": bytes_on_device(shapes.gradients()),
    }


def frozen_beside(shapes: Programs) -> tuple[int, int]:
    """The bytes of a reference and of a teacher, which are in memory in every phase."""
    reference = bytes_on_device(shapes.policy.trained) if shapes.demands.reference == "held" else 0
    return reference, bytes_on_device(shapes.teacher.params) if shapes.teacher else 0


def phase(name: str, peak: int, known: Mapping[str, int], head: int) -> Phase:
    """A phase from its peak: the bytes beyond the `known` parts belong to the head and the activations."""
    remaining = max(peak - sum(known.values()), 0)
    head = min(head, remaining)
    return Phase(name, {**dict.fromkeys(COLUMNS, 0), **known, "head": head, "activations": remaining - head})


def fitting_micro_batches(update: Phase, rows: BatchShape, memory: int) -> list[int]:
    """The micro-batch sizes that would about fit and suit batch and mesh, in ascending order.

    Activations and head are assumed proportional to the rows; for fewer rows the head is assumed constant.
    """
    head, activations = (update.parts[name] for name in ("head", "activations"))
    fixed = update.peak - head - activations

    def fits(count: int) -> bool:
        ratio = count / rows.micro
        return fixed + head * max(1, ratio) + activations * ratio <= memory

    divisors = (count for count in range(rows.shards, rows.total + 1, rows.shards) if rows.total % count == 0)
    return [*filter(fits, divisors)]


def remedy(planned: Sequence[Phase], micro: int, slots: int, devices: Devices, rows: int) -> str:
    """The error's line: the phase that does not fit, the missing bytes, and the setting to change.

    `rows` rows of a micro-batch would fit.
    """
    worst, memory = max(planned, key=lambda phase: phase.peak), devices.memory
    missing = f"{size(worst.peak - memory)} too much in {worst.name}"
    state = planned[-1].parts["parameters"] + planned[-1].parts["optimizer"]
    if state > memory:
        return f"mesh: parameters and optimizer take {size(state)} a device ({missing}); raise mesh.fsdp"
    if worst.name in ("prefill", "decode", "answers"):
        mesh, used = devices.mesh.shape, worst.parts["parameters"] + worst.parts["optimizer"]
        # Fewer slots don't help if a device has one, or has no room for the parameters.
        lower = "lower it, or " if slots > mesh["dp"] * mesh["fsdp"] and used < memory else ""
        return f"rollout.max_slots: {slots} do not fit ({missing}); {lower}raise mesh.tp"
    way_out = f"about {rows} would" if rows else "nor does a smaller one: raise mesh.fsdp, or take model.lora"
    return f"micro_batch_size: {micro} does not fit ({missing}); {way_out}"


def table(phases: Sequence[Phase], memory: int) -> str:
    """The table of phases by columns, in GiB, or in MiB if all phases are small."""
    unit, name = (2**30, "GiB") if max(phase.peak for phase in phases) >= 2**30 else (2**20, "MiB")
    lines = [f"{name + ' a device':14}" + "".join(f"{column:>13}" for column in (*COLUMNS, "peak", "free"))]
    for phase in phases:
        figures = [*(phase.parts[column] for column in COLUMNS), phase.peak, memory - phase.peak]
        lines.append(f"{phase.name:14}" + "".join(f"{figure / unit:13.2f}" for figure in figures))
    return "\n".join(lines)
