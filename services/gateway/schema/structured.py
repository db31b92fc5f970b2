"""Request fields that say what an output must look like."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from services.gateway.schema.fields import Flag, Lenient


class JsonSchemaFormat(Lenient):
    """A named JSON schema."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), populate_by_name=True)

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Lenient):
    """`{"type": ...}`; a structural tag brings its `format`, or the older `structures`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(
        description='"text", "json_object", "json_schema" or "structural_tag"'
    )
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Lenient):
    """Exactly one of the forms, and options of JSON, as vLLM has them."""

    json_: Any = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Flag | None = None
    structural_tag: Any = None
    disable_any_whitespace: Flag | None = None
    disable_additional_properties: Flag | None = None
    whitespace_pattern: str | None = None

    @staticmethod
    def names() -> tuple[str, ...]:
        """The forms."""
        return ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

    def forms(self) -> dict[str, Any]:
        """Those that are given."""
        values = (
            self.json_, self.regex, self.choice, self.grammar, self.json_object,
            self.structural_tag,
        )  # fmt: skip
        pairs = zip(self.names(), values, strict=True)
        return {name: value for name, value in pairs if value is not None and value is not False}
