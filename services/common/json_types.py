"""Names of JSON Schema for the types of JSON values."""

from __future__ import annotations


def json_type(value: object) -> str:
    """The type of a value that came from JSON text; a number without a fraction is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
