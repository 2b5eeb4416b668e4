"""Tries sizes of the head's kernels for Hopper, and notes the best in kernels/lm_head/gpu/tiles.json; by tools/tune.py.

    python tools/tune.py --shape 8192,2048,151936 --limit 240 --write       on the GPU

Tiles that fit shared memory by gpu_tiles.py are tried in turn, with the chunk of the vocabulary that it takes by its
rule; then other chunks, with the fastest tiles. Each is compiled, held against streaming's results on random data, and
timed:

    ms, no workspace   loss and gradients of the cross-entropy; with 640 MiB; and the value alone
    errors             of the loss, the tokens' statistics, dh and dW: the largest over the largest magnitude, or one
                       root mean square over the other if that is more

What is wrong, fails or hangs is told and never noted. At the end the best are timed in turns with streaming, and by the
sum of no workspace and the value alone one is noted, with its chunk where that is smaller than the rule's and clearly
faster. Of a larger one, which takes more memory, it is only told.

The trials run in a process of their own (tune_gpu_child.py), which is started anew when a kernel has spoilt it.

No GPU has run this. Left out: several devices, other dtypes than bfloat16, rows that don't count.
"""

import argparse
import dataclasses
import json
import math
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from tqdm import tqdm

from kernels.lm_head import target
from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.gpu import engine as mosaic_gpu
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.tiles import SHARED_MEMORY, Sizes, Tiles
from mllm.errors import UserError
from mllm.plan.assignment import reason
from tools import tune_table

SUBJECT = ("engine", "device", "features")
"""Keys of an entry that say what it is for."""
PROGRAMS = ("no workspace", "workspace", "value")
WORKSPACE = 640 << 20
TOLERANCE = {"loss": 1e-4, "statistics": 1e-4, "dh": 0.02, "dW": 0.02}
"""Gradients are bfloat16; a tile of 256 columns that is left out moves an lse of 12 nats by 2e-3."""
CHUNKS = (1024, 1536, 1792, 2048, 2304, 3072, 4096, 4224, 6144, 8192, 8448)
"""Columns: also such that tiles come out even on 132 multiprocessors."""
CLEARLY = 0.015
"""By so much of the time another chunk than the rule's must be faster."""
PATIENCE = 180.0
"""Seconds that a trial may take, compiling included."""

Shape = tuple[int, int, int]
Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""A request to the trials' process -> its answer, which has a `refusal` where nothing came of it."""


class Candidate(NamedTuple):
    tiles: Tiles
    chunk: int | None = None
    """Columns; None: what gpu_tiles.py takes with these tiles."""


class Trial(NamedTuple):
    candidate: Candidate
    seconds: dict[str, float]
    """By program."""
    errors: dict[str, float]
    refusal: str = ""

    @property
    def total(self) -> float:
        """Of what decides."""
        return math.inf if self.refusal else decisive(self.seconds)


def decisive(seconds: dict[str, float]) -> float:
    return seconds["no workspace"] + seconds["value"]


def run(options: argparse.Namespace, shape: Shape) -> None:
    """Raises UserError for what can't be done here, and where no candidate is right."""
    table = options.table or Path(gpu_tiles.__file__).with_suffix(".json")
    if options.dtype != "bfloat16":
        raise UserError(f"--dtype: {options.dtype}: the kernels for GPUs multiply in bfloat16")
    if options.kernel:
        raise UserError("--kernel: on a GPU the kernels are tried together")
    if why_not := obstacle(shape):
        raise UserError(f"--shape: mosaic_gpu can't run here: {why_not}")
    noted = tune_table.read(table, SUBJECT)
    if not table.parent.is_dir():
        raise UserError(f"--table: there is no folder {table.parent}")
    device = target.device_kind()
    print("{}, jax {}, bfloat16, N,D,V = {},{},{}".format(device, jax.__version__, *shape), flush=True)
    with Worker(shape) as worker:
        found = tune(shape, worker.ask, options.limit or math.inf, options.most)
    print("\n".join(lines(found, shape)), flush=True)
    if not found.in_turns:
        raise UserError("no candidate was right, so none is noted")
    if options.write:
        new = entry(found, shape, device)
        tune_table.write(table, tune_table.merged(noted, [new], SUBJECT))
        print(f"\nnoted in {table}")


def obstacle(shape: Shape) -> str | None:
    """Why the kernels can't run on this device with such arrays."""
    tokens, features, vocabulary = shape
    hidden: Any = jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16)
    weight: Any = jax.ShapeDtypeStruct((vocabulary, features), jnp.bfloat16)
    per_row: Any = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    inputs = Inputs(hidden, weight, per_row, per_row, per_row)
    return mosaic_gpu.obstacle(inputs, Options(None, jnp.dtype(jnp.bfloat16)))


# --- candidates -----------------------------------------------------------------------------------------------------


