"""The model that a run learns from: a second policy, which is loaded as the first and never changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax.sharding import Mesh

from mllm.config.schema import Config
from mllm.errors import UserError
from mllm.model.folder import commit_of
from mllm.model.load import Policy
from mllm.model.tokenizer import Tokenizer
from mllm.run.source_run import SourceRun, load_policy


@contextmanager
def naming() -> Iterator[None]:
    """Let errors of loading a model name the teacher."""
    try:
        yield
    except UserError as error:
        text = str(error)
        raise UserError(f"teacher{'' if text.startswith('model.') else ': '}{text.removeprefix('model')}") from None


def load_teacher(config: Config, mesh: Mesh, student: Tokenizer) -> Policy | None:
    """The teacher of a configuration without its parameters; None where it has none.

    UserError is raised as by `load_policy`, and where the two tokenizers differ in a token of the student's.
    """
    if config.teacher is None:
        return None
    with naming():
        policy = load_policy(config.model_copy(update={"model": config.teacher.model(config.model)}), mesh)
    check_tokens(config.teacher.source, student, policy.tokenizer)
    return policy


def pin_teacher(config: Config) -> Config:
    """A new run's configuration with the number of its teacher's step, where that is a run's, or its commit."""
    if config.teacher is None:
        return config
    with naming():
        run = SourceRun.open(config.teacher.model(config.model))
        pinned: dict[str, Any] = {"step": run.choose_step(config.teacher.step)} if run else {}
        if not run:
            pinned["revision"] = commit_of(config.teacher.source, config.teacher.revision, "model.source")
    return config.model_copy(update={"teacher": config.teacher.model_copy(update=pinned)})


def check_tokens(source: str, student: Tokenizer, teacher: Tokenizer) -> None:
    """UserError where an id of the student's tokenizer is another token, or none, of the teacher's."""
    tokens = {number: token for token, number in teacher.get_vocab().items()}
    for number, token in sorted((number, token) for token, number in student.get_vocab().items()):
        if tokens.get(number) != token:
            fault = (
                f"{source}: token {number} is {tokens.get(number)!r} there, and {token!r} of the student's tokenizer"
            )
            raise UserError(f"teacher.source: {fault}; give a teacher with the student's tokens")
