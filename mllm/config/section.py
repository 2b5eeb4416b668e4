"""The base of every section of a configuration. Sections are immutable and refuse keys that they don't define."""

from collections.abc import Iterator
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator
from pydantic_core import PydanticCustomError

LARGEST_NUMBER = 2**31 - 1
"""The largest whole number in a setting, because JAX counts in int32."""


class Section(BaseModel):
    """A group of settings; immutable, and closed to keys that it doesn't define."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def check_numbers(cls, given: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        made, written = make(given), given if isinstance(given, dict) else {}
        for name, value in made:
            if isinstance(written.get(name), bool) and written[name] is not value:  # pydantic takes true for 1
                raise impossible(name, f"expected a number (got {written[name]})")
            if isinstance(value, int) and value > LARGEST_NUMBER:
                raise impossible(name, f"the number is too large: at most {LARGEST_NUMBER}")
        return made


def impossible(key: str, message: str) -> PydanticCustomError:
    """The error of a setting that can't work; `key` is relative to the section that raises it."""
    return PydanticCustomError("impossible", "{key}\n{message}", {"key": key, "message": message})


def keys_of(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted key of each setting and section of a schema; a list of sections has the keys of one section."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        for annotation in (field.annotation, *get_args(field.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, Section):
                yield from keys_of(annotation, f"{prefix}{name}.")
