"""Plans a run's memory before the run takes any: python train.py --config NAME --plan [--target v6e:2x4].

The run's programs are made from shapes (programs.py) and given to the compiler: that of the devices at hand, or, for
devices that aren't there, that of `assignment.py`. The head is the compiler's figure for the head's temporaries,
compiled alone for a micro-batch, or the logits that tokens are sampled from; activations are whatever else the peak
holds. The host's memory and fragmentation are left out.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from mllm.config.model import MeshConfig
from mllm.config.schema import Config
from mllm.errors import UserError
from mllm.model.decoding import abstract_decoding_weights
from mllm.model.load import Policy
from mllm.parallel.mesh import AXES, bytes_on_device, device_memory, make_mesh
from mllm.plan import assignment, gpus, targets
from mllm.plan.assignment import Account
from mllm.plan.programs import Programs
from mllm.plan.seconds import ASSUMED, estimate
from mllm.rl.capacity import slots_that_fit
from mllm.rl.schedule import PREFILLED_BATCHES

COLUMNS = ("parameters", "optimizer", "gradients", "KV cache", "head", "activations")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Devices:
    """The devices that a plan is for."""

    name: str
    mesh: Mesh
    available: int
    memory: int
    """Bytes that a program may have on each device."""
    target: str | None

    @property
    def caveat(self) -> str | None:
        return gpus.CAVEAT if self.target and gpus.is_gpu(self.target) else None


@dataclass(frozen=True)
class Phase:
    """A phase of a run and its memory on each device, in bytes by `COLUMNS`."""

    name: str
    parts: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def plan(config: Config, target: str | None, tell: Tell = print) -> None:
    """Print what each phase takes, whether all phases fit, and the largest micro-batch that fits.

    UserError is raised if a phase does not fit (the message names the nearest setting that does), or target or mesh
    are impossible.
    """
    devices = find_devices(config.mesh, target)
    shape = ", ".join(f"{axis} {size}" for axis, size in devices.mesh.shape.items())
    memory = size(devices.memory)
    tell(f"{devices.name}: mesh {shape}, {devices.mesh.size} of {devices.available} devices, {memory} each")
    if devices.caveat:
        tell(f"{devices.name}: {devices.caveat}")
    planner = Planner(config, devices, tell)
    phases = planner.phases()
    tell(table(phases, devices.memory))
    largest = max(phases, key=lambda phase: phase.peak)
    if largest.peak <= devices.memory:
        tell(f"fits: {largest.name} takes most, and leaves {size(devices.memory - largest.peak)} of {memory}")
    planner.tell_decoding()
    rows, peak = planner.largest_micro_batch(phases[-1])
    if rows is not None:
        tell(f"micro_batch_size: {rows} is the largest that fits ({size(peak)}), of those that divide batch and mesh")
    if largest.peak > devices.memory:
        raise UserError(remedy(config, phases, devices, rows, planner.slots))


class Planner:
    """Compiles a configuration's programs, and tells of each when it is compiled."""

    def __init__(self, config: Config, devices: Devices, tell: Tell) -> None:
        self.devices = devices
        self.tell = tell
        self.programs = Programs(config, devices.mesh)
        self.config = self.programs.config = with_slots(config, self.programs.policy, devices.memory)
        self.slots = 0 if config.rollout is None else self.programs.slots
        beta = 0 if config.grpo is None else config.grpo.beta
        self.reference = bytes_on_device(self.programs.policy.trained) if beta > 0 else 0

    def phases(self) -> list[Phase]:
        """The phases prefill, decode and log-prob, where the run has them; the update comes last."""
        config, shapes, reference = self.config, self.programs, self.reference
        optimizer = bytes_on_device(shapes.state.opt_state)
        held = {"parameters": bytes_on_device(shapes.policy.params) + reference, "optimizer": optimizer}
        found = []
        if config.rollout is not None:
            # While tokens are sampled, the parameters and the optimizer's moments stay in memory.
            weights, shared = map(bytes_on_device, abstract_decoding_weights(shapes.model, shapes.policy.params))
            copied, cache, prompts = weights - shared, *map(bytes_on_device, (shapes.cache(), shapes.prefilled()))
            known = {
                **held,
                "parameters": held["parameters"] + copied,
                "KV cache": cache + PREFILLED_BATCHES * prompts,
            }
            kept = held["parameters"] + optimizer
            account = self.compile("prefill", "prefill")
            others = kept - bytes_on_device(shapes.policy.params) + copied + cache + (PREFILLED_BATCHES - 1) * prompts
            found.append(phase("prefill", account.peak + others, known, 0))
            account = self.compile("decode", "decode")
            logits = bytes_on_device(shapes.logits())
            found.append(phase("decode", account.peak + kept - shared + PREFILLED_BATCHES * prompts, known, logits))
        if config.grpo is not None:
            account, head = self.compile("log-prob", "logprob"), self.compile("log-prob, head", "head_of_logprob")
            found.append(phase("log-prob", account.peak + reference + optimizer, held, head.temporaries))
        known = {**held, "gradients": bytes_on_device(shapes.gradients())}
        account, head = self.compile("update", "update"), self.compile("update, head", "head_of_update")
        found.append(phase("update", account.peak + reference, known, head.temporaries))
        return found

    def tell_decoding(self) -> None:
        """Tell the number of slots and, for a target, how long a step may take."""
        if not self.slots:
            return
        shapes, target = self.programs, self.devices.target
        self.tell(f"rollout: {self.slots} slots, {self.slots // shapes.layout.row_shards} a device")
        if target and self.config.grpo:
            rates = targets.RATES[target.partition(":")[0]]
            found = estimate(shapes, *(rate / 2 if target.startswith("tpu7x") else rate for rate in rates))
            phases = f"rollout {found.rollout:.1f} s ({found.steps} decode steps), log-prob {found.logprob:.1f} s"
            self.tell(f"estimate of a step, never measured: {phases}, update {found.update:.1f} s ({ASSUMED})")

    def compile(self, title: str, name: str, config: Config | None = None) -> Account:
        """The account of one program, compiled in this process or, for a target, in a process of its own."""
        start = time.perf_counter()
        config = config or self.config
        settings = {"config": config.model_dump(mode="json"), "name": name}
        account = account_of("mllm.plan.programs:program", self.devices, **settings)
        self.tell(f"{title + ':':16} {size(account.peak):>10}, compiled in {time.perf_counter() - start:.0f} s")
        return account

    def largest_micro_batch(self, update: Phase) -> tuple[int | None, int]:
        """The rows of the largest micro-batch whose update fits, or None, and the peak of that update in bytes."""
        known = self.programs.rows
        peaks = {known.micro: update.peak}

        def fits(rows: int) -> bool:
            if rows not in peaks:
                config = self.config.model_copy(update={"micro_batch_size": rows})
                peaks[rows] = self.compile(f"micro-batch {rows}", "update", config).peak + self.reference
            return peaks[rows] <= self.devices.memory

        if update.parts["parameters"] + update.parts["optimizer"] > self.devices.memory:
            return None, update.peak
        candidates = sorted({known.micro, *micro_batches(known.total, known.shards)})
        found = largest(candidates, fits, known.micro)
        return found, peaks[candidates[0] if found is None else found]


