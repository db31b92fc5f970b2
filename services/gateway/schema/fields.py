"""Building blocks of the request models.

The description of a field is what error messages say that it must be.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

Int = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT32_MAX = 2**32 - 1


class Lenient(BaseModel):
    """Base of all request models: fields that are not known are ignored, null means absent."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), use_enum_values=True)


def wrong(message: str) -> PydanticCustomError:
    """An error of a field validator; `message` says what the field must be."""
    return PydanticCustomError("wrong_value", "{wanted}", {"wanted": message})


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _integer_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise wrong("an object from token ids, as decimal text, to numbers") from None


StringOrStrings = Annotated[
    list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])
]
TokenBiases = Annotated[
    dict[int, Number],
    BeforeValidator(
        _integer_keys,
        json_schema_input_type=dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Number],
    ),
]
