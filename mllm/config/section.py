"""What every section of a configuration has in common: it is immutable, and closed to keys that it does not define."""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

LARGEST_NUMBER = 2**31 - 1
"""The largest whole number in a setting, because JAX counts in int32."""


class Section(BaseModel):
    """A group of settings; immutable, and closed to keys that it doesn't define."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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
