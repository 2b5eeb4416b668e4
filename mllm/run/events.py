"""A run's numbers as TensorBoard's events, by tensorboardX's SummaryWriter, and in Weights & Biases, which reads them.

Trouble with either never ends or changes a run.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter, event_file_writer
from tensorboardX.summary import Summary, scalar

from mllm.config.run import RunConfig
from mllm.errors import brief
from mllm.run.store import RunStore

FLUSH_SECONDS = 2
"""How old events are at most when TensorBoard sees them; a killed run loses no more."""
WANDB_LIMITS = {"init_timeout": 60, "finish_timeout": 60}
"""The most seconds that a run waits for W&B: for an answer when it begins, and for the upload when it ends."""
WANDB_ID = "wandb.json"
"""The file of a run with its identity in W&B."""
logger = logging.getLogger(__name__)


@contextmanager
def optional(what: str) -> Iterator[None]:
    """Turn an error, from the disk, the network, a service's process or the library itself, into a warning."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s; the run goes on without it", what, brief(error))


class TolerantWriter(event_file_writer.EventsWriter):
    """tensorboardX's writer of a file, which gives up with a warning at the first error, such as a full disk.

    An error would end the thread that writes, and the run would then wait for room in that thread's queue for ever.
    """

    failed = False

    def write_event(self, event: Any) -> None:
        self.attempt(super().write_event, event)

    def flush(self) -> None:
        self.attempt(super().flush)

    def close(self) -> None:
        self.attempt(super().close)

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        if not self.failed:
            with optional("TensorBoard's events"):
                try:
                    action(*arguments)
                except OSError:
                    self.failed = True
                    raise


event_file_writer.EventsWriter = TolerantWriter


def open_events(folder: Path, first_step: int) -> SummaryWriter:
    """Open a new event file in a folder, which is created if missing; raises OSError.

    TensorBoard hides earlier files' events at `first_step` and later.
    """
    suffix = f".{time.time_ns()}"
    return SummaryWriter(str(folder), purge_step=first_step, flush_secs=FLUSH_SECONDS, filename_suffix=suffix)


def write_numbers(events: SummaryWriter, step: int, numbers: Mapping[str, float | int]) -> None:
    """Add numbers, all finite, to a step's events: as one event, where add_scalar makes many."""
    values = [value for name, number in numbers.items() for value in scalar(name, number).value]
    events.file_writer.add_summary(Summary(value=values), step)


@contextmanager
def wandb_run(store: RunStore, config: RunConfig) -> Iterator[None]:
    """Begin or resume the W&B run of a run_dir. It receives all event files that are opened inside.

    The rest is sent at the end; the event file must be closed by then.
    """
    import wandb

    with optional("log.wandb"):
        wandb.init(
            project=config.log.wandb,
            id=run_id(store),
            name=Path(store.url).absolute().name,
            dir=str(store.folder),
            resume="allow",
            sync_tensorboard=True,
            config=config.model_dump(mode="json"),
            allow_val_change=True,
            settings=wandb.Settings(console="off", quiet=True, **WANDB_LIMITS),
        )
    yield
    with optional("log.wandb"):
        wandb.finish()


def run_id(store: RunStore) -> str:
    """The run's random id in W&B, stored in the run with its folder's name; a copied run gets a new id."""
    known = json.loads(store.read(WANDB_ID) or "{}")
    if known.get("place") != store.url:
        known = {"id": secrets.token_hex(8), "place": store.url}
        store.write(WANDB_ID, json.dumps(known).encode())
    return str(known["id"])
