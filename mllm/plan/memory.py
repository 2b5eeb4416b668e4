"""Plans a run's memory before the run takes any: python train.py --config NAME --plan [--target v6e:2x4].

The run's programs are made from shapes (programs.py) and compiled, for the devices at hand or, as `targets.py` has it,
for devices that aren't there; the figures are the compiler's. A TPU's compiler refuses a program that is too large
and says how much memory it would take. The head is the compiler's figure for the head's temporaries,
compiled alone for a micro-batch, or the logits that tokens are sampled from; activations are whatever else the peak
holds. All lengths are at their limits. Time, the host's memory and fragmentation are left out.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mllm.config.load import for_devices
from mllm.config.run import BatchShape, RunConfig
from mllm.errors import UserError
from mllm.model.layout import count
from mllm.parallel.mesh import AXES, bytes_on_device, device_memory, make_mesh
from mllm.parallel.processes import gather_objects
from mllm.plan import targets
from mllm.plan.programs import Program, Programs
from mllm.plan.targets import Account
from mllm.sampler.schedule import PREFILLED_BATCHES
from mllm.training.room import room_that_fits

COLUMNS = ("parameters", "optimizer", "gradients", "KV cache", "head", "activations")
GPU_CAVEAT = "by XLA's compiler without a GPU, with cuBLAS for all products, and never held against one (docs/log.md)"
Tell = Callable[[str], None]


class Devices(NamedTuple):
    """The devices that a plan is for."""

    name: str
    mesh: Mesh
    available: int
    memory: int
    """Bytes that a program may have on each device."""
    target: str | None

    @property
    def caveat(self) -> str | None:
        return GPU_CAVEAT if self.target and targets.split(self.target)[0] not in targets.TPUS else None


class Phase(NamedTuple):
    """A phase of a run and its memory on each device, in bytes by `COLUMNS`."""

    name: str
    parts: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def size(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def subject(shapes: Programs) -> Iterator[str]:
    """The lines that say what is planned and what its checkpoints take on disk."""
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
    yield f"{batch}; micro_batch_size {rows.micro}, rows of {rows.length} tokens; {steps}"
    nbytes, settings = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)), config.checkpoint
    # An older checkpoint is removed only when the new one is complete.
    most = 1 + (settings.keep + settings.keep_best if settings.every else 0)
    yield f"checkpoint: {size(nbytes)}; run_dir has up to {most} at a time, {size(nbytes * most)}"


def plan(config: RunConfig, devices: Devices, tell: Tell = print) -> None:
    """Print what is planned, what each phase takes, and whether all phases fit.

    UserError is raised if a phase does not fit; the message names the nearest setting that does.
    """
    shape = ", ".join(f"{axis} {size}" for axis, size in devices.mesh.shape.items())
    memory = size(devices.memory)
    tell(f"{devices.name}: mesh {shape}, {devices.mesh.size} of {devices.available} devices, {memory} each")
    if devices.caveat:
        tell(f"{devices.name}: {devices.caveat}")
    shapes = Programs(config, devices.mesh)
    for line in subject(shapes):
        tell(line)
    if config.rollout is not None and config.rollout.max_slots is None:
        held = shapes.demands.reference == "held"
        room = room_that_fits(shapes.policy, config.rollout, config.optimizer, held, devices.memory, shapes.teacher)
        shapes.config = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"max_slots": room.slots})}
        )
        shapes.tokens = room.tokens
    planned = phases(shapes, devices, tell)
    tell(table(planned, devices.memory))
    largest, update = max(planned, key=lambda phase: phase.peak), planned[-1]
    fitting = fitting_micro_batches(update, config.batch_shape, devices.memory)
    if largest.peak > devices.memory:
        raise UserError(remedy(shapes, planned, devices, max(fitting, default=0)))
    tell(f"fits: the peak at full lengths is {size(largest.peak)}, in the phase {largest.name}, of {memory}")
    if config.rollout is not None:
        per_device = shapes.slots // shapes.layout.row_shards
        states = bytes_on_device(shapes.states())
        states_part = f", {size(states // per_device)} a slot for the states of delta nets" if states else ""
        tell(f"rollout: {shapes.slots} slots, {per_device} a device{states_part}")
    tell(f"micro_batch_size: up to about {fitting[-1]} would fit, of those that divide batch and mesh")


def phases(shapes: Programs, devices: Devices, tell: Tell) -> list[Phase]:
    """The phases prefill, decode and log-prob, where the run has them, and the update, which comes last.

    A line tells when each program is compiled.
    """
    config = shapes.config

    def compiled(title: str, program: Program) -> Account:
        start = time.perf_counter()
        account = account_of(program, devices)
        tell(f"{title}: compiled in {time.perf_counter() - start:.0f} s")
        return account

    parameters, optimizer = map(bytes_on_device, (shapes.policy.params, shapes.state.opt_state))
    demands = shapes.demands
    reference = bytes_on_device(shapes.policy.trained) if demands.reference == "held" else 0
    teacher = bytes_on_device(shapes.teacher.params) if shapes.teacher else 0
    frozen = reference + teacher  # in memory in every phase, whose program may not have them
    held = {"parameters": parameters + frozen, "optimizer": optimizer}
    planned = []
    if config.rollout is not None:
        # While tokens are sampled, the parameters and the optimizer's moments stay in memory.
        weights, shared = map(bytes_on_device, shapes.decoding_weights())
        copied, states = weights - shared, bytes_on_device(shapes.states())
        cache, prompts = bytes_on_device(shapes.cache()) + states, bytes_on_device(shapes.prefilled())
        known = {**held, "parameters": held["parameters"] + copied, "KV cache": cache + PREFILLED_BATCHES * prompts}
        resident = frozen + optimizer + copied + cache + (PREFILLED_BATCHES - 1) * prompts
        planned.append(phase("prefill", compiled("prefill", shapes.prefill()).peak + resident, known, 0))
        resident = sum(held.values()) - shared + PREFILLED_BATCHES * prompts
        logits = shapes.array((shapes.slots, shapes.model.config.vocab_size), jnp.float32, ("batch", "vocab"))
        planned.append(
            phase("decode", compiled("decode", shapes.decode()).peak + resident, known, bytes_on_device(logits))
        )
        if config.rollout.turns > 1:
            planned.append(phase("answers", compiled("answers", shapes.extend()).peak + resident, known, 0))
    for policy, beside_optimizer in demands.passes:
        moments = optimizer if beside_optimizer else 0
        known = {**held, "optimizer": moments}
        if policy == "teacher":
            peak = compiled("teacher", shapes.teacher_logprob()).peak + parameters + reference + moments
            planned.append(phase("teacher", peak, known, 0))
        else:
            account, head = compiled("log-prob", shapes.logprob()), compiled("log-prob, head", shapes.head_of_logprob())
            planned.append(phase("log-prob", account.peak + frozen + moments, known, head.temporaries))
    start = time.perf_counter()
    planned.append(update_phase(shapes, devices))
    tell(f"update: compiled in {time.perf_counter() - start:.0f} s")
    return planned


def update_phase(shapes: Programs, devices: Devices) -> Phase:
    """The phase of the update."""
    reference = bytes_on_device(shapes.policy.trained) if shapes.demands.reference == "held" else 0
    teacher = bytes_on_device(shapes.teacher.params) if shapes.teacher else 0
    known = {
        "parameters": bytes_on_device(shapes.policy.params) + reference + teacher,
        "optimizer": bytes_on_device(shapes.state.opt_state),
        "gradients": bytes_on_device(shapes.gradients()),
    }
    account, head = (account_of(program, devices) for program in (shapes.update(), shapes.head_of_update()))
    beside = reference if shapes.demands.teacher_in_update else reference + teacher  # which its arguments lack
    return phase("update", account.peak + beside, known, head.temporaries)


def find_devices(config: RunConfig, target: str | None) -> tuple[RunConfig, Devices]:
    """The devices at hand, TPUs as in `v6e:2x4`, or GPUs of a host as in `h100:8`; and the settings with their number.

    UserError is raised where there are no such devices.
    """
    if target is None:
        try:
            config = for_devices(config, jax.device_count())
            return config, at_hand(make_mesh(config.mesh))
        except UserError as error:
            raise UserError(f"{error}; or plan for devices that aren't here, as with --target v6e:2x4") from None
    try:
        available = len(targets.devices(target))
        config = for_devices(config, available)
        mesh = targets.mesh(target, [getattr(config.mesh, axis) for axis in AXES], AXES)
        return config, Devices(target, mesh, available, targets.CHIPS[targets.split(target)[0]].memory, target)
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(f"--target: {error}") from None


def at_hand(mesh: Mesh) -> Devices:
    """The devices of a mesh of this machine."""
    memory = min(gather_objects(device_memory(mesh)))  # all processes must choose the same numbers
    return Devices(f"{mesh.devices.flat[0].device_kind} at hand", mesh, jax.device_count(), memory, None)


def account_of(program: Program, devices: Devices) -> Account:
    """The account of a program on the devices; UserError if the compiler refuses it, but not for lack of memory."""
    function, arguments = program
    try:
        if devices.target is not None:
            return targets.account(function, arguments, devices.mesh)
        return targets.memory(targets.as_jitted(function).trace(*arguments).lower().compile())
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"{devices.name}: the compiler refuses the program: {str(error).splitlines()[0]}") from None


def phase(name: str, peak: int, known: Mapping[str, int], head: int) -> Phase:
    """A phase whose head and activations share the peak's bytes beyond `known`, which may be freed by then."""
    remaining = max(peak - sum(known.values()), 0)
    head = min(head, remaining)
    return Phase(name, {**dict.fromkeys(COLUMNS, 0), **known, "head": head, "activations": remaining - head})


