"""A run's numbers in Weights & Biases, which reads TensorBoard's events. Trouble there never ends or changes a run."""

import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mllm.config.schema import Config, LogConfig
from mllm.errors import UserError, brief
from mllm.parallel.processes import is_writer
from mllm.store.run_store import RunStore

SECONDS = 60
"""The longest that a run waits: for an answer when it begins, and for the upload when it ends."""
ID = "wandb/id"
"""The file of a run with its identity in W&B."""
logger = logging.getLogger(__name__)


def check(log: LogConfig) -> None:
    """UserError is raised where `log.wandb` is set and the package is missing, in the process that would use it."""
    if log.wandb is None or not is_writer():
        return
    try:
        from wandb import init  # noqa: F401  (a folder of that name can be imported, too)
    except ImportError:
        raise UserError("log.wandb: the package is missing: pip install wandb, or remove the setting") from None


class Wandb:
    """W&B's run for a run_dir, which resumes with it and gets the events of all files that are opened from now on.

    After the first error, which is a warning, nothing more is sent.
    """

    def __init__(self, store: RunStore, config: Config) -> None:
        """Begin or resume the run."""
        self.run: Any = None
        with self.optional():
            import wandb

            self.run = wandb.init(
                project=config.log.wandb,
                id=run_id(store),
                name=Path(store.url).absolute().name,
                dir=str(store.folder),
                resume="allow",
                sync_tensorboard=True,
                config=config.model_dump(mode="json"),
                allow_val_change=True,
                settings=wandb.Settings(console="off", quiet=True, init_timeout=SECONDS, finish_timeout=SECONDS),
            )

    def close(self) -> None:
        """Send what is left; the file of events must be closed by now."""
        if self.run is not None:
            with self.optional():
                self.run.finish()

    @contextmanager
    def optional(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # from the network, the service's process, or the library itself
            self.run = None
            logger.warning("log.wandb: %s; the run goes on without it", brief(error))


def run_id(store: RunStore) -> str:
    """The run's id in W&B: random, and kept in the run beside the places that it was made for.

    A moved run keeps it, since its path or its folder's device and inode are known; a copied run gets another.
    """
    places = [store.url]
    if not store.in_bucket:
        about = store.folder.stat()
        places = [str(store.folder.resolve()), f"{about.st_dev} {about.st_ino}"]
    known = json.loads(store.read(ID) or '{"id": null, "places": []}')
    number = secrets.token_hex(8) if {*places}.isdisjoint(known["places"]) else known["id"]
    store.write(ID, json.dumps({"id": number, "places": places}).encode())
    return number
