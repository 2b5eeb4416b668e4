"""Which problems of a list are held out for evaluation, and so never trained on."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from mllm.data.tasks.task import Example, Scorer, Task
from mllm.errors import UserError

log = logging.getLogger(__name__)


def hold_out(
    name: str, problems: Sequence[Example], heldout: int, test: Sequence[Example] | None, scorer: Scorer | None = None
) -> Task:
    """The task that trains on `problems` without its test set's, and without `heldout` of them that are held out.

    Those are the problems whose prompts have the smallest hashes: the same in every run, in whatever order the
    problems are listed, and almost the same when some are added. A prompt that is listed twice counts as one.
    UserError is raised if nothing is left to train on.
    """
    tested = {prompt_hash(example) for example in test or ()}
    hashes = [prompt_hash(example) for example in problems]
    listed = {key: example for key, example in zip(hashes, problems, strict=True) if key not in tested}
    chosen = sorted(listed)[:heldout]
    trained = listed.keys() - {*chosen}
    train = [example for key, example in zip(hashes, problems, strict=True) if key in trained]
    if not train or len(chosen) < heldout:
        beside = " that are not in its test set" if tested else ""
        raise UserError(
            f"task.heldout: {heldout} of task {name}'s {len(listed)} problems{beside} leave none to train on: "
            "set it lower, or give more problems"
        )
    if left_out := sum(key in tested for key in hashes):
        log.warning("task %s: %d training problems are in its test set and are left out", name, left_out)
    return Task(name, train, [listed[key] for key in chosen], test, scorer, content_hash([*problems, *(test or ())]))


def prompt_hash(example: Example) -> str:
    """A hash of the prompt's roles and texts."""
    return digest([[message["role"], message["content"]] for message in example.prompt])


def content_hash(examples: Iterable[Example]) -> str:
    """A hash of all that rewards and SFT know of the examples."""
    return digest([(prompt_hash(e), e.answer, e.solution, e.answer_form, digest({**e.fields})) for e in examples])


def digest(value: Any) -> str:
    """A hash of a value of JSON; whatever else a function may have put into it counts by its type alone."""
    try:
        text = json.dumps(value, default=lambda other: type(other).__name__, skipkeys=True)
    except (ValueError, RecursionError):  # it holds itself
        text = type(value).__name__
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
