"""A run in a bucket as a folder of this machine, to be read: by the tools, and as another run's `model.source`.

The folder has the configuration, the logs and the skipped batches. Of the checkpoints only the lists are fetched;
who reads one fetches what he needs by `mllm.run.remote`.
"""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

from mllm.bucket import Bucket, is_bucket, local_place, part_name, parts_of
from mllm.errors import UserError
from mllm.fetch import OBJECTS, fetch, locked, naming
from mllm.run.storage import is_run


def run_folder(run: str) -> Path:
    """The folder of a tool's argument, as `find_run`; UserError where a bucket has no run there."""
    found = find_run(run, "RUN")
    if found is None and is_bucket(run):
        raise UserError(f"{run}: no config.yaml; give a run_dir")
    return found or Path(run)


def find_run(run: str, key: str) -> Path | None:
    """The folder of a run, or one that stands for it where it is in a bucket; None where no run is there.

    UserError, which names the setting or argument `key`, is raised where a bucket can't be read. Nothing heavy is
    imported unless it is one.
    """
    if not is_bucket(run):
        with suppress(OSError, RuntimeError):  # a name that no folder can have
            folder = Path(run).expanduser()
            return folder if is_run(folder) else None
        return None
    from mllm.run.metrics import RECORDS
    from mllm.run.mirror import read_list
    from mllm.run.remote import LIST, stand_in

    bucket = Bucket(run)
    folder = local_place(bucket.url, OBJECTS)
    with naming(key):
        names = bucket.names()
        if "config.yaml" not in names:
            return None
        listed = {name: bucket.read(name) or b"" for name in names if re.fullmatch(r"checkpoints/\d+\.json", name)}
    lists = {int(name[12:-5]): found for name, content in listed.items() if (found := read_list(content))}
    wanted = re.compile(rf"config\.yaml|skipped/.*|({'|'.join(RECORDS)})\.\d{{15}}")
    fetch(run, [name for name in names if wanted.fullmatch(name)], key)
    with naming(key), locked(folder):
        for log in RECORDS:
            content = b""
            for offset in parts_of(names, log):
                if offset == len(content):  # others are of a process that was killed: they are written again
                    content += (folder / part_name(log, offset)).read_bytes()
            (folder / f"{log}.tmp").write_bytes(content)
            (folder / f"{log}.tmp").replace(folder / log)
        for checkpoint in (folder / "checkpoints").glob("*"):
            with suppress(OSError, ValueError, KeyError):
                if json.loads((checkpoint / LIST).read_text())["prefix"] == lists[int(checkpoint.name)]["prefix"]:
                    lists.pop(int(checkpoint.name))
                    continue
            shutil.rmtree(checkpoint)
        for step, found in lists.items():
            stand_in(folder / "checkpoints" / str(step), bucket.url, found)
    return folder
