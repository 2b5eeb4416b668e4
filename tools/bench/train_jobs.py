"""Measurements in processes of their own, one after the other: recorded as they end, resumed, and stopped at a limit.

Nothing is measured twice: what the file of an earlier run holds, with the same settings on the same device, is taken
from there. Failures are tried again; that a program ran out of memory is a result.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mllm.errors import UserError
from mllm.model.json_file import read_json
from mllm.plan.assignment import reason

CHILD = Path(__file__).with_name("train_child.py")
SHORTEST = 15.0
"""Seconds that must be left for another measurement to begin."""

RATES = ("matmul_flops", "copy_bytes")
"""Of the device, as measured in the same run."""

Result = dict[str, Any]
Measure = Callable[[dict[str, Any], float | None, Callable[[str], None]], Result]
"""(settings, seconds left or None, tell) -> what came of it, as bench_train_child.py says it."""


class OutOfTime(Exception):
    """The limit has come, before or in the middle of a measurement."""


class Jobs:
    """The measurements of a run and of those before it, by name."""

    def __init__(self, path: Path | None, command: str, limit: float | None, measure: Measure) -> None:
        """Raises UserError where `path` holds something else."""
        self.path = path
        self.command = command
        self.deadline = None if limit is None else time.monotonic() + limit
        self.measure = measure
        self.device: Result = {}
        self.recorded: dict[str, dict[str, Any]] = {}
        self.expected = 0
        """Measurements that are still to come, about."""
        self.took: list[float] = []
        if path is not None and path.exists():
            before = read_json(path)
            if not isinstance(before.get("jobs"), dict) or not isinstance(before.get("device"), dict):
                raise UserError(f"--json: {path} was not written by this tool: give another file")
            self.device, self.recorded = before["device"], before["jobs"]

    def find_device(self, settings: dict[str, Any]) -> None:
        """Measure the device's rates, and see that it is the one that the file tells of."""
        found = self.run({"what": "device", **settings}, "device")
        if "matmul_flops" not in found:
            raise UserError(f"the device can't be measured: {found.get('error') or found['out_of_memory']}")
        for key, what in (("kind", "on"), ("jax", "with JAX")):
            if self.device and self.device[key] != found[key]:
                raise UserError(
                    f"--json: {self.path} was measured {what} {self.device[key]}, and this is {found[key]}: "
                    "give another file"
                )
        self.device = found
        self.write()

    def result(self, name: str, settings: dict[str, Any]) -> Result:
        """What came of a measurement, in this run or before it.

        Raises:
            OutOfTime: the limit came first.
            UserError: the file has it with other settings.
        """
        before = self.recorded.get(name)
        if before is not None:
            if before["settings"] != settings:
                raise UserError(f"--json: {self.path} has {name} with other settings: give another file")
            self.expected = max(self.expected - 1, 0)
            return before["result"]
        start = time.monotonic()
        result = self.run(settings, name)
        self.took.append(time.monotonic() - start)
        self.expected = max(self.expected - 1, 0)
        print(f"{name}: {outcome(result)}, {self.took[-1]:.0f} s{self.eta()}", flush=True)
        if "error" not in result:
            self.record(name, settings, result)
        return result

    def record(self, name: str, settings: dict[str, Any], result: Result) -> None:
        """Keep what was measured, or found by measurements."""
        rates = {rate: self.device[rate] for rate in RATES}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.recorded[name] = {"date": now, "rates": rates, "settings": settings, "result": result}
        self.write()

    def run(self, settings: dict[str, Any], name: str) -> Result:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left < SHORTEST:
            raise OutOfTime
        return self.measure(settings, left, lambda text: print(f"  {name}: {text}", flush=True))

    def eta(self) -> str:
        if not self.expected:
            return ""
        seconds = self.expected * sum(self.took) / len(self.took)
        return f"; about {self.expected} to come, {seconds / 60:.0f} min"

    def write(self) -> None:
        """All that is known so far, at once or not at all."""
        if self.path is None:
            return
        content = {"command": self.command, "device": self.device, "jobs": self.recorded}
        part = self.path.with_name(self.path.name + ".part")
        try:
            part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(part, self.path)
        except OSError as error:
            raise UserError(f"--json: {self.path} can't be written ({error.strerror})") from None


def outcome(result: Mapping[str, Any]) -> str:
    if "out_of_memory" in result:
        return f"out of memory ({result['out_of_memory']})"
    return f"failed ({result['error']})" if "error" in result else "done"


def in_process_of_its_own(settings: dict[str, Any], seconds: float | None, tell: Callable[[str], None]) -> Result:
    """Raises OutOfTime when the process had to be ended."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages,
        subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(settings)], stdout=subprocess.PIPE, stderr=messages, text=True
        ) as process,
    ):
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, end)
        timer.daemon = True
        timer.start()
        result: Result | None = None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                if "progress" in event:
                    tell(event["progress"])
                else:
                    result = event
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
        messages.seek(0)
        said = messages.read()
    if result is not None:
        return result
    if late.is_set():
        raise OutOfTime
    if code == -9:
        return {"out_of_memory": "killed by signal 9, as Linux does when the host's memory is full"}
    return {"error": f"killed by signal {-code}" if code < 0 else reason(said)}