def fitting_micro_batches(update: Phase, rows: BatchShape, memory: int) -> list[int]:
    """The numbers of rows of a micro-batch that divide batch and mesh and about fit, in ascending order.

    Activations are taken to be proportional to the rows; the head, too, but with fewer rows it is taken as it is.
    """
    head, activations = (update.parts[name] for name in ("head", "activations"))
    fixed = update.peak - head - activations

    def fits(count: int) -> bool:
        ratio = count / rows.micro
        return fixed + head * max(1, ratio) + activations * ratio <= memory

    divisors = (count for count in range(rows.shards, rows.total + 1, rows.shards) if rows.total % count == 0)
    return [*filter(fits, divisors)]


def remedy(shapes: Programs, planned: Sequence[Phase], devices: Devices, rows: int) -> str:
    """One line: what does not fit, by how much, and the setting to change; `rows` of a micro-batch would fit."""
    worst, memory = max(planned, key=lambda phase: phase.peak), devices.memory
    missing = f"{size(worst.peak - memory)} too much in {worst.name}"
    state = planned[-1].parts["parameters"] + planned[-1].parts["optimizer"]
    if state > memory:
        return f"mesh: parameters and optimizer take {size(state)} a device ({missing}); raise mesh.fsdp"
    if worst.name in ("prefill", "decode", "answers"):
        return f"rollout.max_slots: {shapes.slots} do not fit ({missing}); lower it, or raise mesh.tp"
    way_out = f"about {rows} would" if rows else "nor does a smaller one: raise mesh.fsdp, or take model.lora"
    return f"micro_batch_size: {shapes.shape.micro} does not fit ({missing}); {way_out}"


def table(phases: Sequence[Phase], memory: int) -> str:
    """The table of phases by columns, in GiB, or in MiB if all phases are small."""
    unit, name = (2**30, "GiB") if max(phase.peak for phase in phases) >= 2**30 else (2**20, "MiB")
    lines = [f"{name + ' a device':14}" + "".join(f"{column:>13}" for column in (*COLUMNS, "peak", "free"))]
    for phase in phases:
        figures = [*(phase.parts[column] for column in COLUMNS), phase.peak, memory - phase.peak]
        lines.append(f"{phase.name:14}" + "".join(f"{figure / unit:13.2f}" for figure in figures))
    return "\n".join(lines)
