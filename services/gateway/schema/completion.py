"""Request of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from services.gateway.schema.fields import UINT32_MAX, Flag, Int, wrong
from services.gateway.schema.sampling import SamplingRequest, TokenId

MAX_PROMPTS = 1024
_WANTED = f"a non-empty text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and 0 <= item <= UINT32_MAX for item in value)
    )


def _prompts(value: Any) -> list[str | list[int]]:
    """All forms of `prompt` as a list of texts and id lists."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PROMPTS:
        raise wrong(_WANTED)
    if not all((isinstance(p, str) and p) or _is_ids(p) for p in value):
        raise wrong(_WANTED)
    return value


_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[TokenId], Field(min_length=1)]
_List = Annotated[list[_Text | _Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[
    list[Any], BeforeValidator(_prompts, json_schema_input_type=_Text | _Ids | _List)
]


class CompletionRequest(SamplingRequest):
    """Body of a completion. `prompt` is normalised to a list of texts and id lists."""

    prompt: Prompts = Field(description=_WANTED)
    suffix: str | None = Field(None, description="a text")
    echo: Flag | None = Field(None, description="true or false")
    logprobs: Int | None = Field(None, ge=-1, description="an integer of at least -1")

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None
