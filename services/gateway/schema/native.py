"""Request of POST /inference/v1/generate: tokens in, tokens out."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from services.gateway.schema.fields import Flag, Int, Lenient
from services.gateway.schema.sampling import StreamOptions, TokenId


class TokensRequest(Lenient):
    """Body of the endpoint. `sampling_params` has the sampling fields of a completion."""

    model: str | None = Field(None, description="the name of a served model")
    request_id: str | None = Field(
        None,
        pattern=r"^[\x21-\x7e]{1,256}$",
        description="a text of 1 to 256 printable ASCII characters without spaces",
    )
    token_ids: Annotated[list[TokenId], Field(min_length=1)] = Field(
        description="a non-empty list of token ids"
    )
    sampling_params: dict[str, Any] | None = Field(None, description="an object")
    stream: Flag | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description="an object")
    cache_salt: str | None = Field(None, description="a text")
    priority: Int | None = Field(None, description="a 64-bit integer")

    def completion_fields(self) -> dict[str, Any]:
        """Fields of the completion request of the same meaning."""
        own = self.model_dump(exclude_none=True, exclude={"token_ids", "sampling_params"})
        return {**(self.sampling_params or {}), **own, "prompt": self.token_ids}
