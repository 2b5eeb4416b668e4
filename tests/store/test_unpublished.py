"""What cut-off saves have left is removed at the next start, and nothing of a checkpoint, published or put aside.

The chunks of a checkpoint are in a folder STEP-TOKEN.NUMBER: of the process group that wrote it, and of its save.
"""

import pytest
from states import opened, save
from test_checkpoint import both, flip_bits, restored

pytestmark = both
HOLDERS = [f"{token}.{number}" for token in ("0123abcd", "89abcdef") for number in (0, 3)]


def files(store, folder="checkpoints"):
    """All files below a folder."""
    names = [f"{folder}/{name}" for name in store.entries(folder)]
    return [file for name in names for file in files(store, name) or [name]]


@pytest.fixture
def published(store):
    """The files of checkpoints 1 and 2, and of three that were put aside as 3."""
    save(store, 1, 2)
    for _ in range(3):
        save(store, 3, keep=3)
        flip_bits(store, 3)
        restored(store)
    assert {"1.json", "2.json", "damaged_3_again_again.json"} < {*store.entries("checkpoints")}
    return files(store)


def leave(store, *steps):
    """Write what every holder has left of saves of some steps: a chunk of one process, and half of one of another's."""
    left = [f"checkpoints/{step}-{by}/{name}" for step in steps for by in HOLDERS for name in ("a/0.1", "b/0.__lock")]
    for name in left:
        store.write(name, b"?")
    return left


def test_the_parts_of_every_holder_are_removed_and_all_checkpoints_stay(store, published):
    leave(store, 2, 3, 7, 10)
    store.write("checkpoints/7.json.tmp", b"{")  # a disk writes a manifest under this name first
    with opened(store):
        assert files(store) == published


def test_the_parts_of_a_step_stay_where_its_manifest_does_not_say_which_of_them_are_its_own(store, published):
    for name in ("2.json", "damaged_3.json"):
        store.write(f"checkpoints/{name}", b"{")
    leave(store, 1, 7, 20, 30)
    unknown = leave(store, 2, 3)
    with opened(store):
        assert files(store) == sorted([*published, *unknown])


def test_a_file_that_is_none_of_a_save_s_stays(store, published):
    others = [f"checkpoints/{name}" for name in ("notes.txt", "7-of-mine/a", "x7-0123abcd.0/a")]
    for name in others:
        store.write(name, b"mine")
    with opened(store):
        assert files(store) == sorted([*published, *others])
