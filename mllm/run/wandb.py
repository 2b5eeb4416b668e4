"""A run's numbers in Weights & Biases, which reads TensorBoard's events. Trouble there never ends or changes a run."""

import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mllm.config.schema import Config
from mllm.errors import brief
from mllm.store.run_store import RunStore

SECONDS = 60
"""The longest that a run waits: for an answer when it begins, and for the upload when it ends."""
ID = "wandb/id"
"""The file of a run with its identity in W&B."""
logger = logging.getLogger(__name__)


@contextmanager
def optional() -> Iterator[None]:
    """Turn an error, from the network, the service's process or the library itself, into a warning."""
    try:
        yield
    except Exception as error:
        logger.warning("log.wandb: %s; the run goes on without it", brief(error))


@contextmanager
def sending(store: RunStore, config: Config) -> Iterator[None]:
    """Begin or resume W&B's run for a run_dir, which gets the events of all files that are opened inside.

    What is left is sent at the end; the file of events must be closed by then.
    """
    run = None
    with optional():
        import wandb

        run = wandb.init(
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
    yield
    if run is not None:
        with optional():
            run.finish()


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
