"""What every section of a configuration has in common: it is immutable, and closed to keys that it does not define."""

from collections.abc import Iterator
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

LARGEST_NUMBER = 2**31 - 1
"""The largest whole number in a setting, because JAX counts in int32."""


class Section(BaseModel):
    """A group of settings; immutable, and closed to keys that it doesn't define."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="after")
    def check_whole_numbers(self) -> Self:
        for name, value in self:
            if isinstance(value, int) and value > LARGEST_NUMBER:
                raise impossible(name, f"the number is too large: at most {LARGEST_NUMBER}")
        return self

    def reject_unused(self, because: str, *names: str) -> None:
        """Raise for the first of `names` that is set to something other than its default."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise impossible(name, f"is not used {because}: remove it")


def impossible(key: str, message: str) -> PydanticCustomError:
    """The error of a setting that contradicts another; `key` is relative to the section that raises it."""
    return PydanticCustomError("impossible", "{key}\n{message}", {"key": key, "message": message})


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a setting of this type is, or is a list of; None where it is a value."""
    kinds = (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    return next((kind for kind in kinds if issubclass(kind, Section)), None)


def fields_of(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Each setting and section of a schema, with its dotted key."""
    for name, field in schema.model_fields.items():
        yield prefix + name, field
        if section := section_of(field.annotation):
            yield from fields_of(section, f"{prefix}{name}.")
