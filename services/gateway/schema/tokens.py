"""Requests of the endpoints that only turn text into tokens and back."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from services.gateway.schema.chat import ChatRequest
from services.gateway.schema.fields import Flag, Lenient
from services.gateway.schema.sampling import TokenId

MAX_TOKENS = 1 << 22


class TokenizeText(Lenient):
    """Body of POST /tokenize with a plain text."""

    model: str | None = Field(None, description="the name of a served model")
    prompt: str = Field(description="a text")
    add_special_tokens: Flag | None = Field(None, description="true or false")
    return_token_strs: Flag | None = Field(None, description="true or false")


class TokenizeChat(ChatRequest):
    """Body of POST /tokenize with a conversation."""

    return_token_strs: Flag | None = Field(None, description="true or false")


class Detokenize(Lenient):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="the name of a served model")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)] = Field(
        description="a list of token ids"
    )