def with_slots(config: Config, policy: Policy, memory: int) -> Config:
    """The configuration with the number of slots that a run would choose, where a device has so many bytes."""
    if config.rollout is None or config.rollout.max_slots is not None:
        return config
    needs_reference = config.grpo is not None and config.grpo.beta > 0
    slots = slots_that_fit(policy, config.rollout, config.optimizer, needs_reference=needs_reference, memory=memory)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_slots": slots})})


def find_devices(config: MeshConfig, target: str | None) -> Devices:
    """The mesh on the devices at hand, TPUs as in `v6e:2x4`, or H100s as in `h100:8`; UserError where there is none."""
    if target is None:
        mesh = make_mesh(config)
        kind = mesh.devices.flat[0].device_kind
        return Devices(f"{kind} at hand", mesh, jax.device_count(), device_memory(mesh), None)
    try:
        mesh = targets.mesh(target, [getattr(config, axis) for axis in AXES], AXES)
        return Devices(target, mesh, len(targets.devices(target)), targets.memory_limit(target), target)
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(f"--target: {error}") from None


def account_of(program: str, devices: Devices, **settings: Any) -> Account:
    """The account of a program, which is named as in `targets.py` and given these settings and the devices' mesh.

    It is compiled in this process or, for a target, in one of its own; UserError where the target's compiler refuses.
    """
    if devices.target is None:
        function, arguments = targets.program(program)(devices.mesh, **settings)
        jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
        memory = targets.memory(jitted.trace(*arguments).lower().compile())
        return Account(memory["argument"], memory["temp"], memory["peak"])
    try:
        return assignment.read(devices.target, program, devices.mesh.shape, **settings)
    except ValueError as error:
        raise UserError(f"--target: {error}") from None


