"""A run's place belongs to one configuration, and to one run of processes at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from mllm.config.load import dump, read
from mllm.config.schema import Config
from mllm.errors import UserError
from mllm.parallel.processes import is_writer, raise_everywhere
from mllm.run.changes import check_changes
from mllm.run.source_run import pin_step
from mllm.store.folder import UNFINISHED
from mllm.store.lock import hold
from mllm.store.run_store import CONFIG, LOCK, RunStore


@contextmanager
def claim(config: Config, change: bool = False) -> Iterator[tuple[RunStore, Config]]:
    """Check the place of a configuration's run as `check` does, and hold it; all processes must enter this.

    The configuration of a new run has a number for `model.step`, from which its reference policy can be had again.
    """
    store = RunStore(config.run_dir)
    with raise_everywhere():
        check(store, config, change)
    with hold(store):
        with raise_everywhere():
            config = check(store, config, change)  # another process may have held it until now
            if not store.is_run():
                config = pin_step(config)
        yield store, config


def check(store: RunStore, config: Config, change: bool = False) -> Config:
    """The configuration with which the run there goes on, or a new one begins: with the record of its changes.

    `change` permits settings to differ as `check_changes` says. UserError is raised if the place holds a run of
    another configuration, or something that is no run.
    """
    for path in (store.folder, *store.folder.parents) if store.folder else ():
        if path.is_file():
            raise UserError(f"run_dir: {path} is a file; give a folder")
    entries = store.entries()
    if CONFIG not in entries:
        # A run that was killed before it began leaves these two.
        if {*entries} - {CONFIG + UNFINISHED, LOCK}:
            raise UserError(f"run_dir: {store} holds other files and no config.yaml; give an empty or new folder")
        if change:
            raise UserError(f"--change: {store} holds no run; leave it out to begin one")
        return config.model_copy(update={"changes": ()})
    newest = max(store.steps(), default=0)
    return check_changes(store, read(store.local(CONFIG)), config, newest, change)


def write(store: RunStore, config: Config) -> None:
    """Write the run's config.yaml, in the first of several processes; UserError where it can't be written."""
    if is_writer():
        store.write(CONFIG, dump(config).encode())
