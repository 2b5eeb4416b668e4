"""What tools/gpu.py keeps in its folder: which jobs are done, and of all runs of the bench one table, JSON and plot.

A shape may have taken several runs, each of which has left out what the one before it had measured or had no time for.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mllm.errors import UserError

MEASURED, LEFT_OUT = "measured", "left out"
STATE = "gpu.json"

Report = dict[str, Any]


def read_state(folder: Path) -> dict[str, Any]:
    """Of the calls before this one; empty, if there was none.

    Raises:
        UserError: the file is something else.
    """
    path = folder / STATE
    if not path.exists():
        return {}
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state["device"]["kind"], str) and isinstance(state["jobs"], dict):
            return dict(state)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"--out: {path} was not written by this tool: give another folder")


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """As a whole, or not at all."""
    part = folder / f"{STATE}.part"
    part.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / STATE)


# --- the bench ------------------------------------------------------------------------------------------------------


def files(folder: Path, subject: str = "*") -> list[Path]:
    """The reports of a subject, a shape and inputs by whatever name, or of all; in the order of their writing."""
    found = (folder / "bench").glob(f"{subject}.*.json")
    return sorted(found, key=lambda path: (path.stat().st_mtime, path.name))


def next_file(folder: Path, subject: str) -> Path:
    return folder / "bench" / f"{subject}.{len(files(folder, subject)) + 1}.json"


def left_out(folder: Path, subject: str) -> list[str]:
    """Methods for which there was no time yet."""
    rows = [row for table in tables(folder, subject) for row in table["methods"]]
    return list(dict.fromkeys(row["method"] for row in rows if row["status"] == LEFT_OUT))


def tables(folder: Path, subject: str = "*") -> list[dict[str, Any]]:
    """One for each subject and share of rows that count; of a method that was tried again, what came of it last."""
    result: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in files(folder, subject):
        for table in json.loads(path.read_text(encoding="utf-8"))["results"]:
            about = tuple(table[key] for key in ("N", "D", "V", "peak", "live"))
            whole = result.setdefault(about, {**table, "methods": []})
            rows = {row["method"]: row for row in whole["methods"]}
            for row in table["methods"]:
                if rows.get(row["method"], row)["status"] != MEASURED or row["status"] == MEASURED:
                    rows[row["method"]] = row
            whole["methods"] = list(rows.values())
    return list(result.values())


def gather(folder: Path) -> Iterator[str]:
    """bench.json, bench.txt and bench.png of all that was measured; tells what hinders it."""
    reports = files(folder)
    if not reports:
        return
    found = tables(folder)
    first = json.loads(reports[0].read_text(encoding="utf-8"))
    (folder / "bench.json").write_text(json.dumps({**first, "results": found}, indent=1) + "\n", encoding="utf-8")
    try:
        from tools import bench_plot, bench_report
    except ImportError as error:
        yield f"bench: no table and no plot: {error}"
        return
    lines = [line for table in found for line in ("", *bench_report.lines(table))]
    (folder / "bench.txt").write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")
    heading = f"{first['device']['kind']}, jax {first['versions']['jax']}, {first['dtype']}, {first['date'][:10]}"
    bench_plot.draw(found, heading, folder / "bench.png")
