"""A run's numbers for Weights & Biases, the same as for TensorBoard. Trouble there never ends or changes a run."""

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mllm.config.schema import Config, LogConfig
from mllm.errors import UserError, brief
from mllm.parallel.processes import is_writer
from mllm.store.run_store import RunStore

SECONDS = 60
"""How long a run waits at most: for an answer when it begins, and for the upload when it ends."""
ID = "wandb/id"
"""The file of a run with its identity there."""
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
    """One run there for a run_dir, which resumes with it. After the first error, a warning, nothing more is sent."""

    def __init__(self, store: RunStore, config: Config) -> None:
        """Begin or resume the run."""
        self.run: Any = None
        with self.optional():
            import wandb

            if (number := store.read(ID)) is None:  # not made from the folder's name, which a new run may get one day
                store.write(ID, number := secrets.token_hex(8).encode())
            self.run = wandb.init(
                project=config.log.wandb,
                id=number.decode(),
                name=Path(store.url).absolute().name,
                dir=str(store.local_folder),
                resume="allow",
                config=config.model_dump(mode="json"),
                allow_val_change=True,
                settings=wandb.Settings(console="off", quiet=True, init_timeout=SECONDS, finish_timeout=SECONDS),
            )

    def send(self, step: int, record: Mapping[str, Any]) -> None:
        """Send a step's numbers, to which the step's other records add, unless they were sent before a resume."""
        if self.run is not None and step >= self.run.starting_step:
            with self.optional():
                self.run.log(dict(record), step=step)

    def close(self) -> None:
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