def tilings() -> list[Tiles]:
    """Those that fit, the default first; then by slots that are left unused, which hide less of memory's latency."""
    fitting = [
        Tiles(columns=columns, slots=slots, cluster=cluster)
        for columns in (256, 128)
        for cluster in (2, 1)
        if columns % (Tiles.rows * cluster) == 0
        for slots in (6, 5, 4, 3)
    ]
    fitting = [tiles for tiles in fitting if gpu_tiles.shared_memory(tiles) <= SHARED_MEMORY]
    most = {columns: max(t.slots for t in fitting if t.columns == columns) for columns in {t.columns for t in fitting}}
    return sorted(fitting, key=lambda t: (t != Tiles(), most[t.columns] - t.slots, -t.columns, -t.cluster))


@contextmanager
def taken(candidate: Candidate) -> Iterator[None]:
    """In it the kernels are traced with these tiles, as they will be once these are noted."""
    if candidate.chunk is not None:
        with gpu_tiles.override(Sizes(candidate.tiles, candidate.chunk)):
            yield
        return
    noted = {"engine": "mosaic_gpu", "device": target.device_kind(), "features": 1}
    with mock.patch.object(gpu_tiles, "_TABLE", [noted | {"tiles": dataclasses.asdict(candidate.tiles)}]):
        yield


def rule(tiles: Tiles, shape: Shape) -> Sizes:
    """What gpu_tiles.py takes with these tiles."""
    tokens, features, vocabulary = shape
    with taken(Candidate(tiles)):
        return gpu_tiles.choose(tokens, vocabulary, features)


def chunks(tiles: Tiles, shape: Shape) -> list[int]:
    """Others than the rule's, the nearest to it first."""
    own, whole = rule(tiles, shape).chunk, -(-shape[2] // tiles.columns) * tiles.columns
    found = [chunk for chunk in CHUNKS if chunk % tiles.columns == 0 and chunk != own and chunk <= whole]
    return sorted(found, key=lambda chunk: abs(math.log(chunk / own)))


# --- trials ---------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    trials: list[Trial]
    streaming: dict[str, float]
    """Seconds by program; empty, if there was no time to find them."""
    in_turns: list[Trial]
    """The finalists once more, timed in turns with streaming; the best first."""
    left_out: int
    """Candidates for which there was no time."""


def tune(
    shape: Shape, ask: Ask, limit: float, most: int | None = None, clock: Callable[[], float] = time.monotonic
) -> Found:
    """Tilings, then chunks for the best of them, then the finalists in turns; what would end too late is left out."""
    start, took, trials, left_out = clock(), list[float](), list[Trial](), 0
    first = [Candidate(tiles) for tiles in tilings()][:most]
    bar = tqdm(total=len(first) + len(CHUNKS) - 2, unit="trial", dynamic_ncols=True)

    def in_time() -> bool:
        longest = max(took[1:] or took, default=0.0)  # the first starts the process, too
        return clock() - start + 2 * longest < limit  # one more, and the turns at the end

    def try_all(candidates: Sequence[Candidate]) -> None:
        nonlocal left_out
        for candidate in candidates:
            if not in_time():
                left_out += 1
                continue
            began = clock()
            bar.set_description(told(candidate))
            trials.append(tried(ask, candidate))
            took.append(clock() - began)
            bar.update()
            bar.write(cells(trials[-1]))

    with bar:
        try_all(first)
        right = [trial for trial in trials if not trial.refusal]
        if right:
            tiles = min(right, key=lambda trial: trial.total).candidate.tiles
            others = [Candidate(tiles, chunk) for chunk in chunks(tiles, shape)]
            bar.total = len(first) + len(others)
            try_all(others if most is None else others[: max(0, most - len(first))])
        right = sorted((trial for trial in trials if not trial.refusal), key=lambda trial: trial.total)
        streaming, in_turns = turns(ask, finalists(right, shape), trials)
    return Found(trials, streaming, in_turns, left_out)


def tried(ask: Ask, candidate: Candidate) -> Trial:
    answer = ask({"try": as_json(candidate)})
    if "refusal" in answer:
        return Trial(candidate, {}, {}, answer["refusal"])
    errors = answer["errors"]
    wrong = [f"{name} {x:.1e}" for name, x in errors.items() if not x <= TOLERANCE[name]]
    refusal = f"WRONG: {', '.join(wrong)}" if wrong else "" if answer["same"] else "WRONG: moves from call to call"
    return Trial(candidate, answer["seconds"], errors, refusal)


def finalists(right: Sequence[Trial], shape: Shape) -> list[Trial]:
    """The fastest; the fastest two that take no more memory than the rule's chunk, and the fastest with that chunk."""
    allowed = [trial for trial in right if affordable(trial.candidate, shape)]
    own = [trial for trial in right if trial.candidate.chunk is None]
    return list({trial.candidate: trial for trial in [*allowed[:2], *own[:1], *right[:1]]}.values())


def affordable(candidate: Candidate, shape: Shape) -> bool:
    return candidate.chunk is None or candidate.chunk < rule(candidate.tiles, shape).chunk


def turns(ask: Ask, chosen: Sequence[Trial], trials: list[Trial]) -> tuple[dict[str, float], list[Trial]]:
    """Streaming's seconds, and the finalists by their time in turns."""
    if not chosen:
        return {}, []
    answer = ask({"turns": [as_json(trial.candidate) for trial in chosen]})
    if "refusal" in answer:
        trials.append(Trial(chosen[0].candidate, {}, {}, f"in turns: {answer['refusal']}"))
        return {}, []
    streaming, *seconds = answer["seconds"]
    again = [trial._replace(seconds=own) for trial, own in zip(chosen, seconds, strict=True)]
    return streaming, sorted(again, key=lambda trial: trial.total)


def as_json(candidate: Candidate) -> dict[str, Any]:
    return {"tiles": dataclasses.asdict(candidate.tiles), "chunk": candidate.chunk}


class Worker:
    """The trials' process, one at a time; whatever ends it is an answer."""

    def __init__(self, shape: Shape, patience: float = PATIENCE, command: Sequence[str] | None = None) -> None:
        task = json.dumps({"shape": shape, "workspace": WORKSPACE})
        self.command = command or [sys.executable, "-m", "tools.tune_gpu_child", task]
        self.patience = patience
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=self.patience)
        except queue.Empty:
            self.stop()
            return {"refusal": f"stopped after {self.patience:g} s"}
        if line is None:
            return {"refusal": self.ended()}
        answer: dict[str, Any] = json.loads(line)
        if answer.get("spoilt"):
            self.stop()
        return answer

    def start(self) -> None:
        self.said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            self.command,
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, args=(self.process.stdout, self.lines), daemon=True).start()

    @staticmethod
    def _listen(out: Any, lines: "queue.Queue[str | None]") -> None:
        for line in out:
            lines.put(line)
        lines.put(None)

    def ended(self) -> str:
        assert self.process is not None
        code = self.process.wait()
        self.said.seek(0)
        said = self.said.read()
        self.stop()
        by = f"ended by {signal.Signals(-code).name}: " if code < 0 else ""
        return by + (reason(said)[:300] if said.strip() else "it said nothing")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.said.close()
            self.process = None


