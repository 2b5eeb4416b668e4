"""The model that a run learns from: a second policy, which is loaded as the first and never changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax.sharding import Mesh

from mllm.config.schema import Config
from mllm.errors import UserError
from mllm.model.load import Policy
from mllm.model.tokenizer import Tokenizer
from mllm.run.source_run import load_policy, pin


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


def pin_all(config: Config) -> Config:
    """A new run's configuration with what must stay as it is now of its model, and of its teacher: see `pin`."""
    changes: dict[str, Any] = {"model": config.model.model_copy(update=pin(config.model))}
    if config.teacher is not None:
        with naming():
            changes["teacher"] = config.teacher.model_copy(update=pin(config.teacher.model(config.model)))
    return config.model_copy(update=changes)


def check_tokens(source: str, student: Tokenizer, teacher: Tokenizer) -> None:
    """UserError where an id of the student's tokenizer is another token, or none, of the teacher's."""
    tokens = {number: token for token, number in teacher.get_vocab().items()}
    for number, token in sorted((number, token) for token, number in student.get_vocab().items()):
        if tokens.get(number) != token:
            fault = (
                f"{source}: token {number} is {tokens.get(number)!r} there, and {token!r} of the student's tokenizer"
            )
            raise UserError(f"teacher.source: {fault}; give a teacher with the student's tokens")