def phase(name: str, peak: int, known: Mapping[str, int], head: int) -> Phase:
    """A phase whose head and activations are what `known`, which may be freed by then, leaves of the peak."""
    rest = max(peak - sum(known.values()), 0)
    head = min(head, rest)
    return Phase(name, {**dict.fromkeys(COLUMNS, 0), **known, "head": head, "activations": rest - head})


def micro_batches(batch: int, shards: int) -> list[int]:
    """The numbers of rows that a micro-batch may have."""
    return [rows for rows in range(shards, batch + 1, shards) if batch % rows == 0]


def largest(candidates: Sequence[int], fits: Callable[[int], bool], known: int) -> int | None:
    """The largest candidate that fits, by bisection that starts at `known`: where one fits, all smaller ones do."""
    place = candidates.index(known)
    low, high = (place + 1, len(candidates)) if fits(known) else (0, place)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(candidates[middle]) else (low, middle)
    return candidates[low - 1] if low else None


def remedy(config: Config, phases: Sequence[Phase], devices: Devices, rows: int | None, slots: int) -> str:
    """One line: what does not fit, by how much, and the nearest setting that does."""
    worst = max(phases, key=lambda phase: phase.peak)
    missing = f"{size(worst.peak - devices.memory)} too much in {worst.name}"
    state = phases[-1].parts["parameters"] + phases[-1].parts["optimizer"]
    if state > devices.memory:
        fsdp = config.mesh.fsdp * 2 ** math.ceil(math.log2(state / devices.memory))
        return f"mesh: parameters and optimizer take {size(state)} a device ({missing}); mesh.fsdp={fsdp} spreads them"
    if worst.name in ("prefill", "decode"):
        assert config.rollout is not None
        shards, fixed = config.mesh.dp * config.mesh.fsdp, worst.peak - worst.parts["KV cache"] - worst.parts["head"]
        fitting = int(slots * (devices.memory - fixed) / (worst.peak - fixed)) // shards * shards
        if fitting < shards or slots == shards:
            return f"rollout: the copy of the parameters for decoding leaves no room ({missing}); raise mesh.tp"
        return f"rollout.max_slots: {slots} do not fit ({missing}); about {fitting} would"
    way_out = ", nor does a smaller one; raise mesh.fsdp" if rows is None else f"; set it to {rows}"
    return f"micro_batch_size: {config.rows.micro} does not fit ({missing}){way_out}"


def table(phases: Sequence[Phase], memory: int) -> str:
    """The table of phases by columns, in GiB, or in MiB if all phases are small."""
    unit, name = (2**30, "GiB") if max(phase.peak for phase in phases) >= 2**30 else (2**20, "MiB")
    lines = [f"{name + ' a device':14}" + "".join(f"{column:>13}" for column in (*COLUMNS, "peak", "free"))]
    for phase in phases:
        figures = [*(phase.parts[column] for column in COLUMNS), phase.peak, memory - phase.peak]
        lines.append(f"{phase.name:14}" + "".join(f"{figure / unit:13.2f}" for figure in figures))
    return "\n".join(lines)


def size(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