# --- what is told, and what is noted --------------------------------------------------------------------------------


def told(candidate: Candidate) -> str:
    tiles, chunk = candidate.tiles, "" if candidate.chunk is None else f", {candidate.chunk}"
    return f"{tiles.rows} x {tiles.columns} x {tiles.depth}, {tiles.slots} slots, cluster {tiles.cluster}{chunk}"


def cells(trial: Trial) -> str:
    seconds = "".join(f"{1e3 * trial.seconds[name]:9.2f}" for name in PROGRAMS) if trial.seconds else ""
    errors = "".join(f"{x:9.1e}" for x in trial.errors.values())
    return f"{told(trial.candidate):40}{seconds}{errors}  {trial.refusal}".rstrip()


def lines(found: Found, shape: Shape) -> Iterator[str]:
    heads = ["none ms", "640 MiB", "value", "loss", "stat.", "dh", "dW"]
    yield ""
    yield f"{'tiles, slots, cluster, chunk':40}" + "".join(f"{head:>9}" for head in heads)
    if found.streaming:
        yield f"{'streaming, in turns':40}" + "".join(f"{1e3 * found.streaming[name]:9.2f}" for name in PROGRAMS)
    for trial in found.in_turns:
        yield f"{cells(trial)}  in turns"
    yield from (cells(trial) for trial in sorted(found.trials, key=lambda trial: trial.total))
    if found.left_out:
        yield f"--limit: {found.left_out} candidates were left out"
    for trial in found.in_turns[:1]:
        if not affordable(trial.candidate, shape):
            own = rule(trial.candidate.tiles, shape)
            mib, by_rule = (2 * own.block(shape[0]) * x / 2**20 for x in (trial.candidate.chunk or 0, own.chunk))
            said = f"takes {mib:.0f} MiB; the rule's, {own.chunk}, {by_rule:.0f}"
            yield f"not noted: chunk {trial.candidate.chunk}, the fastest, {said}"


def entry(found: Found, shape: Shape, device: str) -> dict[str, Any]:
    """As gpu_tiles.py reads it: what it is for, the tiles, and the times to compare; then how they were found."""
    own = next(trial for trial in found.in_turns if trial.candidate.chunk is None)
    best = next(trial for trial in found.in_turns if affordable(trial.candidate, shape))  # own is one of them
    if best.total > (1 - CLEARLY) * own.total:
        best = own
    chunk = {} if best is own else {"chunk": best.candidate.chunk}
    return {
        "engine": "mosaic_gpu",
        "device": device,
        "features": shape[1],
        "tiles": dataclasses.asdict(best.candidate.tiles),
        **chunk,
        "seconds": round(best.total, 6),
        "streaming_seconds": round(decisive(found.streaming), 6),
        "by": "time",
        "shape": list(shape),
        "each": {name: round(best.seconds[name], 6) for name in PROGRAMS},
        "streaming_each": {name: round(found.streaming[name], 6) for name in PROGRAMS},
        "jax": jax.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
